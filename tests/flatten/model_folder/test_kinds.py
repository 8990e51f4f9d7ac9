"""What a folder becomes: by the class and task of its model, its positions, its types of tokens, and half precision."""

import json

import pytest
import torch
import transformers

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import made, restate, run_file, word_tokenizer
from tests.models import SIZES
from tests.transformers_versions import is_older_than, needs_transformers
from yobx_flatten import DecodeSizes, OnnxGenerator, decode_inputs, export_folder, open_generator, open_model
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.errors import GenerationError, InvalidArgumentError, ModelSourceError
from yobx_flatten.huggingface.cases import why_not_resizable
from yobx_flatten.model_folder.pieces.tasks import has_types, pieces_for
from yobx_flatten.model_folder.pieces.text import positions_of
from yobx_flatten.model_folder.pieces.vision_language import TiledVisionEncoder
from yobx_flatten.model_folder.source.configuration import class_for, small_config, small_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("speech_to_text", "is an audio encoder-decoder unlike Whisper: its configuration has no num_mel_bins"),
        ("xlstm", "takes no past_key_values"),
    ],
)
def test_a_model_that_no_folder_is_known_for_is_refused_with_the_reason(name, words):
    with pytest.raises(GenerationError, match=words):
        pieces_for(small_model(name), "auto")


@needs_transformers("5.17", "BiT has another reason")
def test_a_small_model_that_cannot_be_made_is_refused_in_one_line():
    with pytest.raises(InvalidArgumentError, match=r"A small bit model cannot be made: .*layer_types.* Name a folder"):
        small_model("bit")


def test_the_class_of_a_model_is_that_of_its_configuration():
    config = small_config("llama")
    config.architectures = ["LlamaOfMyOwn", "LlamaForSequenceClassification"]
    assert class_for(config) is transformers.LlamaForSequenceClassification
    config.architectures = ["LlamaOfMyOwn"]
    assert class_for(config) is transformers.LlamaForCausalLM
    with pytest.raises(InvalidArgumentError, match=r"transformers has no model class for a P\w+Config\."):
        class_for(transformers.PretrainedConfig())


def test_decode_inputs_of_an_encoder_that_hears_say_what_to_do():
    model = small_model("whisper")
    with pytest.raises(InvalidArgumentError, match=r"reads input_features.*\n.*record_calls") as raised:
        decode_inputs(model, DecodeSizes())
    assert "WhisperForConditionalGeneration" in str(raised.value)
    kwargs = {"encoder_outputs": None, "decoder_input_ids": torch.zeros(1, 1).long()}
    assert why_not_resizable(model, kwargs, "") == "its encoder reads input_features"
    assert why_not_resizable(small_model("t5"), kwargs, "") is None


@pytest.mark.parametrize("name", ["swin", "segformer"])
def test_a_small_encoder_of_images_has_a_number_of_heads_for_each_stage(name):
    model = small_model(name)
    size = getattr(model.config, "image_size", 64)
    with torch.no_grad():
        assert model(pixel_values=torch.zeros(1, 3, size, size))[0].isfinite().all()
    largest = 4_000_000 if is_older_than("5.24.0") else 1_000_000  # before, Segformer's entries have no common name
    assert sum(parameter.numel() for parameter in model.parameters()) < largest


SMALL = {**SIZES, "vocab_size": 99, "initializer_range": 0.2}
IDS = torch.tensor([[5, 9, 11, 42, 7], [8, 3, 17, 60, 98]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def stored(tmp_path, kind, config):
    made(getattr(transformers, kind), config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("kind", "config", "base", "more", "asked"),
    [
        ("BertForMaskedLM", "BertConfig", "BertModel", {}, {"task": "feature-extraction"}),
        ("ElectraForPreTraining", "ElectraConfig", "ElectraModel", {"embedding_size": 32}, {}),
        ("AlbertForPreTraining", "AlbertConfig", "AlbertModel", {"embedding_size": 16}, {}),
    ],
)
def test_embeddings_of_a_checkpoint_with_a_head_are_those_of_automodel(tmp_path, kind, config, base, more, asked):
    """By the task, or of a checkpoint of pretraining; scores of the head were exported under the name of features."""
    folder = stored(tmp_path, kind, getattr(transformers, config)(**SMALL | more, pad_token_id=1))
    with torch.no_grad():
        wanted = transformers.AutoModel.from_pretrained(folder).eval()(IDS, attention_mask=MASK).last_hidden_state
    done = export_folder(folder, tmp_path / "out", **asked, proof="sample")
    assert done.task == "feature-extraction"
    assert f"{base} was exported for feature-extraction; the model is stored as a {kind}." in str(
        done.reports["model.onnx"]
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [base]
    found = open_model(tmp_path / "out")(IDS, attention_mask=MASK)
    assert "logits" not in found
    torch.testing.assert_close(found.last_hidden_state[MASK.bool()], wanted[MASK.bool()], atol=1e-4, rtol=1e-4)


def test_a_base_with_tied_scores_writes_text_where_the_task_asks_for_it(tmp_path):
    """GPT2Model holds all weights of its language model; the folder was refused."""
    folder = stored(tmp_path, "GPT2Model", transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=4))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    export_folder(folder, tmp_path / "out", task="text-generation", to="program", proof="sample")
    found = open_generator(tmp_path / "out", trust=True).generate(IDS, max_new_tokens=4)
    assert torch.equal(torch.as_tensor(found), wanted.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize(
    ("kind", "task", "line"),
    [
        ("BertForMaskedLM", "text-classification", "lacks .* of BertForSequenceClassification, which would be random"),
        ("BertModel", "token-classification", "lacks .* of BertForTokenClassification, which would be random"),
        ("BertForMaskedLM", "text-generation", "is for fill-mask, not for text-generation"),
        ("BertModel", "image-classification", "is for feature-extraction, not for image-classification"),
    ],
)
def test_a_head_that_the_checkpoint_lacks_is_refused_by_name(tmp_path, kind, task, line):
    folder = stored(tmp_path, kind, transformers.BertConfig(**SMALL))
    with pytest.raises((ModelSourceError, InvalidArgumentError), match=line):
        export_folder(folder, tmp_path / "out", task=task)
    assert not (tmp_path / "out").exists()


def test_a_loaded_model_of_another_class_names_the_base_which_exports(tmp_path):
    """The class of an object is the caller's choice, so the line names what to pass."""
    model = made(transformers.BertForMaskedLM, transformers.BertConfig(**SMALL))
    stated = list(model.config.architectures or [])
    with pytest.raises(
        InvalidArgumentError, match=r"export_folder\(model\.base_model, \.\.\., task='feature-extraction'"
    ):
        export_folder(model, tmp_path / "out", task="feature-extraction")
    with pytest.raises(InvalidArgumentError, match="is for feature-extraction, not for text-classification"):
        export_folder(model.base_model, tmp_path / "out", task="text-classification")
    export_folder(model.base_model, tmp_path / "out", task="feature-extraction", to="program", proof="sample")
    with pytest.raises(
        GenerationError, match=r"out is for feature-extraction and cannot generate\. Call it:\n +open_m"
    ):
        open_generator(tmp_path / "out", trust=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertModel"]
    assert list(model.config.architectures or []) == stated


@pytest.mark.parametrize(
    ("kind", "config"), [("ElectraForPreTraining", "ElectraConfig"), ("BertForNextSentencePrediction", "BertConfig")]
)
def test_a_head_of_no_task_is_refused_for_embeddings_and_else_kept_and_named(tmp_path, kind, config):
    model = getattr(transformers, kind)(getattr(transformers, config)(**SMALL)).eval()
    with pytest.raises(InvalidArgumentError, match=rf"A {kind} returns the scores of its head.*\n.*model\.base_model"):
        export_folder(model, tmp_path / "out", task="feature-extraction")
    assert not (tmp_path / "out").exists()
    note = f"{kind} was exported, with its head. For embeddings, export model.base_model."
    for given, is_noted in ((model, True), (model.base_model, False)):
        done = export_folder(given, tmp_path / "out", to="program", proof="none", overwrite=True)
        assert (note in str(done.reports["model.pt2"])) is is_noted


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart", "whisper", "llama", "t5", "bloom"])
def test_whether_positions_end_is_found_by_calling_the_model(name):
    """A table has a last row; rotations, distances and slopes go on. Large models are not called with a long text."""
    model = small_model(name)
    config = model.config.get_text_config(decoder=True)
    stated = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    assert positions_of(model, is_large=False) == (None if name in ("llama", "t5", "bloom") else stated)
    if name in ("gpt2", "bart"):  # BART has no positions among its inputs: the call would be as long as the table
        assert positions_of(model, is_large=True) == (stated if name == "gpt2" else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "initializer_range": 0.5}
    config = transformers.GPT2Config(**sizes, eos_token_id=None, bos_token_id=1, pad_token_id=0)
    model, path = made(transformers.GPT2LMHeadModel, config), tmp_path_factory.mktemp("positions") / "out"
    export_folder(model, path, proof="sample")
    return model, path


@pytest.mark.parametrize("padding", [0, 3])
def test_texts_go_to_the_last_position(folder, padding):
    model, path = folder
    generator = open_generator(path)
    prompt = torch.randint(3, 96, (2, 20 + padding), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    wanted = model.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(generator.generate(prompt, mask, max_new_tokens=5), wanted)
    with pytest.raises(IndexError):
        model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)
    with pytest.raises(InvalidArgumentError, match="The text has 25 tokens, but the model has 24 positions"):
        generator.generate(prompt, mask, max_new_tokens=6)
    with pytest.raises(InvalidArgumentError, match=r"\A.*Pass at most 24 tokens.*\Z"):
        generator.generate(torch.ones(1, 30, dtype=torch.int64), max_new_tokens=2)
    steps = generator.stream(prompt, mask, max_new_tokens=9)
    assert [next(steps).tolist() for _ in range(5)] == wanted[:, -5:].T.tolist()


def _model(name, kind="ForSequenceClassification", **entries):
    config = small_config(name)
    for key, value in {"initializer_range": 0.2, "num_labels": 2, "pad_token_id": 0, **entries}.items():
        setattr(config, key, value)
    return made(getattr(transformers, f"AutoModel{kind}").from_config, config)


PAIRS = ["word1 word2 word3", "word4"], ["word5 word6 word7 word8 word9", "word6 word7"]


def _saved(model, folder):
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert", "ForSequenceClassification"),
        ("electra", "ForSequenceClassification"),
        ("deberta-v2", "ForSequenceClassification"),
        ("albert", "ForQuestionAnswering"),
        ("bert", "ForTokenClassification"),
    ],
)
def test_what_a_tokenizer_returns_for_pairs_is_fed_as_it_is(name, kind, tmp_path):
    entries = {"type_vocab_size": 2} if name == "deberta-v2" else {}
    model = _model(name, kind, **entries)
    _saved(model, tmp_path / "model")
    export_folder(tmp_path / "model", tmp_path / "out")
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(*PAIRS, padding=True, return_tensors="pt")
    assert given["token_type_ids"].max() == 1
    with torch.no_grad():
        expected = model(**given).to_tuple()[0]
        without = model(**{**given, "token_type_ids": None}).to_tuple()[0]
    torch.testing.assert_close(next(iter(run_file(tmp_path / "out", given).values())), expected, atol=1e-4, rtol=1e-4)
    assert (without - expected).abs().max() > 0.01


def test_a_model_without_types_takes_none_and_its_tokenizer_returns_none(tmp_path):
    """DeBERTa's tokenizer returns types also for models that ignore them; that of the folder does not."""
    model = _model("deberta-v2", type_vocab_size=0)
    _saved(model, tmp_path / "model")
    restate(
        tmp_path / "model/tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )
    export_folder(tmp_path / "model", tmp_path / "out")
    given, types = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / name)(*PAIRS, padding=True, return_tensors="pt")
        for name in ("out", "model")
    )
    assert "token_type_ids" in types
    assert list(given) == ["input_ids", "attention_mask"]
    with torch.no_grad():
        expected = model(**types).logits
    torch.testing.assert_close(run_file(tmp_path / "out", given)["logits"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "entries", "expected"),
    [
        ("bert", {}, True),
        ("bert", {"type_vocab_size": 1}, False),
        ("roberta", {"type_vocab_size": 1}, False),
        ("roberta", {"type_vocab_size": 2}, False),  # its tokenizer gives both texts the type 0
        ("roberta", {"type_vocab_size": 2, "tokenizer_class": "BertTokenizer"}, True),
        ("deberta", {"type_vocab_size": 0}, False),
        ("deberta", {"type_vocab_size": 2}, True),
        ("distilbert", {}, False),
        ("fnet", {}, True),
        ("tapas", {}, True),
        ("gpt2", {}, False),  # its types are words, and its tokenizer returns none
    ],
)
def test_whether_a_model_has_types_is_found_by_calling_it(name, entries, expected):
    """A configuration may state types that no layer reads, or have another word for them."""
    assert has_types(_model(name, **entries), torch.arange(12).reshape(2, 6) + 3) is expected


KINDS = ["whisper", "moonshine", "vit", "clip", "wav2vec2", "trocr", "llava", "qwen2_vl", "t5"]


@pytest.mark.parametrize("name", KINDS)
def test_inputs_have_the_type_of_the_weights(name):
    _, pieces = pieces_for(small_model(name).half(), "auto")
    leaves = [leaf for piece in pieces for leaf in pytree.tree_leaves(dict(piece.kwargs))]
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    assert {leaf.dtype for leaf in floats} <= {torch.float16}


def test_a_whisper_in_float16_becomes_a_folder(tmp_path):
    """It stopped at `Input type (float) and bias type (c10::Half)`."""
    assert export_folder(small_model("whisper").half(), tmp_path / "out", proof="sample").verified.ok


TEXT = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5, "eos_token_id": None}
GRIDS = [[16, 16], [16, 32], [32, 16], [32, 32]]
IMAGE = 3


def onevision():
    vision = transformers.SiglipVisionConfig(**SIZES, image_size=16, patch_size=8, vision_use_head=False)
    tokens = {"image_token_index": IMAGE, "video_token_index": 4, "image_grid_pinpoints": GRIDS}
    few = {"vision_aspect_ratio": "anyres_max_1"}  # so that features of many tiles are made fewer
    text = transformers.Qwen2Config(**TEXT)
    config = transformers.LlavaOnevisionConfig(vision_config=vision, text_config=text, **tokens, **few)
    return _made(transformers.LlavaOnevisionForConditionalGeneration, config)


def llava_next():
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    tokens = {"image_token_index": IMAGE, "image_grid_pinpoints": GRIDS}
    config = transformers.LlavaNextConfig(vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), **tokens)
    return _made(transformers.LlavaNextForConditionalGeneration, config)


def _made(kind, config):
    model = made(kind, config)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module", params=[onevision, llava_next], ids=["onevision", "next"])
def exported(request, tmp_path_factory):
    model, folder = request.param(), tmp_path_factory.mktemp("tiled") / "out"
    assert export_folder(model, folder).task == "image-text-to-text"
    return model, open_generator(folder)


def pictures(*sizes, room):
    pixels = torch.randn((len(sizes), room, 3, 16, 16), generator=torch.Generator().manual_seed(room))
    return {"pixel_values": 3 * pixels, "image_sizes": torch.tensor(sizes)}


def prompts(*counts):
    rows = [torch.tensor([5, 6, *[IMAGE] * count, 7, 8]) for count in counts]
    length = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long()}


@pytest.mark.parametrize("sizes", [((30, 32),), ((16, 31), (9, 5), (31, 30))])
def test_pictures_of_any_size_generate_as_their_model(exported, sizes):
    model, generator = exported
    given = pictures(*sizes, room=5)
    features = model.get_image_features(**given, return_dict=True).pooler_output
    given |= prompts(*map(len, features))
    wanted = model.generate(**given, max_new_tokens=8, do_sample=False)
    assert torch.equal(generator.generate(**given, max_new_tokens=8), wanted)
    assert torch.equal(torch.stack([*generator.stream(**given, max_new_tokens=8)], 1), wanted[:, -8:])


def test_tiles_in_one_list_are_those_of_rows(exported):
    model, generator = exported
    given = pictures((16, 31), room=3)
    (features,) = model.get_image_features(**given, return_dict=True).pooler_output
    given |= prompts(len(features))
    found = generator.generate(**given, max_new_tokens=6)
    given["pixel_values"] = given["pixel_values"][0]
    assert torch.equal(generator.generate(**given, max_new_tokens=6), found)


def test_several_pictures_in_a_prompt_are_not_cut(tmp_path):
    """LLaVA-OneVision shows the whole of each only, where `batch_num_images` states several."""
    model = onevision()
    export_folder(model, tmp_path / "out")
    given = pictures((16, 31), (31, 16), room=3)
    given["batch_num_images"] = torch.tensor([2])
    features = model.get_image_features(**given, return_dict=True).pooler_output
    assert [len(one) for one in features] == [5, 5]
    given |= prompts(10)
    wanted = model.generate(**given, max_new_tokens=6, do_sample=False)
    assert torch.equal(open_generator(tmp_path / "out").generate(**given, max_new_tokens=6), wanted)


def test_pictures_that_do_not_fit_their_sizes_are_refused(exported):
    _, generator = exported
    given = {**pictures((16, 31), room=3), **prompts(4)}
    for change, words in [
        ({"image_sizes": None}, r"image_sizes of shape \(images, 2\)"),
        ({"pixel_values": given["pixel_values"][:, :2]}, "1 pictures, cut into 3 tiles"),
        ({"batch_num_images": torch.tensor([2])}, "batch_num_images add up to 2, but image_sizes has 1 rows"),
        ({}, "The prompt has 4 image tokens"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4]])}, "image_grid_thw is for models that read patches"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            generator.generate(**{**given, **change})


def test_sizes_for_a_model_that_cuts_nothing_are_refused(tmp_path):
    export_folder(small_model("llava"), tmp_path / "out", to="program", proof="none")
    with pytest.raises(InvalidArgumentError, match="image_sizes is for models that cut pictures into tiles"):
        open_generator(tmp_path / "out", trust=True).generate(torch.tensor([[5]]), image_sizes=torch.tensor([[8, 8]]))


def test_a_model_that_does_more_with_its_tiles_is_refused():
    model = llava_next()
    encoder = TiledVisionEncoder(model)
    encoder.check(model)
    model.model.pack_image_features = lambda features, *_, **__: ([2 * one for one in features[0]], None)
    with pytest.raises(GenerationError, match="cannot be exported alone: features would differ"):
        encoder.check(model)


@pytest.mark.slow  # exports three files
@pytest.mark.parametrize("name", cases(["gemma3", "paligemma2"], quick=["paligemma2"]))
def test_a_folder_generates_what_its_model_generates(name, tmp_path):
    config, kind, places = small_config(name.rstrip("2")), "PaliGemmaForConditionalGeneration", 16
    if name == "paligemma2":  # layers that slide, and scores that are capped
        if is_older_than("5.23"):
            pytest.skip("transformers before 5.23 computes the layers of Gemma 2 behind a picture in another way")
        config.text_config = small_config("gemma2")
        config.text_config.use_bidirectional_attention = True
    else:
        kind, places = "Gemma3ForConditionalGeneration", 4
    model = made(getattr(transformers, kind), config)
    if name == "gemma3":  # zeros by default, so that images would show nothing
        weight = model.model.multi_modal_projector.mm_input_projection_weight
        weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    done = export_folder(model, tmp_path / "out")
    assert (done.task, done.verified.ok) == ("image-text-to-text", True)
    row = [5, *[IMAGE] * places, 9, 11, *[IMAGE] * places, 13, 17]
    ids = torch.tensor([[0, 0, *row], [*row, 19, 21]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    types = ids.eq(IMAGE).long() if name == "gemma3" else torch.zeros_like(ids)
    for options in ({"max_new_tokens": 8}, {"max_new_tokens": 8, "num_beams": 2}):
        expected = model.generate(**inputs, token_type_ids=types, **options, do_sample=False)
        assert OnnxGenerator(tmp_path / "out").generate(**inputs, **options).tolist() == expected.tolist()
