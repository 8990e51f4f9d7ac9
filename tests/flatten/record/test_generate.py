"""A recorded `generate` gives examples and dynamic shapes with which prefill and decode are exported, and replayed."""

import pytest
import torch
import transformers

from tests.cache_words import WORD, cache_of
from tests.flatten.record.record_models import MODELS, generate_inputs, make_generator
from yobx_flatten import export_program, make_dynamic_cache, record_calls, register_flattening_functions

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
# what cannot be recorded or traced before 5.17, and why
_LATER = {
    "mamba": "generate makes Mamba's cache before the first call, so both phases have one and look alike",
    "gemma3_vision": "the model compares the number of image tokens, which it counts, with that of the features",
}
_IS_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17)


def generate(name, *, tokens, **sizes):
    model = make_generator(name)
    with record_calls(model) as calls, torch.no_grad():
        model.generate(**generate_inputs(name, **sizes), max_new_tokens=tokens, do_sample=False)
    return calls


def export(part, **sizes):
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        return torch.export.export(
            part.module(), (), part.example(**sizes), dynamic_shapes=part.dynamic_shapes(**sizes), strict=False
        )


def _marks(name):
    marks = [pytest.mark.skipif(_IS_OLD and name in _LATER, reason=_LATER.get(name, ""))]
    return marks if name in ("t5", "mamba") else [*marks, pytest.mark.extended]


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in MODELS])
def test_both_phases_export_and_serve_other_calls(name):
    calls = generate(name, tokens=6)
    longer = generate(name, tokens=12, batch=3, length=11, seed=5)
    assert {phase: len(part) for phase, part in calls.phases().items()} == {"prefill": 1, "decode": 5}
    assert {phase: len(part) for phase, part in longer.phases().items()} == {"prefill": 1, "decode": 11}
    for phase in ("prefill", "decode"):
        program = export(calls[phase])
        same, other = (
            calls[phase].replay(program, tolerance=TOLERANCE),
            longer[phase].replay(program, tolerance=TOLERANCE),
        )
        assert same.ok, str(same)
        assert other.ok, str(other)


def test_one_row_is_enough():
    """A batch of one is repeated in the example, so that the program takes others."""
    calls = generate("llama", tokens=4, batch=1)
    assert calls.example("decode")["input_ids"].shape == (2, 1)
    replayed = generate("llama", tokens=4, batch=3, length=5)["decode"].replay(export(calls["decode"]))
    assert replayed.ok, str(replayed)


def test_a_program_for_several_new_tokens_serves_the_prefill_too():
    calls = generate("gemma3", tokens=12, length=4)
    program = export(calls["decode"], new=3)
    assert calls.dynamic_shapes("decode", new=3)["input_ids"].keys() == {0, 1}
    assert calls["decode"].replay(program, tolerance=TOLERANCE).ok

    prefill = calls["prefill"][0]
    inputs = {name: value for name, value in prefill.inputs.items() if name not in calls.constants("prefill")}
    layers = [type(layer) for layer in cache_of(prefill.outputs).layers]
    nothing = torch.zeros(2, 2, 0, 8)
    inputs[WORD] = make_dynamic_cache([(nothing, nothing)] * 2, layers, [{"sliding_window": 8}, {}])
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        outputs = program.module()(**inputs)
    torch.testing.assert_close(outputs.logits, prefill.outputs.logits)
    torch.testing.assert_close(cache_of(outputs).layers[0].keys, cache_of(prefill.outputs).layers[0].keys)


def test_export_program_takes_a_recorded_prefill():
    """The empty cache of the example stays empty: whoever writes its shapes means the prefill."""
    calls = generate("llama", tokens=2)
    prefill = calls["prefill"]
    exported = export_program(
        prefill.module(), kwargs=prefill.example(), dynamic_shapes=prefill.dynamic_shapes(), cases=[]
    )
    assert {"input_ids", "attention_mask"} <= set(exported.report.input_names)
    assert not any(name.startswith("past_key_values") for name in exported.report.input_names)
    assert [case.steps for case in exported.report.cases] == [1]
    assert prefill.replay(exported).ok


def test_export_program_keeps_the_recorded_prefill_of_the_model_itself():
    model = make_generator("gpt2")
    with record_calls(model) as calls, torch.no_grad():
        model(input_ids=torch.ones(2, 4, dtype=torch.int64), use_cache=True)
    (call,) = calls
    assert (call.kind, call.past, call.new) == ("prefill", 0, 4)
    exported = export_program(
        model, kwargs=call.kwargs, dynamic_shapes={"input_ids": {1: torch.export.Dim.AUTO}}, cases=[]
    )
    (remark,) = exported.report.remarks
    assert remark.startswith("use_cache=True is fixed in the program and the file")


def test_encoder_and_decoder_are_recorded_on_their_own():
    model = make_generator("bart")
    with record_calls(model.model.encoder) as encoder, record_calls(model.model.decoder) as decoder, torch.no_grad():
        model.generate(**generate_inputs("bart"), max_new_tokens=4)
    assert [call.kind for call in encoder] == ["forward"]
    assert [(call.kind, call.past) for call in decoder] == [("prefill", 0), ("decode", 1), ("decode", 2), ("decode", 3)]
    axes = decoder.axes()
    assert axes.names[f"{WORD}.self_attention_cache.key_0", 2] == "past"
    assert axes.names[f"{WORD}.cross_attention_cache.key_0", 2] == "source"
    assert axes.names["encoder_hidden_states", 1] == "source"


def test_an_image_belongs_to_the_prefill():
    """What the vision tower gave is an argument of the first call only."""
    calls = generate("gemma3_vision", tokens=3)
    seen = {"mm_encoder_outputs", "pixel_values"}  # what the tower gave, or in older versions what it is given
    assert seen & set(calls.example("prefill"))
    assert not seen & set(calls.example("decode"))


def test_another_number_of_images_is_said_to_be_another_structure():
    """One tensor per image in a tuple is structure: the replay names the place instead of two walls of text."""

    class Sums(torch.nn.Module):
        def forward(self, images):
            return sum(image.sum() for image in images)

    sums = Sums()
    with record_calls(sums) as two:
        sums((torch.ones(2), torch.ones(2)))
    with record_calls(sums) as three:
        sums((torch.ones(2),) * 3)
    (result,) = three.replay(export(two)).calls
    assert result.error == (
        "SpecMismatchError: other structure: kwargs['images'] exported: tuple of 2 recorded: tuple of 3"
    )


def test_a_call_without_an_input_of_the_program_is_named():
    """generate leaves out a mask that is 1 everywhere, from transformers 5.23 on."""

    class Adds(torch.nn.Module):
        def forward(self, x, y=None):
            return x if y is None else x + y

    adds = Adds()
    with record_calls(adds) as calls:
        adds(torch.ones(2), torch.ones(2))
        adds(torch.ones(2))
    program = export(calls["forward"])
    (result,) = calls.replay(program, "forward-y").calls
    assert result.error == "SpecMismatchError: the call has no y, which the program requires"
    (result,) = calls.replay(export(calls["forward-y"]), "forward").calls
    assert result.error == "SpecMismatchError: the program does not take y"


def test_a_static_cache_is_prefilled_and_decoded():
    """Its tensors are there from the second call on; only the batch varies, and the record is not written into."""
    model = make_generator("llama")
    with record_calls(model) as calls, torch.no_grad():
        model.generate(
            **generate_inputs("llama"), max_new_tokens=5, cache_implementation="static", disable_compile=True
        )
    assert list(calls.phases()) == ["prefill", "decode"]
    positions = [int(cache_of(call.inputs).get_seq_length()) for call in calls["decode"]]
    assert positions == [8, 9, 10, 11]
    assert calls["decode"].replay(export(calls["decode"])).ok
