"""The kinds of models that a sample is spread over, their decode inputs, and what onnxruntime-genai opened."""

import logging
from pathlib import Path

import pytest
import torch

from matrix.cut import choose, parse
from matrix.cut_cases import COLUMNS
from matrix.genai_cases import COLUMNS as GENAI_COLUMNS
from matrix.genai_cases import TYPES
from matrix.inputs import NoCacheError, decode, go_on, loop
from matrix.kinds import kind_of, quiet_sample
from matrix.media import IMAGE_TOKEN, picture_of
from matrix.models import make_model
from matrix.results import Results, passes, recorded_file
from tests.cache_words import cache_of
from tests.runtime.huggingface.hf_small import known_model
from yobx_flatten import DecodeSizes

RECORDED = Path(__file__).parent.parent / "docs" / "data" / "cut-5.24.0.json"


def test_a_kind_is_read_off_the_configuration_and_the_logger_is_as_before_after_a_sample(tmp_path, monkeypatch):
    """What has no small configuration is a kind of its own."""
    before = logging.root.manager.disable
    assert quiet_sample(["a1", "a2", "b1"], lambda name: name[0], 2) == ["a1", "b1"]
    with pytest.raises(ZeroDivisionError):
        quiet_sample(["a"], lambda name: 1 / 0, 1)
    assert logging.root.manager.disable == before
    for name, kind in [
        ("llama", ("causal",)),
        ("jamba", ("causal", "experts", "states")),
        ("gemma3n_text", ("causal", "shared keys")),
        ("seq2seq:t5", ("seq2seq",)),
        ("image:qwen3_5_moe", ("image", "experts", "states")),
        ("speech:dia", ("speech",)),
    ]:
        assert kind_of(name) == kind
    recorded = Results(tmp_path / "cut.json", {}, "")
    recorded.types = {"llama": {"columns": {"cut": {"ok": True, "phases": 7}}}}
    assert kind_of("llama", recorded) == ("causal", "7 phases")
    assert kind_of("phi3", recorded) == ("causal",)
    monkeypatch.setattr("matrix.kinds.make_config", lambda name: 1 / 0)
    assert kind_of("llama") == ("causal", "not built")


def test_twenty_five_types_stand_for_every_kind_that_passed():
    chosen = choose(parse(["--all", "--sample", "25", "--against", str(RECORDED)]))
    recorded = Results.read(RECORDED)
    assert len(chosen) == 25
    assert all(passes(recorded.types[name], list(COLUMNS)) for name in chosen)
    kinds = [kind_of(name, recorded) for name in chosen]
    everything = {kind_of(name, recorded) for name, entry in recorded.types.items() if passes(entry, list(COLUMNS))}
    assert len(set(kinds)) == min(25, len(everything))
    words = {word for kind in kinds for word in kind}
    assert {"causal", "seq2seq", "image", "speech", "experts", "states", "shared keys", "9 phases"} <= words
    assert ("causal", "2 phases") in kinds


SIZES = DecodeSizes(2, 5, 3)


@pytest.mark.parametrize(
    "name",
    [
        "musicgen",  # has several embeddings
        "seq2seq:prophetnet",  # decodes one token at a time
        "seq2seq:voxtral_realtime",  # two caches, and a sound for every token
        "image:granite4_vision",  # makes no cache of its own
        "image:idefics",  # looks at the picture in every call
        "image:pix2struct",  # an encoder of pictures
        "image:udop",  # boxes on a page
        "speech:dia",  # has no get_input_embeddings; a code per channel
        "speech:kyutai_speech_to_text",
        "speech:speech-encoder-decoder",
        "speech:whisper",
    ],
)
def test_a_model_goes_on_from_its_decode_inputs(name):
    model = known_model(name)
    kwargs = decode(model, SIZES)
    assert len(loop(model, kwargs, 3)) == 3
    assert len(go_on(model, kwargs, cache_of(kwargs), 4)) == 4


def test_a_prompt_begins_with_a_picture_and_positions_behind_it_are_inputs():
    """Qwen2-VL keeps the difference of its last prompt; a program would hold it as a constant."""
    model = make_model("image:llava")
    _, length = picture_of(model, 2, torch.Generator().manual_seed(1))
    kwargs = decode(model, SIZES)
    assert cache_of(kwargs).get_seq_length() == length + SIZES.past
    assert kwargs["attention_mask"].shape == (2, length + SIZES.past + SIZES.new)
    assert not (kwargs["input_ids"] == IMAGE_TOKEN).any()
    for name in ("image:blip", "image:pi0"):
        with pytest.raises(NoCacheError):
            decode(make_model(name), SIZES)
    model = make_model("image:qwen2_vl")
    kwargs = decode(model, SIZES)
    # a picture of 2 x 2 parts takes 2 positions, so all that follows is 2 behind the number of tokens
    assert kwargs["position_ids"][:, 1].tolist() == [[7, 8, 9]] * 3
    assert model.model.rope_deltas is None


def test_every_type_of_the_list_is_recorded_and_opens_with_a_shared_cache():
    types = Results.read(recorded_file("genai")).types
    assert sorted(types) == sorted(TYPES)
    for name, entry in types.items():
        assert [entry["columns"][column]["ok"] for column in GENAI_COLUMNS if column != "opened"] == [True] * 3, name
        assert entry["columns"]["opened"]["ok"] is not False
