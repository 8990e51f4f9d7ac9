"""Folders of further kinds of models; data that a folder would lose are refused or named."""

import pytest
import torch
import transformers

from tests.flatten.model_folder.exported_folders import made, run_file
from tests.models import SIZES
from yobx_flatten import GenerationError, InvalidArgumentError, export_folder, export_onnx, open_generator, open_model
from yobx_flatten.errors import ReplayError
from yobx_flatten.model_folder.pieces.tasks import pieces_for, task_of
from yobx_flatten.model_folder.pieces.text import Split
from yobx_flatten.model_folder.source.configuration import small_config, small_model

pytestmark = pytest.mark.slow

PICTURE = {"image_size": 32, "patch_size": 8}


def sides(**sizes):
    return {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}


def moonshine():
    layers = sides(num_hidden_layers=2, num_attention_heads=4)
    tokens = {"eos_token_id": 2, "bos_token_id": 1, "decoder_start_token_id": 1, "pad_token_id": 0}
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
    config = transformers.MoonshineConfig(**sizes, **layers, **tokens)
    return made(transformers.MoonshineForConditionalGeneration, config)


def reader_of_pictures():
    vision = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, initializer_range=0.3)
    sizes = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    return encoder_decoder(transformers.VisionEncoderDecoderModel, vision, transformers.GPT2Config(**sizes))


def numbers(*shape):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def reader_of_documents():
    vision = transformers.DonutSwinConfig(
        image_size=[32, 48], patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    return encoder_decoder(transformers.VisionEncoderDecoderModel, vision, decoder_of_mbart(32))


def decoder_of_mbart(width):
    sizes = {"vocab_size": 96, "d_model": width, "decoder_layers": 2, "decoder_attention_heads": 4, "init_std": 0.3}
    return transformers.MBartConfig(**sizes, decoder_ffn_dim=48, max_position_embeddings=64)


def reader_of_speech():
    layers = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer"}
    sound = transformers.Wav2Vec2Config(**SIZES, **layers, **places)
    return encoder_decoder(transformers.SpeechEncoderDecoderModel, sound, decoder_of_mbart(48))


def encoder_decoder(kind, encoder, decoder):
    config = kind.config_class.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 1, 2
    model = made(kind, config)
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=2, pad_token_id=1, eos_token_id=2)
    return model


@pytest.mark.parametrize(
    ("model", "task", "name", "shapes"),
    [
        (moonshine, "automatic-speech-recognition", "input_values", [(2, 4000), (1, 7300)]),
        (reader_of_pictures, "image-to-text", "pixel_values", [(1, 3, 32, 32), (3, 3, 32, 32)]),
        (reader_of_documents, "image-to-text", "pixel_values", [(2, 3, 32, 48)]),
        (reader_of_speech, "automatic-speech-recognition", "input_values", [(1, 1300)]),
    ],
)
def test_an_encoder_of_samples_or_pictures_generates_as_its_model(tmp_path, model, task, name, shapes):
    model = model()
    done = export_folder(model, tmp_path / "out")
    assert (done.task, done.verified.ok) == (task, True)
    generator = open_generator(tmp_path / "out")
    for shape in shapes:
        given = {name: numbers(*shape), "max_new_tokens": 12}
        wanted = model.generate(**given, do_sample=False)
        assert torch.equal(generator.generate(**given), wanted)
        assert torch.equal(torch.stack([*generator.stream(**given)], 1), wanted[:, 1:])
    with pytest.raises(InvalidArgumentError, match=rf"Pass {name} of shape"):
        generator.generate(**{name: numbers(3)})


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_model_that_compares_pictures_and_texts_is_one_file(tmp_path, kind):
    """SigLIP: torch's guard of any height and width refused one picture, so the file states the example's."""
    text = {**SIZES, "vocab_size": 259, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    parts = {"text_config": text, "vision_config": {**SIZES, **PICTURE}}
    model = made(getattr(transformers, f"{kind}Model"), getattr(transformers, f"{kind}Config")(**parts))
    done = export_folder(model, tmp_path / "out")
    assert done.task == "zero-shot-image-classification"
    assert ("pictures must have the example's size" in str(done.reports["model.onnx"])) is (kind == "Siglip")
    for count in (1, 4):
        ids = torch.randint(3, 250, (6, 16), generator=torch.Generator().manual_seed(1))
        given = {"input_ids": ids, "pixel_values": numbers(count, 3, 32, 32), "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            wanted = model(**given).logits_per_image
        assert wanted.shape == (count, 6)
        torch.testing.assert_close(run_file(tmp_path / "out", given)["logits_per_image"], wanted, atol=1e-4, rtol=1e-4)


def test_pictures_whose_size_is_stated_by_two_numbers_are_of_one_size(tmp_path):
    """InternVL was refused for them; its folder generates 40 tokens as `model.generate` before it appears."""
    done = export_folder(small_model("internvl"), tmp_path / "out", to="program")
    assert (done.task, done.verified.ok) == ("image-text-to-text", True)


def voice():
    widths = {"hidden_size": 32, "ffn_dim": 48, "flow_size": 32, "spectrogram_bins": 33, "vocab_size": 40}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "prior_encoder_num_flows": 2}
    layers |= {f"{side}_encoder_num_wavenet_layers": 2 for side in ("prior", "posterior")}
    layers |= {"depth_separable_num_layers": 2, "duration_predictor_num_flows": 2}
    up = {"upsample_initial_channel": 16, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8]}
    up |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
    quiet = {"noise_scale": 0.0, "noise_scale_duration": 0.0}
    return made(transformers.VitsModel, transformers.VitsConfig(**widths, **layers, **up, **quiet))


def test_a_voice_speaks_sentences_of_any_length(tmp_path):
    """VITS: its attention pads a table for long sentences and cuts it for those of 5 tokens and fewer."""
    model = voice()
    assert export_folder(model, tmp_path / "out").verified.ok
    for rows, length in ((2, 12), (1, 17), (1, 4), (3, 5), (2, 6)):
        ids = torch.randint(1, 40, (rows, length), generator=torch.Generator().manual_seed(length))
        mask = torch.ones_like(ids)
        mask[0, length - 2 :] = 0
        with torch.no_grad():
            wanted = model(ids, attention_mask=mask)
        wave = run_file(tmp_path / "out", {"input_ids": ids, "attention_mask": mask})["waveform"]
        for row, samples in enumerate(wanted.sequence_lengths.int().tolist()):
            torch.testing.assert_close(wave[row, :samples], wanted.waveform[row, :samples], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind", "task"),
    [
        ("bert", "BertForQuestionAnswering", "question-answering"),
        ("yolos", "YolosForObjectDetection", "object-detection"),
        ("segformer", "SegformerForSemanticSegmentation", "image-segmentation"),
        ("vit", "ViTForImageClassification", "image-classification"),
        ("glpn", "GLPNForDepthEstimation", "depth-estimation"),
        ("bert", "BertModel", "feature-extraction"),
        ("t5", "T5ForConditionalGeneration", "text2text-generation"),
        # with a decoder, and they do not generate
        ("bart", "BartForSequenceClassification", "text-classification"),
        ("rt_detr", "RTDetrForObjectDetection", "object-detection"),
        ("detr", "DetrForSegmentation", "image-segmentation"),
    ],
)
def test_a_task_has_the_name_of_the_hub(name, kind, task):
    """Those of one call were all called feature-extraction."""

    class Named(torch.nn.Module):
        config = transformers.AutoConfig.for_model(name)
        main_input_name = "input_ids"

    Named.__name__ = kind
    assert task_of(Named()) == task


def lxmert():  # which reads pictures as boxes with features
    layers = dict.fromkeys(("l_layers", "x_layers", "r_layers"), 1)
    widths = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 40}
    return made(transformers.LxmertModel, transformers.LxmertConfig(**layers, **widths))


def florence():
    text = {"vocab_size": 96, "d_model": 32, "eos_token_id": 2, **sides(layers=2, attention_heads=2, ffn_dim=48)}
    vision = {"embed_dim": [8, 8, 8, 8], "num_heads": [2] * 4, "num_groups": [2] * 4, "depths": [1] * 4}
    config = transformers.Florence2Config(text_config={"model_type": "bart", **text}, vision_config=vision)
    return made(transformers.Florence2ForConditionalGeneration, config)


@pytest.mark.skipif(not hasattr(transformers, "Florence2Config"), reason="no Florence-2 in this release")
def test_pictures_that_a_folder_would_lose_are_refused(tmp_path):
    """Florence-2 became a folder of text alone silently; asked for by its task, it is one, and takes no picture."""
    model = florence()
    with pytest.raises(
        GenerationError, match=r"pixel_values in addition to input_ids.*record_calls.*task='text2text"
    ) as raised:
        export_folder(model, tmp_path / "out")
    assert "\n" not in str(raised.value)
    export_folder(model, tmp_path / "out", task="text2text-generation", to="program", proof="sample")
    generator = open_generator(tmp_path / "out", trust=True)
    ids = torch.tensor([[5, 6, 7]])
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False, num_beams=1)
    assert torch.equal(generator.generate(ids, max_new_tokens=5), wanted)
    with pytest.raises(InvalidArgumentError, match="reads input_ids, not pixel_values"):
        generator.generate(ids, pixel_values=numbers(1, 3, 8, 8))
    with pytest.raises(InvalidArgumentError, match="reads input_ids, not input_features"):
        generator.generate(ids, input_features=numbers(1, 3, 8))


def test_a_model_that_generates_is_no_folder_of_features_unasked(tmp_path):
    """Bark's model of meanings: one call without a cache, which nobody had asked for."""
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "block_size": 64}
    config = transformers.BarkSemanticConfig(**sizes, input_vocab_size=96, output_vocab_size=96)
    model = made(transformers.BarkSemanticModel, config)
    with pytest.raises(GenerationError, match=r"record_calls.*task='feature-extraction'"):
        export_folder(model, tmp_path / "out")
    done = export_folder(model, tmp_path / "out", task="feature-extraction", to="program")
    assert (done.task, done.verified.ok) == ("feature-extraction", True)


def longformer(task):
    sizes = {"vocab_size": 259, "num_hidden_layers": 2, "attention_window": [8, 4], "pad_token_id": 1}
    config = transformers.LongformerConfig(**SIZES | sizes, max_position_embeddings=200, initializer_range=0.5)
    return made(getattr(transformers, f"Longformer{task}"), config)


def text_and_mask(length):
    mask = torch.ones(3, length, dtype=torch.int64)
    mask[0, max(1, length - 2) :] = 0
    return torch.randint(3, 259, mask.shape), mask


@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForMaskedLM"])
def test_longformer_scores_texts_below_and_above_its_window(tmp_path, task):
    """Its lengths were divided as tensors, which torch cannot trace; a classifier marks its first token."""
    model = longformer(task)
    export_folder(model, tmp_path / "out", to="program", proof="sample")
    scores = open_model(tmp_path / "out", trust=True)
    for length in (2, 7, 8, 9, 16, 61):
        ids, mask = text_and_mask(length)
        expected = model(ids, attention_mask=mask).logits
        found = scores(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(found[-2:], expected[-2:], rtol=0, atol=1e-4)


def smol_vlm():
    """Two pictures next to one: the model leaves out the picture of zeros that pads the second row."""
    text = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5, "eos_token_id": None}
    parts = {"vision_config": {**SIZES, **PICTURE}, "text_config": {**text, "pad_token_id": 0, "model_type": "llama"}}
    config = transformers.SmolVLMConfig(**parts, image_token_id=3, scale_factor=2)
    pixels = numbers(2, 2, 3, 32, 32)
    pixels[1, 1] = 0
    picture = [3] * 4  # 16 patches, by the square of scale_factor
    ids = torch.tensor([[5, *picture, 7, 8, *picture, 9], [0] * 5 + [5, *picture, 7, 8]])
    given = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "pixel_values": pixels}
    return made(transformers.SmolVLMForConditionalGeneration, config), "image-text-to-text", [given]


def blip_2_with_a_decoder():
    """Its language model is a whole model with a head; the other rows of a batch are padded."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "init_std": 0.3}
    model = blip_2(model_type="opt", **sizes, word_embed_proj_dim=32, max_position_embeddings=64)
    ids = torch.tensor([[95] * 4 + [5, 6, 7], [1, 1] + [95] * 4 + [8]])
    given = {"input_ids": ids, "attention_mask": ids.ne(1).long(), "pixel_values": numbers(2, 3, 16, 16)}
    return model, "image-text-to-text", [given]


def led():
    """Texts below and above its window."""
    layers = sides(layers=2, attention_heads=2, ffn_dim=48)
    places = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 8}
    config = transformers.LEDConfig(vocab_size=259, d_model=32, init_std=0.3, **layers, **places)
    given = [dict(zip(("input_ids", "attention_mask"), text_and_mask(length), strict=True)) for length in (2, 8, 9, 61)]
    return made(transformers.LEDForConditionalGeneration, config), "text2text-generation", given


def prophet_net():
    """A decoder that reads one token at a time: with a cache it refuses several."""
    layers = {f"num_{name}": size for name, size in sides(layers=1, attention_heads=4).items()}
    sizes = {"vocab_size": 96, "hidden_size": 32, "init_std": 0.3, **sides(ffn_dim=48)}
    config = transformers.ProphetNetConfig(**layers, **sizes, max_position_embeddings=64, eos_token_id=None)
    ids = torch.randint(3, 90, (4, 11), generator=torch.Generator().manual_seed(1))
    return made(transformers.ProphetNetForConditionalGeneration, config), "text2text-generation", [{"input_ids": ids}]


@pytest.mark.parametrize("make", [smol_vlm, blip_2_with_a_decoder, led, prophet_net])
def test_a_folder_generates_as_its_model(make, tmp_path):
    model, task, calls = make()
    done = export_folder(model, tmp_path / "out", to="program", proof="sample")
    assert (done.task, done.verified.ok) == (task, True)
    generator = open_generator(tmp_path / "out", trust=True)
    for given in calls:
        expected = model.generate(**given, max_new_tokens=9, do_sample=False, num_beams=1)
        assert torch.equal(generator.generate(**given, max_new_tokens=9), expected)


class BranchingForMaskedLM(transformers.BertForMaskedLM):
    def forward(self, input_ids, attention_mask=None, **others):
        if input_ids.sum() > 0:
            return super().forward(input_ids, attention_mask, **others)
        return super().forward(input_ids + 1, attention_mask, **others)


def test_a_model_that_torch_cannot_export_is_refused_with_the_line_of_its_code(tmp_path):
    """A branch on a value ended in 17 lines of torch; the cause is kept."""
    model = made(BranchingForMaskedLM, transformers.BertConfig(**SIZES, vocab_size=96))
    with pytest.raises(InvalidArgumentError, match=r"cannot be traced.* forward, .*test_more_kinds\.py:\d+") as raised:
        export_folder(model, tmp_path / "out")
    assert len(str(raised.value).splitlines()) <= 4
    assert raised.value.__cause__ is not None
    assert not (tmp_path / "out").exists()


def blip_2(**text):
    layers = {**SIZES, "initializer_range": 0.3}
    config = transformers.Blip2Config(
        vision_config={**layers, "image_size": 16, "patch_size": 8},
        qformer_config={**layers, "vocab_size": 96, "encoder_hidden_size": 32},
        text_config={"vocab_size": 96, **text},
        num_query_tokens=4,
        image_token_index=95,
    )
    model = made(transformers.Blip2ForConditionalGeneration, config)
    model.generation_config.eos_token_id = None
    return model


def test_blip_2_with_an_encoder_is_refused_with_the_call_that_exports(tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = blip_2(model_type="t5", **sizes)
    with pytest.raises(GenerationError, match=r"pixel_values between the encoder's tokens.*\n    export_onnx"):
        export_folder(model, tmp_path / "out")
    ids = torch.tensor([[95] * 4 + [5, 6, 7]])
    inputs = {"pixel_values": numbers(1, 3, 16, 16), "input_ids": ids, "decoder_input_ids": torch.tensor([[0, 9]])}
    done = export_onnx(model, kwargs={**inputs, "use_cache": False}, path=tmp_path / "call.onnx", dynamic_shapes=None)
    assert done.report.ok


def git():
    config = transformers.GitConfig(vision_config={**SIZES, **PICTURE}, **SIZES, vocab_size=96)
    return made(transformers.GitForCausalLM, config)


def test_a_decoder_that_also_reads_pictures_is_refused_unless_its_text_is_asked_for():
    """GIT writes what is in a picture: its folder was one of text alone, without a word."""
    with pytest.raises(GenerationError, match=r"reads pixel_values in addition to input_ids.*task='text-generation'"):
        pieces_for(git(), "auto")
    task, (piece,) = pieces_for(git(), "text-generation", Split(proof="none"))
    assert task == "text-generation"
    assert any("also takes pixel_values" in remark for remark in piece.remarks)


@pytest.mark.parametrize(
    ("name", "kind", "lost"),
    [
        ("fuyu", "FuyuForCausalLM", "(pixel_values|image_patches)"),
        ("phi4_multimodal", "Phi4MultimodalForCausalLM", "audio_input_features"),
    ],
)
def test_pictures_and_sound_are_found_by_the_signature(name, kind, lost):
    with torch.device("meta"):
        model = getattr(transformers, kind)(transformers.AutoConfig.for_model(name))
    with pytest.raises(GenerationError, match=rf"reads .*{lost}"):
        pieces_for(model, "auto")


def rocbert():
    return transformers.RoCBertConfig(**SIZES, vocab_size=96, is_decoder=True)


@pytest.mark.parametrize(
    ("kind", "config", "lost"),
    [
        ("LayoutLMForTokenClassification", lambda: small_config("layoutlm"), "bbox"),  # where words are on a page
        ("BertForTokenClassification", lambda: small_config("bert"), None),
        # how characters look and sound
        ("RoCBertForCausalLM", rocbert, "input_shape_ids, input_pronunciation_ids"),
        ("LlamaForCausalLM", lambda: small_config("llama"), None),
    ],
)
def test_data_that_a_file_does_not_take_are_named_in_the_report(kind, config, lost):
    (piece,) = pieces_for(made(getattr(transformers, kind), config()), "auto", Split(proof="none"))[1]
    named = [remark for remark in piece.remarks if "also takes" in remark]
    assert len(named) == (lost is not None)
    assert all(f"also takes {lost}" in remark for remark in named)


def masked():
    widths = {f"decoder_{name}": value for name, value in SIZES.items()}
    return made(transformers.ViTMAEForPreTraining, transformers.ViTMAEConfig(**SIZES, **PICTURE, **widths))


def hashed(layers):
    sizes = {"vocab_size": 96, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4}
    sizes |= {"feed_forward_size": 48, "axial_pos_embds": False, "max_position_embeddings": 64, "num_buckets": 4}
    chunks = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4}
    config = transformers.ReformerConfig(**sizes, **chunks, attn_layers=layers, is_decoder=False)
    return made(transformers.ReformerForSequenceClassification, config)


def loud():
    model = voice()
    model.noise_scale = 0.5
    return model


DRAWS = r"draws random numbers in evaluation.*export_onnx\("


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lxmert, r"LxmertModel .*export_onnx\(.*record_calls"),
        (masked, DRAWS),
        (lambda: hashed(["local", "lsh"]), DRAWS),
        (loud, DRAWS),
    ],
    ids=["LXMERT", "ViTMAE", "Reformer", "VITS"],
)
def test_other_inputs_and_draws_in_evaluation_are_refused_in_a_line(make, words):
    """A program that drew passed with the seed of the trace, and its stored cases failed with other numbers."""
    with pytest.raises(GenerationError, match=words) as raised:
        pieces_for(make(), "auto")
    assert "\n" not in str(raised.value)
    state = torch.get_rng_state()
    assert len(pieces_for(voice(), "auto")[1]) == 1  # it draws, and multiplies by zero
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kind", "sizes", "task", "shape"),
    [
        ("VideoMAEForVideo", {**PICTURE, "num_frames": 4}, "video-classification", (4, 3, 32, 32)),
        ("ASTForAudio", {"max_length": 32, "num_mel_bins": 16, "patch_size": 8}, "audio-classification", (32, 16)),
        ("BertForMultipleChoice", {"vocab_size": 96}, "multiple-choice", (5, 8)),
    ],
)
def test_choices_a_video_of_frames_and_a_spectrogram_are_scored_as_by_the_model(tmp_path, kind, sizes, task, shape):
    """Videos were given pictures, and refused; AST was given samples."""
    name = kind.split("For")[0]
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes, num_labels=3)
    model = made(getattr(transformers, kind if name == "Bert" else f"{kind}Classification"), config)
    done = export_folder(model, tmp_path / "out", to="program")
    assert (done.task, done.verified.ok) == (task, True)
    given = (90 * numbers(5, *shape).sigmoid()).long() if name == "Bert" else numbers(5, *shape)
    with torch.no_grad():
        wanted = model(given).logits
    torch.testing.assert_close(open_model(tmp_path / "out", trust=True)(given).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_classifier_that_reads_its_end_token_is_a_file_of_any_number_of_rows(tmp_path):
    """BART's: the example had no end token; its program asserted for one row what follows from two."""
    layers = sides(layers=1, attention_heads=4, ffn_dim=48)
    sizes = {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.3, "num_labels": 3}
    model = made(transformers.BartForSequenceClassification, transformers.BartConfig(**layers, **sizes))
    done = export_folder(model, tmp_path / "out")
    assert (done.task, done.verified.ok) == ("text-classification", True)
    assert "refuses some inputs by their values" in str(done.reports["model.onnx"])
    opened = open_model(tmp_path / "out")
    for rows, length in ((1, 33), (2, 13), (4, 6)):
        ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(rows))
        ids[:, -1] = 2
        ids[-1, -2:] = torch.tensor([2, 1])  # a padded row
        given = {"input_ids": ids, "attention_mask": ids.ne(1).long()}
        with torch.no_grad():
            wanted = model(**given).logits
        torch.testing.assert_close(opened(**given).logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_length_that_its_code_divides_by_names_the_way_for_one_length(tmp_path):
    """Reformer cuts a text into pieces of 4: a program of any length is refused by its proof, one of a length works."""
    model = hashed(["local", "local"])
    with pytest.raises(ReplayError, match=r"cannot be exported to model\.pt2 for all sizes.*dynamic_shapes=None"):
        export_folder(model, tmp_path / "out", to="program")
    ids = torch.randint(5, 90, (2, 8), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    report = export_onnx(model, kwargs=given, path=tmp_path / "one.onnx", dynamic_shapes=None).report
    assert report.max_difference < 1e-4


def test_an_encoder_in_training_mode_is_refused_with_the_line_to_type(tmp_path):
    """Its dropout draws; after a training that is the usual mistake."""
    model = transformers.BertModel(small_config("bert")).train()
    with pytest.raises(GenerationError, match=r"BertModel is in training mode.*\n    model\.eval\(\)"):
        export_folder(model, tmp_path / "out", proof="none")
    assert not (tmp_path / "out").exists()
