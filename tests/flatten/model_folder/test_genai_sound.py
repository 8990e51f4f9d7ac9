"""onnxruntime-genai opens folders of models that hear or see, and writes the tokens of the model."""

import json

import numpy
import pytest
import torch
import transformers

from yobx_flatten import InvalidArgumentError, export_folder, open_generator, open_model, verify_folder
from yobx_flatten.model_folder.pieces.text import encoder_input
from yobx_flatten.model_folder.pieces.vision_language import images_for
from yobx_flatten.model_folder.plan import check_genai
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow

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
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    params = genai.GeneratorParams(opened := genai.Model(str(folder)))
    params.set_search_options(max_length=LONGEST, do_sample=False, batch_size=rows)
    generator = genai.Generator(opened, params)
    sound = encoder_input(model, rows, 0).numpy()  # the library does not copy it: it has to live as long
    generator.set_model_input("input_features", sound)
    generator.append_tokens(numpy.array([PROMPT] * rows, numpy.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row).tolist() for row in range(rows)]


@pytest.mark.parametrize("rows", [1, 2])
def test_the_library_writes_the_tokens_of_the_model(whisper, rows):
    """Also those after tokens that the configuration suppresses, of which the library has no list."""
    model, folder, free = whisper
    wanted = of_model(model, rows, 1)
    assert wanted[0] != free[0]  # without the list there would be others
    assert of_library(model, folder, rows) == wanted
    assert len(wanted[0]) == LONGEST


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


def test_each_file_is_proven_and_the_folder_states_what_the_library_reads(whisper):
    _, folder, _ = whisper
    report = verify_folder(folder)
    assert report.ok
    assert [check.file for check in report.checks] == ["encoder.onnx"] * 3 + ["decoder.onnx"] * 3 + ["generate"]
    stated = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert (stated["type"], stated["decoder"]["outputs"]["logits"]) == ("whisper", "allowed_logits")
    sound = json.loads((folder / "audio_processor_config.json").read_text(encoding="utf-8"))
    steps = [one["operation"]["type"] for one in sound["feature_extraction"]["sequence"]]
    assert steps == ["AudioDecoder", "STFTNorm", "LogMelSpectrum"]


def test_features_without_their_keys_are_refused(whisper):
    model, folder, _ = whisper
    opened = open_model(folder)
    read = opened.get_encoder()(encoder_input(model, 1, 0))
    alone = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=read[0])
    with pytest.raises(InvalidArgumentError, match=r"also needs present.0.encoder.key from encoder.onnx"):
        opened(encoder_outputs=alone, decoder_input_ids=torch.tensor([PROMPT]))


@pytest.mark.parametrize(
    ("name", "task", "why"),
    [
        ("t5", "text2text-generation", "marian-ssru, has a recurrent decoder"),
        ("whisper", "automatic-speech-recognition", r"with 3000 frames \(max_source_positions=1500\)"),
        ("moonshine", "automatic-speech-recognition", "the only audio model it runs is Whisper"),
        ("bert", "fill-mask", "it has no type for fill-mask"),
    ],
)
def test_what_the_library_does_not_run_is_refused(name, task, why):
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


@pytest.mark.parametrize("pictures", [1, 0])
@torch.no_grad()
def test_the_library_writes_the_tokens_of_the_model_about_pictures(llava, pictures):
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model, folder = llava
    given = _prompt(model, pictures)
    ids = given["input_ids"]
    wanted = model.generate(**given, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    params = genai.GeneratorParams(opened := genai.Model(str(folder)))
    params.set_search_options(max_length=ids.shape[1] + NEW, do_sample=False)
    generator = genai.Generator(opened, params)
    if pictures:  # the library copies neither: both have to live as long
        pixels, count = given["pixel_values"].numpy(), numpy.array([ids.shape[1] - 4])
        generator.set_model_input("pixel_values", pixels)
        generator.set_model_input("num_image_tokens", count)
    generator.append_tokens(ids.to(torch.int32).numpy())
    while not generator.is_done():
        generator.generate_next_token()
    found = generator.get_sequence(0).tolist()
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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma3", "onnxruntime-genai passes no token types"),
        ("qwen2_vl", "3D positions"),
        ("llava_next", "cut into tiles"),
        ("idefics3", "cut into tiles"),
    ],
)
def test_pictures_that_the_library_cannot_show_are_refused(name, why):
    """Before anything is exported: what it would write is not what the model writes."""
    with pytest.raises(InvalidArgumentError, match=f"does not run the files of a .*{why}"):
        check_genai(small_model(name), "image-text-to-text")
