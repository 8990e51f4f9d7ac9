"""Exported files generate what the model generates, token by token."""

import concurrent.futures
import copy
import dataclasses
import json
import pathlib
import types
from typing import Any

import onnxruntime
import pytest
import torch
import transformers
from transformers.cache_utils import Cache

from tests.cases import cases
from tests.flatten.model_folder.exported_folders import exported
from tests.models import SIZES, make_model
from yobx_flatten import DecodeSizes, decode_inputs, export_folder, export_onnx, export_program, open_generator
from yobx_flatten.errors import GenerationError, InvalidArgumentError
from yobx_flatten.generate import GenerationSettings, OnnxGenerator, ProgramGenerator
from yobx_flatten.generate.generator import Generator
from yobx_flatten.generate.pictures import check_ports, empty_cache
from yobx_flatten.generate.settings import find_parts
from yobx_flatten.generate.steps import Parts, Steps
from yobx_flatten.huggingface.decoders import rereads_at_switch, switch_of
from yobx_flatten.model_folder.manifest import read_manifest
from yobx_flatten.runners.ports import Port, cache_slots, check_cache_outputs, present_of

pytestmark = pytest.mark.slow

TOKENS = 40  # with 9 of the prompt: six times the small window of 8


def prompts(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 259, (rows, length), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2:, :1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def expected(model, inputs, tokens=TOKENS, **options):
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, num_beams=1, **options)


@pytest.fixture(scope="module")
def mistral():
    model, folder = exported("mistral")
    return model, OnnxGenerator(folder, threads=1)


def test_the_prompt_may_be_shorter_or_longer_than_the_window(mistral):
    model, generator = mistral
    for length in (1, 7, 8, 30):
        inputs = {"input_ids": prompts(2, length)["input_ids"], "attention_mask": torch.ones(2, length).long()}
        found = generator.generate(**inputs, max_new_tokens=12)
        assert found.tolist() == expected(model, inputs, 12).tolist(), length


def test_a_cache_stays_as_small_as_the_window_and_goes_back_without_a_copy(mistral):
    _, generator = mistral
    sequence = generator.steps.begin(*prompts().values(), None, None, ())
    sizes, read, written = [], [], []
    step = generator.parts.decoder.step

    def watched(feeds, cache, **options):
        outputs, following = step(feeds, cache, **options)
        read.append(dict(cache))
        written.append(dict(following))
        return outputs, following

    try:
        generator.parts.decoder.step = watched
        for _ in generator._stream(sequence, TOKENS, None):
            sizes.append({tuple(value.shape()) for value in sequence.cache.values()})
    finally:
        del generator.parts.decoder.step
    assert sizes[0] == sizes[-1] == {(3, 2, 7, 16)}
    assert all(isinstance(value, onnxruntime.OrtValue) for value in written[0].values())
    assert all(written[0][name] is read[1][name] for name in written[0])


@pytest.mark.parametrize(("name", "optimize"), [("mistral", None), ("llama", "onnxruntime")])
def test_tokens_can_be_read_as_they_are_made(name, optimize):
    generator = OnnxGenerator(exported(name, optimize=optimize)[1], threads=1)
    whole = generator.generate(**prompts(), max_new_tokens=6)[:, 9:]
    streams = [generator.stream(**prompts(), max_new_tokens=6) for _ in range(2)]
    pairs = list(zip(*streams, strict=True))
    assert [first.tolist() for first, _ in pairs] == whole.T.tolist()
    assert [second.tolist() for _, second in pairs] == whole.T.tolist()


def test_two_threads_share_a_generator(mistral):
    _, generator = mistral
    wanted = generator.generate(**prompts(), max_new_tokens=10).tolist()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [pool.submit(generator.generate, **prompts(), max_new_tokens=10) for _ in range(2)]
    assert [future.result().tolist() for future in found] == [wanted, wanted]


def test_a_row_that_has_ended_is_padded_and_the_others_go_on(mistral):
    model, _ = mistral
    plain = expected(model, prompts(), 12)
    end = int(plain[1, 9 + 3])  # what the second row says fourth
    settings = GenerationSettings(eos_token_ids=(end,), pad_token_id=0)
    ended = OnnxGenerator(exported("mistral")[1], settings=settings)
    wanted = expected(model, prompts(), 12, eos_token_id=end, pad_token_id=0)
    assert ended.generate(**prompts(), max_new_tokens=12).tolist() == wanted.tolist()
    one = {name: value[1:2] for name, value in prompts().items()}
    assert ended.generate(**one, max_new_tokens=12).shape == expected(model, one, 12, eos_token_id=end).shape


ONE = torch.ones(1, 3).long()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "input_ids must be integers of shape"),
        ({"input_ids": ["hello", "you"]}, "Read a text with the tokenizer of the model:"),
        ({"input_ids": torch.ones(2, 3)}, "input_ids must be integers"),
        ({"input_ids": torch.ones(0, 3).long()}, "not empty"),
        ({"input_ids": torch.tensor([[5, -1]])}, r"input_ids contains -1, which is not a token\."),
        ({"input_ids": ONE, "attention_mask": torch.ones(1, 4).long()}, "but input_ids has"),
        ({"input_ids": ONE, "attention_mask": torch.tensor([[1, 1, 0]])}, "on the left"),
        ({"input_ids": ONE, "max_new_tokens": 0}, "max_new_tokens must be"),
        ({"input_ids": ONE, "input_features": torch.ones(1, 2, 3)}, "a decoder-only model"),
        ({"input_ids": ONE, "pixel_values": torch.ones(1, 3, 4, 4)}, "reads text only: leave pixel_values out"),
        ({"input_ids": ONE, "image_grid_thw": torch.tensor([[1, 4, 4]])}, "image_grid_thw was passed, but no images"),
        ({"input_ids": ONE, "video_grid_thw": torch.tensor([[1, 4, 4]])}, "video_grid_thw was passed, but no videos"),
        ({"input_ids": ONE, "second_per_grid_ts": [1.0]}, "second_per_grid_ts has 1 numbers for 0 rows of video"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(mistral, inputs, words):
    for call in (mistral[1].generate, mistral[1].stream):
        with pytest.raises(InvalidArgumentError, match=words):
            call(**inputs)


def test_inputs_of_an_encoder_that_do_not_fit_are_refused():
    tokens = torch.ones(2, 3).long()
    text, sound = (OnnxGenerator(exported(name)[1]) for name in ("t5", "whisper"))
    encoder = types.SimpleNamespace(ports={"pixel_values": None}, name="encoder_model.onnx")
    pictures = Generator(dataclasses.replace(text.parts, encoder=encoder), text.settings)
    without_start = Generator(text.parts, dataclasses.replace(text.settings, decoder_start_token_id=None))
    heard, shown = {"input_features": torch.ones(1, 8, 16)}, {"pixel_values": torch.ones(1, 3, 4, 4)}
    begun = {"input_ids": tokens}
    for generator, given, words in [
        (text, {**begun, "attention_mask": torch.ones(2, 4).long()}, r"has shape \(2, 4\), but input_ids .* \(2, 3\)"),
        (text, {"input_ids": tokens - 4}, "input_ids contains -3, which is not a token"),
        (text, {**begun, "decoder_input_ids": torch.tensor([[0], [-2]])}, "decoder_input_ids contains -2, which"),
        (text, {**begun, "decoder_input_ids": torch.zeros(2, 1)}, "decoder_input_ids must be integers"),
        (text, {**begun, "decoder_input_ids": torch.zeros(3, 1).long()}, "has 3 rows, but the encoder's input has 2"),
        (without_start, begun, r"No decoder_start_token_id .* Pass decoder_input_ids"),
        (sound, {}, r"reads sound\. Pass input_features of shape"),
        (sound, {"input_features": torch.ones(4, 8)}, r"reads sound\. Pass input_features of shape"),
        (sound, {"input_ids": tokens[:1], **heard}, "reads input_features, not input_ids: remove input_ids"),
        (sound, {**heard, "pixel_values_videos": torch.ones(1)}, "reads input_features, not pixel_values_videos"),
        (pictures, {**shown, "pixel_values_videos": torch.ones(1)}, "reads pixel_values, not pixel_values_videos"),
        (pictures, {**shown, "image_grid_thw": torch.tensor([[1, 4, 4]])}, "reads pixel_values, not image_grid_thw"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            generator.generate(**given)


def test_the_mask_of_sound_is_fed_to_an_encoder_that_reads_it():
    ports = {name: Port(name, (None, None), torch.float32) for name in ("input_values", "attention_mask")}

    def step(feeds, cache):
        return {"last_hidden_state": (feeds["input_values"] * feeds["attention_mask"])[..., None]}, cache

    encoder: Any = types.SimpleNamespace(name="encoder_model.onnx", ports=ports, step=step)
    steps = Steps(Parts(encoder, encoder=encoder, postnet=encoder), GenerationSettings())
    context, _ = steps.encode(None, torch.tensor([[1, 1, 0, 0]]), {"input_values": torch.ones(1, 4)})
    assert context["encoder_hidden_states"].flatten().tolist() == [1, 1, 0, 0]


def test_a_file_for_the_first_call_is_used_with_a_folder(tmp_path):
    for name in ("encoder_model", "decoder_model", "decoder_with_past_model"):
        (tmp_path / f"{name}.onnx").touch()
    assert find_parts(tmp_path, ".onnx", None)["prefill"] == tmp_path / "decoder_model.onnx"
    assert find_parts(tmp_path, ".onnx", "first.onnx")["prefill"] == pathlib.Path("first.onnx")


def test_a_single_file_and_a_program_in_memory_and_on_disk_generate(tmp_path):
    model, path = make_model("gemma3"), tmp_path / "gemma.onnx"
    made = export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=path, cases=[])
    ids = torch.randint(3, 96, (2, 5), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False).tolist()
    settings = GenerationSettings(eos_token_ids=(2,), pad_token_id=0)
    assert OnnxGenerator(path, settings=settings).generate(ids, max_new_tokens=20).tolist() == wanted
    made.save(tmp_path / "gemma.pt2")
    for given in (made, made.program, tmp_path / "gemma.pt2"):
        found = ProgramGenerator(given, settings=settings, trust=True).generate(ids, max_new_tokens=20)
        assert found.tolist() == wanted


class Answers(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.embed = name, torch.nn.Embedding(5, 4)

    def forward(self, input_ids):
        return {self.name: self.embed(input_ids)}


def test_what_cannot_generate_is_refused(tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    (tmp_path / "bad.pt2").write_bytes(b"no program")
    for path, words in (
        (tmp_path / "none.onnx", "There is no"),
        (tmp_path, "has none of the files"),
        (tmp_path / "bad.onnx", "onnxruntime cannot load"),
    ):
        with pytest.raises(GenerationError, match=words):
            OnnxGenerator(path)
    with pytest.raises(GenerationError, match=r"torch\.export cannot load"):
        ProgramGenerator(tmp_path / "bad.pt2", trust=True)
    with pytest.raises(InvalidArgumentError, match="ProgramGenerator takes"):
        ProgramGenerator(3)
    scale = export_program(torch.nn.Identity(), kwargs={"input": torch.ones(2, 3)}, cases=[])
    with pytest.raises(GenerationError, match="has the inputs input, which a generation loop does not pass"):
        ProgramGenerator(scale)
    tokens = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    for output, words in (
        ("logits", r"has no inputs past_key_values\.\*: it is an encoder, or a decoder without its cache"),
        ("hidden", r"returns hidden, and no logits: it cannot generate\. Call an encoder once:\n    open_model"),
    ):
        with pytest.raises(GenerationError, match=words):
            ProgramGenerator(export_program(Answers(output), kwargs=tokens, cases=[]))
    (tmp_path / "decoder_with_past_model.onnx").touch()
    with pytest.raises(GenerationError, match=r"but not decoder_model\.onnx, encoder_model\.onnx"):
        OnnxGenerator(tmp_path)


# one loop reads programs and files: what only some decoders do is asked of the files, which open ten times as fast
NAMES = ["llama", "gemma3_text", "qwen3", "mistral", "gpt2", "t5"]
WRITERS = [*((name, "onnx") for name in NAMES), ("mistral", "program"), ("t5", "program")]


@pytest.mark.parametrize(("name", "to"), cases(WRITERS, quick=WRITERS[:6]))
def test_decoders_generate_as_their_models_do(name, to):
    model, folder = exported(name, to)
    generator = OnnxGenerator(folder) if to == "onnx" else ProgramGenerator(folder, trust=True)
    assert generator.generate(**prompts(), max_new_tokens=TOKENS).tolist() == expected(model, prompts()).tolist()


@pytest.mark.parametrize("to", cases(["onnx", "program"], quick=["onnx"]))
def test_whisper_writes_what_its_model_writes(to):
    """Whisper's own `generate` leaves the start token away."""
    model, folder = exported("whisper", to)
    generator = OnnxGenerator(folder) if to == "onnx" else ProgramGenerator(folder, trust=True)
    config = model.config
    shape = (3, config.num_mel_bins, 2 * config.max_source_positions)
    sound = {"input_features": torch.randn(shape, generator=torch.Generator().manual_seed(2))}
    assert generator.generate(**sound, max_new_tokens=TOKENS)[:, 1:].tolist() == expected(model, sound).tolist()


def test_llava_sees_what_its_model_sees():
    model, folder = exported("llava")
    generator = OnnxGenerator(folder)
    image_token, places = model.config.image_token_id, 16
    row = torch.tensor([5, *[image_token] * places, 9, 11, 13])
    ids = torch.stack([torch.cat([torch.tensor([0, 0]), row]), torch.cat([row, torch.tensor([17, 19])])])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": images}
    found = generator.generate(**inputs, max_new_tokens=TOKENS).tolist()
    assert found == expected(model, inputs).tolist()
    assert found != generator.generate(**{**inputs, "pixel_values": images.flip(0) * 2}, max_new_tokens=TOKENS).tolist()
    with pytest.raises(InvalidArgumentError, match="32 image tokens"):
        generator.generate(**{**inputs, "pixel_values": images[:1]})


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padded_rows_go_past_the_window_in_a_cache_that_is_bound_once(name):
    """Layers that slide keep all tokens in such a folder, and their mask leaves out those outside of the window."""
    model, folder = exported(name, optimize="onnxruntime")
    assert read_manifest(folder).cache == "shared"
    assert json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]["past_present_share_buffer"]
    generator = OnnxGenerator(folder, threads=1)
    assert len(generator.parts.decoder.shared) == len(generator.parts.decoder.slots)
    found = generator.generate(**prompts(), max_new_tokens=TOKENS)
    assert found.tolist() == expected(model, prompts()).tolist()


STATES = [("mamba", "onnx"), ("lfm2", "onnx"), ("lfm2", "program")]


@pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 several tokens after a state leave the mask out"
)
@pytest.mark.parametrize(("name", "to"), cases(STATES, quick=STATES[:1]))
def test_states_begin_as_zeros(name, to):
    model, folder = exported(name, to)
    generator = OnnxGenerator(folder, threads=1) if to == "onnx" else ProgramGenerator(folder, trust=True)
    ids = torch.randint(3, 259, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    read = [(ids, mask), (ids[:1, :1], mask[1:2, :1]), (ids.repeat(1, 4), torch.ones(3, 36).long())]
    for tokens, shown in read:
        for options in ({}, {"num_beams": 2}):
            found = generator.generate(tokens, shown, max_new_tokens=12, **options)
            wanted = model.generate(tokens, attention_mask=shown, max_new_tokens=12, do_sample=False, **options)
            assert found.tolist() == wanted.tolist(), (tokens.shape, options)


KEY = Port("past_key_values.0.key", (None, 2, None, 8), torch.float16)
CROSS = Port("past_key_values.0.encoder.key", (None, 2, None, 8), torch.float32)


def test_ports_that_a_loop_cannot_feed_are_refused():
    slots = cache_slots([KEY, CROSS], ["logits", "present.0.key"])
    assert [slot.present for slot in slots] == ["present.0.key", None]
    with pytest.raises(GenerationError, match=r"model\.onnx takes past_key_values\.length and does not return present"):
        check_cache_outputs([KEY.name, "past_key_values.length"], ["logits", "present.0.key"], "model.onnx")
    other = Port("past_key_values.0.memory", (None, 4, 8), torch.float32)
    with pytest.raises(GenerationError, match=r"value of .*memory before the first token is not known(.|\n)*prefill="):
        empty_cache(cache_slots([other], [present_of(other.name)]), 1)
    ports = {"input_ids": Port("input_ids", (None,), None), "attention_mask": Port("attention_mask", (), torch.int64)}
    with pytest.raises(GenerationError, match=r"In m\.onnx, the inputs input_ids are strings"):
        check_ports(ports, ["input_ids", "attention_mask"], "m.onnx")
    with pytest.raises(GenerationError, match="has the inputs attention_mask, which a generation loop does not pass"):
        check_ports(ports, ["input_ids"], "m.onnx")


SWITCH = 24
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 8.0], "factor": 8.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS, "original_max_position_embeddings": SWITCH}
TOKENS_ACROSS = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
SMALL = {**SIZES, **TOKENS_ACROSS, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5}


def _phi3():
    lengths = {"max_position_embeddings": 8 * SWITCH, "original_max_position_embeddings": SWITCH}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, **lengths, rope_parameters=dict(LONGROPE)))


def _llama(**rope):
    config = transformers.LlamaConfig(**SMALL, max_position_embeddings=SWITCH, rope_parameters=rope)
    return transformers.LlamaForCausalLM(config)


MODELS = {
    "Phi-3, longrope": _phi3,
    "Llama, longrope": lambda: _llama(**LONGROPE),
    "Llama, dynamic": lambda: _llama(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(", ", "_"))
def exported_phi(request, tmp_path_factory):
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("its configurations state positions in another form")
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    folder = tmp_path_factory.mktemp("switch") / "folder"
    new = copy.deepcopy(model)
    report = export_folder(model, folder)
    return request.param, new, model, folder, report


def _prompts(length):
    ids = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


def _expected(model, ids, mask, **how):
    # of a copy: the angles of `dynamic` are those of the longest text that a model has read
    return copy.deepcopy(model).generate(ids, attention_mask=mask, do_sample=False, **how)


@pytest.mark.parametrize(
    ("length", "options"),
    [*((length, {}) for length in (4, SWITCH - 3, SWITCH, SWITCH + 1, SWITCH + 7)), (SWITCH - 3, {"num_beams": 3})],
)
def test_tokens_are_the_model_s_on_both_sides_of_the_switch(exported_phi, length, options):
    """Phi-3 drops its cache there, and everything is read again, with the tokens that each beam has by then."""
    _, model, _, folder, _ = exported_phi
    ids, mask = _prompts(length)
    expected = _expected(model, ids, mask, max_new_tokens=10, **options)
    assert torch.equal(open_generator(folder).generate(ids, mask, max_new_tokens=10, **options), expected)


def test_the_export_goes_across_the_switch_states_it_and_leaves_the_model(exported_phi):
    name, new, model, folder, report = exported_phi
    cases_ = [check.case for check in report.verified.checks]
    assert f"12 tokens, greedily, after {SWITCH - 3}" in cases_
    assert any(f"past {SWITCH - 2}, new 1" in case for case in cases_)
    assert switch_of(model.config.to_dict()) == SWITCH
    assert rereads_at_switch(model, SWITCH) is name.startswith("Phi-3")
    assert json.loads((folder / "yobx_flatten.json").read_text())["rereads_at_switch"] is name.startswith("Phi-3")
    ids, mask = _prompts(SWITCH + 2)
    expected = _expected(new, ids, mask, max_new_tokens=6)
    assert torch.equal(_expected(model, ids, mask, max_new_tokens=6), expected)


def test_a_folder_that_does_not_state_it_stops_at_the_switch(exported_phi, tmp_path):
    """Files that came from elsewhere: other tokens could follow, so the call ends with the reason."""
    *_, folder, _ = exported_phi
    for name in ("model.onnx", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ids, mask = _prompts(SWITCH - 3)
    generator = open_generator(tmp_path)
    assert generator.generate(ids, mask, max_new_tokens=4).shape == (2, SWITCH + 1)
    with pytest.raises(GenerationError, match=r"(?s)grew past 24 tokens.*export_folder\(model, folder\)"):
        generator.generate(ids, mask, max_new_tokens=5)
    assert generator.generate(*_prompts(SWITCH + 1), max_new_tokens=5).shape == (2, SWITCH + 6)


def test_other_kinds_of_positions_have_no_switch():
    for kind in ("yarn", "llama3", "linear", "default"):
        rope = {"rope_type": kind, "original_max_position_embeddings": SWITCH}
        assert switch_of({"rope_parameters": rope, "max_position_embeddings": 96}) is None
    per_layer = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert switch_of({"rope_parameters": per_layer, "max_position_embeddings": 96}) == 96
    assert rereads_at_switch(torch.nn.Linear(2, 2), SWITCH) is None  # not known of a model without `generate`
