"""Which sizes vary in recorded calls, read off a `generate`, and the report that a person reads."""

import numpy
import pytest
import torch
import transformers

from tests.cache_words import WORD, cache_of
from tests.flatten.export.record.record_models import MODELS, generate_inputs, make_generator
from tests.modules import module_class
from yobx_flatten import RecordError, export_program, make_dynamic_cache, record_calls, register_flattening_functions

Dim = torch.export.Dim


Passes = module_class("Passes", lambda self, **inputs: torch.zeros(1))


def record(*calls):
    model = Passes()
    with record_calls(model) as recorded:
        for inputs in calls:
            model(**{n: torch.zeros(v) if isinstance(v, tuple) else v for n, v in inputs.items()})
    return recorded


def test_sizes_that_vary_together_have_one_name():
    calls = record({"x": (2, 5, 8), "y": (2, 5)}, {"x": (3, 7, 8), "y": (3, 7)}, {"x": (3, 9, 8), "y": (3, 9)})
    axes = calls.axes()
    assert axes.names == {("x", 0): "batch", ("y", 0): "batch", ("x", 1): "n", ("y", 1): "n"}
    assert axes.sizes["n"] == {0: 5, 1: 7, 2: 9}
    first = calls[:1]  # states what this call shows
    assert (type(first), len(first)) == (type(calls), 1)
    assert first.axes().names == {("x", 0): "batch", ("y", 0): "batch"}
    assert calls.dynamic_shapes() == {"x": {0: Dim.AUTO, 1: Dim.AUTO}, "y": {0: Dim.AUTO, 1: Dim.AUTO}}


@pytest.mark.parametrize(
    ("third", "relation"), [((8, 10, 13), "n2 = n + 3"), ((10, 14, 20), "n2 = 2 * n"), ((7, 10, 13), "n2 = batch + n")]
)
def test_one_size_may_follow_from_others(third, relation):
    batches, lengths = (2, 3, 3), (5, 7, 10)
    calls = record(*({"x": (b, n), "z": (1, t)} for b, n, t in zip(batches, lengths, third, strict=True)))
    assert calls.axes().relations == [relation]


def test_one_size_for_all_is_taken_for_the_batch_and_none_where_sizes_differ_and_both_are_said():
    calls = record({"x": (4, 3), "y": (4,)}, {"x": (4, 3), "y": (4,)})
    assert set(calls.axes().names.values()) == {"batch"}
    assert calls.axes().remarks == [
        "batch: one size (4) was seen. It is assumed to vary, as axis 0 of every tensor has this size."
    ]
    calls = record({"x": (4, 3), "scale": (3,)}, {"x": (4, 3), "scale": (3,)})
    assert calls.axes().names == {}
    assert "no axis was recognized as the batch: sizes along axis 0 differ (x 4, scale 3)" in calls.axes().remarks[0]
    assert calls.dynamic_shapes() == {"x": {}, "scale": {}}
    varies = record({"x": (4, 3), "scale": (3,)}, {"x": (6, 3), "scale": (3,)})
    assert varies.axes().names == {("x", 0): "batch"}


def test_a_number_that_varies_is_an_input_one_that_does_not_a_constant_and_a_flag_makes_two_phases():
    calls = record({"x": (2, 3), "step": 4, "flag": True}, {"x": (3, 3), "step": 5, "flag": True})
    assert calls.constants() == {"flag": True}
    assert calls.dynamic_shapes()["step"] is Dim.AUTO
    calls = record({"x": (2, 3), "flag": True}, {"x": (2, 3), "flag": False}, {"x": (2, 3), "flag": True})
    assert {name: len(part) for name, part in calls.phases().items()} == {"forward": 2, "forward#2": 1}
    with pytest.raises(RecordError, match=r"2 phases .*: 'forward' \(2 calls\), 'forward#2' \(1 call\). Choose one"):
        calls.example()
    assert calls.constants("forward#2") == {"flag": False}
    # an argument that is there at times names its phase
    calls = record({"x": (2, 3), "pixels": (2, 4)}, {"x": (3, 3), "pixels": None})
    assert list(calls.phases()) == ["forward", "forward-pixels"]


def test_nan_and_objects_do_not_split_a_phase():
    """NaN is the same value in every call, as a streamer is; an object that is made anew for each is of one class."""
    same = {"x": (2, 3), "low": float("nan"), "streamer": object()}
    calls = record(*({**same, "made": object(), "rows": numpy.ones(2)} for _ in range(3)))
    assert {name: len(part) for name, part in calls.phases().items()} == {"forward": 3}
    assert list(calls.constants()) == ["low", "streamer"]
    assert calls.constants()["streamer"] is same["streamer"]


def test_an_unknown_phase_is_answered_with_those_there_are_and_nothing_recorded_is_said():
    with pytest.raises(RecordError, match=r"No phase 'decode' was recorded\. .*: 'forward' \(1 call\)"):
        record({"x": (2,)})["decode"]
    calls = record()
    assert str(calls) == "Passes.forward: 0 calls"
    with pytest.raises(RecordError, match=r"No phase 'decode' was recorded\. .*: none"):
        calls["decode"]
    with pytest.raises(RecordError, match=r"No call of Passes\.forward was recorded"):
        calls.example()


def test_the_example_has_sizes_that_torch_does_not_fix_and_others_repeat_what_was_recorded():
    calls = record({"x": (1, 4)}, {"x": (9, 6)}, {"x": (3, 5)})
    assert tuple(calls.example()["x"].shape) == (3, 5)
    calls = record({"x": (1, 4)}, {"x": (1, 6)})
    assert tuple(calls.example()["x"].shape) == (2, 4)
    model = torch.nn.Identity()
    with record_calls(model) as calls:
        model(torch.arange(4).reshape(2, 2)), model(torch.arange(6).reshape(3, 2))
    assert calls.example(batch=5)["input"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(("sizes", "message"), [({"rows": 3}, "named 'rows'"), ({"batch": 0}, "an int of 1 or more")])
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(RecordError, match=message):
        record({"x": (2, 3)}, {"x": (3, 3)}).example(**sizes)


def test_a_method_of_any_object_is_recorded_and_exported():
    target = type("Encodes", (), {"encode": lambda self, x, scale=2: x * scale})()
    with record_calls(target, method="encode") as calls:
        for rows in (2, 3):
            target.encode(torch.ones(rows, 4), scale=5)
    program = torch.export.export(calls.module(), (), calls.example(), dynamic_shapes=calls.dynamic_shapes())
    x = torch.randn(7, 4)
    assert torch.equal(program.module()(x=x), x * 5)
    assert calls.replay(program).ok
    assert not calls.replay(lambda x: x * 5 + 1).ok


GEMMA = """\
Gemma3ForCausalLM.forward: 6 calls
  batch 2   new 1, 4   total 4..9   past 0, 4..8   kept 4..7
  total = past + new
  kept = min(past, 7)

prefill: 1 call
  argument        dtype  sizes              varies
  input_ids       int64  2 x 4              0: batch, 1: new
  attention_mask  int64  2 x 4              0: batch, 1: total
  position_ids    int64  2 x 4              0: batch, 1: new
  cache           -      holds nothing yet
  constant: use_cache=True, logits_to_keep=1, return_dict=True

decode: 5 calls
  argument                           dtype    sizes             varies
  input_ids                          int64    2 x 1             0: batch
  attention_mask                     int64    2 x 5..9          0: batch, 1: total
  position_ids                       int64    2 x 1             0: batch
  cache.key_W8_0 ... value_W8_0 (2)  float32  2 x 2 x 4..7 x 8  0: batch, 2: kept
  cache.key_D_1 ... value_D_1 (2)    float32  2 x 2 x 4..8 x 8  0: batch, 2: past
  constant: use_cache=True, logits_to_keep=1, return_dict=True

note: batch: one size (2) was seen. It is assumed to vary, as a registered class states this."""


Returns = module_class("Returns", lambda self, parts, step, at, ratio: at)


def test_a_generate_is_told_phase_by_phase():
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        pytest.skip("the arguments that generate passes differ from version to version; the text is that of 5.23")
    model = make_generator("gemma3")
    with record_calls(model) as calls, torch.no_grad():
        model.generate(**generate_inputs("gemma3", length=4), max_new_tokens=6, do_sample=False)
    # an older word for the cache is longer, and the columns with it
    assert _words(str(calls)) == _words(GEMMA.replace("cache", WORD))


def _words(text):
    return [line.split() for line in text.splitlines()]


def test_numbers_and_other_values_are_shown():
    model = Returns()
    with record_calls(model) as calls:
        for step in (3, 4, 5):
            model([torch.ones(step, 2), torch.ones(step, 2)], step, torch.tensor(1), 0.5)
    assert str(calls).splitlines() == [
        "Returns.forward: 3 calls",
        "  batch 3..5   n 3..5",
        "  n = batch",
        "",
        "forward: 3 calls",
        "  argument           dtype    sizes     varies",
        "  parts.0 ... 1 (2)  float32  3..5 x 2  0: batch",
        "  step               int      3..5      n",
        "  at                 int64    ()",
        "  constant: ratio=0.5",
    ]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_row_is_enough():
    calls = generate("llama", tokens=4, batch=1)
    assert calls.example("decode")["input_ids"].shape == (2, 1)
    replayed = generate("llama", tokens=4, batch=3, length=5)["decode"].replay(export(calls["decode"]))
    assert replayed.ok, str(replayed)


@pytest.mark.slow
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


@pytest.mark.slow
def test_export_program_takes_a_recorded_prefill():
    """The empty cache of the example stays empty: whoever writes its shapes means the prefill."""
    prefill = generate("llama", tokens=2)["prefill"]
    exported = export_program(
        prefill.module(), kwargs=prefill.example(), dynamic_shapes=prefill.dynamic_shapes(), cases=[]
    )
    assert {"input_ids", "attention_mask"} <= set(exported.report.input_names)
    assert not any(name.startswith("past_key_values") for name in exported.report.input_names)
    assert [case.steps for case in exported.report.cases] == [1]
    assert prefill.replay(exported).ok


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_image_belongs_to_the_prefill():
    calls = generate("gemma3_vision", tokens=3)
    seen = {"mm_encoder_outputs", "pixel_values"}  # what the tower gave, or in older versions what it is given
    assert seen & set(calls.example("prefill"))
    assert not seen & set(calls.example("decode"))


@pytest.mark.slow
def test_another_structure_and_an_input_of_the_program_that_is_left_out_are_named():
    """One tensor per image in a tuple is structure; generate leaves out a mask of ones from transformers 5.23 on."""
    sums = module_class(
        "Sums", lambda self, images, y=None: sum(image.sum() for image in images) + (0 if y is None else y)
    )
    with record_calls(model := sums()) as calls:
        model((torch.ones(2), torch.ones(2)))
        model((torch.ones(2), torch.ones(2)), torch.ones(2))
    with record_calls(model) as three:
        model((torch.ones(2),) * 3)
    without, with_y = (export(calls[phase]) for phase in ("forward", "forward+y"))
    other = "the program has inputs of a different structure"
    for replayed, error in (
        (three.replay(without), f"{other}: kwargs['images'] exported: tuple of 2 recorded: tuple of 3"),
        (calls.replay(with_y, "forward"), "the recorded call lacks inputs of the program: y"),
        (calls.replay(without, "forward+y"), "the recorded call has inputs that the program lacks: y"),
    ):
        assert [result.error for result in replayed.calls] == [f"SpecMismatchError: {error}"]


@pytest.mark.slow
def test_a_static_cache_is_prefilled_and_decoded():
    """Its tensors are there from the second call on; only the batch varies, and the record is not written into."""
    model = make_generator("llama")
    with record_calls(model) as calls, torch.no_grad():
        model.generate(
            **generate_inputs("llama"), max_new_tokens=5, cache_implementation="static", disable_compile=True
        )
    assert list(calls.phases()) == ["prefill", "decode"]
    assert [int(cache_of(call.inputs).get_seq_length()) for call in calls["decode"]] == [8, 9, 10, 11]
    assert calls["decode"].replay(export(calls["decode"])).ok
