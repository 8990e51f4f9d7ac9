"""Models whose positions are turned by other angles from a length on: generation below, above and across it."""

import copy
import json

import pytest
import torch
import transformers

from tests.models import SIZES
from yobx_flatten import export_folder, open_generator
from yobx_flatten.errors import GenerationError
from yobx_flatten.huggingface.decoders import rereads_at_switch, switch_of

SWITCH = 24
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 8.0],
    "factor": 8.0,
    "original_max_position_embeddings": SWITCH,
}
TOKENS = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
SMALL = {**SIZES, **TOKENS, "vocab_size": 96, "num_key_value_heads": 2, "initializer_range": 0.5}


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
def exported(request, tmp_path_factory):
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


@pytest.mark.parametrize("length", [4, SWITCH - 3, SWITCH, SWITCH + 1, SWITCH + 7])
def test_tokens_are_the_model_s_on_both_sides_of_the_switch(exported, length):
    """Below, across and above the length; Phi-3 drops its cache there and reads everything again."""
    _, model, _, folder, _ = exported
    ids, mask = _prompts(length)
    expected = _expected(model, ids, mask, max_new_tokens=10)
    assert torch.equal(open_generator(folder).generate(ids, mask, max_new_tokens=10), expected)


def test_beams_are_the_model_s_across_the_switch(exported):
    """Every beam is read again, with the tokens that it has by then."""
    _, model, _, folder, _ = exported
    ids, mask = _prompts(SWITCH - 3)
    expected = _expected(model, ids, mask, max_new_tokens=8, num_beams=3)
    assert torch.equal(open_generator(folder).generate(ids, mask, max_new_tokens=8, num_beams=3), expected)


def test_the_export_itself_generates_across_the_switch(exported):
    _, _, _, _, report = exported
    names = [check.case for check in report.verified.checks]
    assert f"12 tokens, greedily, after {SWITCH - 3}" in names
    assert any(f"past {SWITCH - 2}, new 1" in name for name in names)


def test_an_export_leaves_the_positions_as_they_were(exported):
    """Replays read long texts; the model then generates as a new one does, also in the middle of those lengths."""
    _, new, model, _, _ = exported
    ids, mask = _prompts(SWITCH + 2)
    expected = _expected(new, ids, mask, max_new_tokens=6)
    assert torch.equal(_expected(model, ids, mask, max_new_tokens=6), expected)


def test_the_folder_states_what_the_model_does_at_the_switch(exported):
    name, model, _, folder, _ = exported
    assert switch_of(model.config.to_dict()) == SWITCH
    assert rereads_at_switch(model, SWITCH) is name.startswith("Phi-3")
    assert json.loads((folder / "yobx_flatten.json").read_text())["rereads_at_switch"] is name.startswith("Phi-3")


def test_a_folder_that_does_not_state_it_stops_at_the_switch(exported, tmp_path):
    """Files that came from elsewhere: other tokens could follow, so the call ends with the reason."""
    *_, folder, _ = exported
    for name in ("model.onnx", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ids, mask = _prompts(SWITCH - 3)
    generator = open_generator(tmp_path)
    assert generator.generate(ids, mask, max_new_tokens=4).shape == (2, SWITCH + 1)
    with pytest.raises(GenerationError, match=r"(?s)grew past 24 tokens.*export_folder\(model, folder\)"):
        generator.generate(ids, mask, max_new_tokens=5)
    assert generator.generate(*_prompts(SWITCH + 1), max_new_tokens=5).shape == (2, SWITCH + 6)


def test_a_model_with_a_loop_of_its_own_is_not_guessed():
    assert rereads_at_switch(torch.nn.Linear(2, 2), SWITCH) is None


def test_other_kinds_of_positions_have_no_switch():
    """YaRN and Llama 3 have one set of angles for all lengths."""
    for kind in ("yarn", "llama3", "linear", "default"):
        rope = {"rope_type": kind, "original_max_position_embeddings": SWITCH}
        assert switch_of({"rope_parameters": rope, "max_position_embeddings": 96}) is None
    per_layer = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert switch_of({"rope_parameters": per_layer, "max_position_embeddings": 96}) == 96
