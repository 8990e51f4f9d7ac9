"""onnxruntime-genai opens folders of text, sound and pictures as they are, and generates what the model does."""

import importlib.util
import json
import shutil

import numpy
import pytest
import torch
import transformers

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from tests.transformers_versions import is_older_than
from yobx_flatten import InvalidArgumentError, export_folder, open_generator, open_model, verify_folder
from yobx_flatten.model_folder.pieces.text import encoder_input
from yobx_flatten.model_folder.pieces.vision_language import images_for
from yobx_flatten.model_folder.plan import check_genai
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow
needs_genai = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed"
)

TOKENS = 30  # with nine of the prompt: several times the small window of eight

# one of each kind; `make genai` runs all that docs/genai.md lists
KINDS = [(name, "onnxruntime") for name in ("llama", "mistral", "gemma3_text", "gpt2", "qwen3_moe")] + [("llama", None)]


@needs_genai
@pytest.mark.parametrize(
    ("name", "optimize"), cases(KINDS, quick=[("mistral", "onnxruntime"), ("gpt2", "onnxruntime"), ("llama", None)])
)
def test_a_cache_in_one_memory_or_one_that_grows_generates_as_the_model_does(name, optimize):
    """Past the window of layers that slide, which hold all tokens in such a file."""
    from matrix.genai_cases import generate

    if name == "qwen3_moe" and is_older_than("5.0"):
        pytest.skip("transformers before 5.0 loops over the experts that are hit, which no trace can follow")
    model, folder = exported(name, optimize=optimize)
    prompt = torch.randint(4, 259, (1, 9), generator=torch.Generator().manual_seed(7))
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False)
    found = generate(folder, prompt[0].tolist(), TOKENS)
    ended = int(wanted[0, -1]) == model.config.eos_token_id  # a token that the library leaves away
    assert found == wanted[0].tolist()[: -1 if ended and len(found) < wanted.shape[1] else None]
    assert len(found) > prompt.shape[1] + 8  # past the window
    searched = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]
    assert searched["past_present_share_buffer"] is (optimize is not None)


def _generator(folder, **options):
    import onnxruntime_genai as genai

    params = genai.GeneratorParams(model := genai.Model(str(folder)))
    params.set_search_options(do_sample=False, **options)
    return genai.Generator(model, params)


def _generate(generator, tokens, row=0):
    generator.append_tokens(tokens.to(torch.int32).numpy())
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(row)]


@needs_genai
@pytest.mark.parametrize("optimize", ["onnxruntime", None])
def test_rows_that_the_library_pads_on_the_right_are_those_of_the_model(optimize):
    """The model has the padding on the left; new tokens of the short row follow its padding in the library's cache."""
    model, folder = exported("llama", optimize=optimize)
    prompt = torch.randint(4, 259, (2, 9), generator=torch.Generator().manual_seed(3))
    left, mask = prompt.clone(), torch.ones_like(prompt)
    left[0, :3] = mask[0, :3] = 0
    right = left.clone()
    right[0] = left[0].roll(-3)
    wanted = model.generate(left, attention_mask=mask, max_new_tokens=11, do_sample=False)
    generator = _generator(folder, batch_size=2, max_length=20)
    _generate(generator, right)
    for row, expected in enumerate(wanted[:, 9:].tolist()):
        found = [int(token) for token in generator.get_sequence(row)][9:]
        assert found[: len(expected)] == expected[: len(found)]
        assert len(found) > 8


@needs_genai
@pytest.mark.parametrize("optimize", ["onnxruntime", None])
def test_a_second_turn_goes_on_after_an_end(optimize, tmp_path):
    """Several tokens after those of the first turn, which ended with the token that the folder names."""
    model, folder = exported("llama", optimize=optimize)
    first, second = torch.randint(4, 259, (2, 1, 6), generator=torch.Generator().manual_seed(3))
    options = {"do_sample": False, "eos_token_id": None}
    begun = model.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=5, **options)
    copied = shutil.copytree(folder, tmp_path / "copied")
    config = json.loads((copied / "genai_config.json").read_text(encoding="utf-8"))
    config["model"]["eos_token_id"] = int(begun[0, -1])
    (copied / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = _generator(copied, max_length=40)
    _generate(generator, first)
    generator.append_tokens(second.to(torch.int32).numpy())
    read = torch.cat([begun[:, :-1], second], dim=1)
    assert [int(token) for token in generator.get_sequence(0)] == read[0].tolist()
    wanted = model.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=3, **options)
    for _ in range(3):
        generator.generate_next_token()
    assert [int(token) for token in generator.get_sequence(0)] == wanted[0].tolist()


PROMPT = [5, 20, 30]  # a start token, and two as of language and task
LONGEST = 24


def small_whisper(**settings):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 1, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
    ids = {"decoder_start_token_id": 5, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 3}
    config = transformers.WhisperConfig(
        vocab_size=300, max_target_positions=64, init_std=0.5, **{**sizes, **heads, **ids, **settings}
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    return model


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    model, folder = small_whisper(), tmp_path_factory.mktemp("genai") / "whisper"
    free = of_model(model, 2, 1)
    counted = torch.tensor(free)[:, len(PROMPT) + 1 :].flatten().bincount()
    often, at_first = int(counted.argmax()), free[0][len(PROMPT)]
    model.generation_config.suppress_tokens = [often]
    model.generation_config.begin_suppress_tokens = [at_first]
    export_folder(model, folder, layout="genai")
    return model, folder, free


def of_model(model, rows, beams):
    given = {"input_features": encoder_input(model, rows, 0), "decoder_input_ids": torch.tensor([PROMPT] * rows)}
    options = {"max_length": LONGEST, "do_sample": False, "num_beams": beams}
    return transformers.GenerationMixin.generate(model, **given, **options).tolist()


def of_library(model, folder, rows):
    generator = _generator(folder, max_length=LONGEST, batch_size=rows)
    sound = encoder_input(model, rows, 0).numpy()  # the library does not copy it: it has to live as long
    generator.set_model_input("input_features", sound)
    _generate(generator, torch.tensor([PROMPT] * rows))
    return [generator.get_sequence(row).tolist() for row in range(rows)]


@needs_genai
@pytest.mark.parametrize("rows", [1, 2])
def test_the_library_writes_the_tokens_of_the_model(whisper, rows):
    """Also those after tokens that the configuration suppresses, of which the library has no list."""
    model, folder, free = whisper
    wanted = of_model(model, rows, 1)
    assert wanted[0] != free[0]  # without the list there would be others
    assert of_library(model, folder, rows) == wanted
    assert len(wanted[0]) == LONGEST


@needs_genai
def test_other_types_and_bits_are_opened(tmp_path):
    model = small_whisper()
    export_folder(model, tmp_path / "int8", layout="genai", quantize="int8")
    wanted, found = of_model(model, 1, 1)[0], of_library(model, tmp_path / "int8", 1)[0]
    assert found[: len(PROMPT) + 1] == wanted[: len(PROMPT) + 1]
    assert len(found) == LONGEST


@pytest.mark.parametrize(("rows", "beams"), [(2, 1), (2, 3)])
def test_this_package_runs_the_same_files(whisper, rows, beams):
    model, folder, _ = whisper
    wanted = of_model(model, rows, beams)
    given = {"input_features": encoder_input(model, rows, 0), "decoder_input_ids": torch.tensor([PROMPT] * rows)}
    new = LONGEST - len(PROMPT)
    assert open_generator(folder).generate(**given, max_new_tokens=new, num_beams=beams).tolist() == wanted
    assert of_model(open_model(folder), rows, beams) == wanted


def test_each_file_is_proven_and_says_what_the_library_reads_and_features_without_keys_are_refused(whisper):
    model, folder, _ = whisper
    report = verify_folder(folder)
    assert report.ok
    assert [check.file for check in report.checks] == ["encoder.onnx"] * 3 + ["decoder.onnx"] * 3 + ["generate"]
    stated = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert (stated["type"], stated["decoder"]["outputs"]["logits"]) == ("whisper", "allowed_logits")
    sound = json.loads((folder / "audio_processor_config.json").read_text(encoding="utf-8"))
    steps = [one["operation"]["type"] for one in sound["feature_extraction"]["sequence"]]
    assert steps == ["AudioDecoder", "STFTNorm", "LogMelSpectrum"]
    opened = open_model(folder)
    read = opened.get_encoder()(encoder_input(model, 1, 0))
    alone = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=read[0])
    with pytest.raises(InvalidArgumentError, match=r"also needs present.0.encoder.key from encoder.onnx"):
        opened(encoder_outputs=alone, decoder_input_ids=torch.tensor([PROMPT]))


SHOWS = "image-text-to-text"


@pytest.mark.parametrize(
    ("name", "task", "why"),
    [
        ("t5", "text2text-generation", "marian-ssru, has a recurrent decoder"),
        ("whisper", "automatic-speech-recognition", r"with 3000 frames \(max_source_positions=1500\)"),
        ("moonshine", "automatic-speech-recognition", "the only audio model it runs is Whisper"),
        ("bert", "fill-mask", "it has no type for fill-mask"),
        ("gemma3", SHOWS, "does not run the files of a .*onnxruntime-genai passes no token types"),
        ("qwen2_vl", SHOWS, "does not run the files of a .*3D positions"),
        ("llava_next", SHOWS, "does not run the files of a .*cut into tiles"),
    ],
)
def test_what_the_library_does_not_run_is_refused(name, task, why):
    """Before anything is exported: what it would write is not what the model writes."""
    with pytest.raises(InvalidArgumentError, match=why):
        check_genai(small_model(name), task)


def test_what_the_layout_does_not_hold_is_refused_before_an_export(tmp_path):
    with pytest.raises(InvalidArgumentError, match="is for ONNX files"):
        export_folder(small_model("llama"), tmp_path / "out", layout="genai", to="program")
    with pytest.raises(InvalidArgumentError, match="word_times=True does not work with layout"):
        export_folder(small_whisper(), tmp_path / "out", layout="genai", word_times=True)
    with pytest.raises(InvalidArgumentError, match=r'does not run this MistralForCausalLM.*optimize="onnxruntime"'):
        export_folder(small_model("mistral"), tmp_path / "out", layout="genai", proof="none")
    assert not (tmp_path / "out").exists()


NEW = 12


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    model, folder = small_model("llava"), tmp_path_factory.mktemp("genai") / "llava"
    export_folder(model, folder, layout="genai", proof="sample")
    return model, folder


def _prompt(model, pictures):
    token = model.config.image_token_id
    count = model.get_image_features(images_for(model, 1)).pooler_output[0].shape[0]
    ids = torch.tensor([[7, 8, *[token] * count * pictures, 9, 10]])
    return {"input_ids": ids, **({"pixel_values": images_for(model, 1)} if pictures else {})}


@needs_genai
@pytest.mark.parametrize("pictures", [1, 0])
@torch.no_grad()
def test_the_library_writes_the_tokens_of_the_model_about_pictures(llava, pictures):
    model, folder = llava
    given = _prompt(model, pictures)
    ids = given["input_ids"]
    wanted = model.generate(**given, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    generator = _generator(folder, max_length=ids.shape[1] + NEW)
    if pictures:  # the library copies neither: both have to live as long
        pixels, count = given["pixel_values"].numpy(), numpy.array([ids.shape[1] - 4])
        generator.set_model_input("pixel_values", pixels)
        generator.set_model_input("num_image_tokens", count)
    found = _generate(generator, ids)
    assert found == wanted[0].tolist()[: len(found)]
    assert len(found) > ids.shape[1] + 8


@torch.no_grad()
def test_this_package_runs_the_same_files_of_pictures(llava):
    model, folder = llava
    report = verify_folder(folder)
    assert report.ok
    assert {check.file for check in report.checks} == {
        *("vision_encoder.onnx", "embed_tokens.onnx", "decoder_model_merged.onnx", "embedding.onnx", "generate")
    }
    given = _prompt(model, 1)
    mask = torch.ones_like(given["input_ids"])
    wanted = model.generate(**given, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert open_generator(folder).generate(**given, max_new_tokens=NEW).tolist() == wanted.tolist()
