"""Which sizes vary, under which name, and how they are related: read off the sizes of several calls."""

import numpy
import pytest
import torch

from yobx_flatten import RecordError, record_calls

Dim = torch.export.Dim


class Passes(torch.nn.Module):
    def forward(self, **inputs):
        return torch.zeros(1)


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
    assert calls.dynamic_shapes() == {"x": {0: Dim.AUTO, 1: Dim.AUTO}, "y": {0: Dim.AUTO, 1: Dim.AUTO}}


@pytest.mark.parametrize(
    ("third", "relation"), [((8, 10, 13), "n2 = n + 3"), ((10, 14, 20), "n2 = 2 * n"), ((7, 10, 13), "n2 = batch + n")]
)
def test_one_size_may_follow_from_others(third, relation):
    batches, lengths = (2, 3, 3), (5, 7, 10)
    calls = record(*({"x": (b, n), "z": (1, t)} for b, n, t in zip(batches, lengths, third, strict=True)))
    assert calls.axes().relations == [relation]


def test_one_size_for_all_is_taken_for_the_batch_and_said_so():
    calls = record({"x": (4, 3), "y": (4,)}, {"x": (4, 3), "y": (4,)})
    assert set(calls.axes().names.values()) == {"batch"}
    assert calls.axes().remarks == [
        "batch: one size (4) was seen. It is assumed to vary, as axis 0 of every tensor has this size."
    ]


def test_no_batch_is_guessed_where_sizes_differ():
    calls = record({"x": (4, 3), "scale": (3,)}, {"x": (4, 3), "scale": (3,)})
    assert calls.axes().names == {}
    assert "no axis was recognized as the batch: sizes along axis 0 differ (x 4, scale 3)" in calls.axes().remarks[0]
    assert calls.dynamic_shapes() == {"x": {}, "scale": {}}
    varies = record({"x": (4, 3), "scale": (3,)}, {"x": (6, 3), "scale": (3,)})
    assert varies.axes().names == {("x", 0): "batch"}


def test_a_number_that_varies_is_an_input_and_one_that_does_not_is_a_constant():
    calls = record({"x": (2, 3), "step": 4, "flag": True}, {"x": (3, 3), "step": 5, "flag": True})
    assert calls.constants() == {"flag": True}
    assert calls.dynamic_shapes()["step"] is Dim.AUTO


def test_a_flag_that_varies_makes_two_phases():
    calls = record({"x": (2, 3), "flag": True}, {"x": (2, 3), "flag": False}, {"x": (2, 3), "flag": True})
    assert {name: len(part) for name, part in calls.phases().items()} == {"forward": 2, "forward#2": 1}
    with pytest.raises(RecordError, match=r"2 phases .*: 'forward' \(2\), 'forward#2' \(1\). Choose one: phase='f"):
        calls.example()
    assert calls.constants("forward#2") == {"flag": False}


def test_nan_and_objects_do_not_split_a_phase():
    """NaN is the same value in every call, as a streamer is; an object that is made anew for each is of one class."""
    same = {"x": (2, 3), "low": float("nan"), "streamer": object()}
    calls = record(*({**same, "made": object(), "rows": numpy.ones(2)} for _ in range(3)))
    assert {name: len(part) for name, part in calls.phases().items()} == {"forward": 3}
    assert list(calls.constants()) == ["low", "streamer"]
    assert calls.constants()["streamer"] is same["streamer"]


def test_an_argument_that_is_there_at_times_names_its_phase():
    calls = record({"x": (2, 3), "pixels": (2, 4)}, {"x": (3, 3), "pixels": None})
    assert list(calls.phases()) == ["forward", "forward-pixels"]


def test_an_unknown_phase_is_answered_with_those_there_are():
    with pytest.raises(RecordError, match=r"No phase 'decode' was recorded\. .*: 'forward' \(1\)"):
        record({"x": (2,)})["decode"]
    with pytest.raises(RecordError, match=r"No phase 'decode' was recorded\. .*: none"):
        record()["decode"]


def test_nothing_recorded_is_said():
    calls = record()
    assert len(calls) == 0
    assert str(calls) == "Passes.forward: 0 calls"
    with pytest.raises(RecordError, match=r"No call of Passes\.forward was recorded"):
        calls.example()


def test_the_example_has_sizes_that_torch_does_not_fix():
    calls = record({"x": (1, 4)}, {"x": (9, 6)}, {"x": (3, 5)})
    assert tuple(calls.example()["x"].shape) == (3, 5)
    calls = record({"x": (1, 4)}, {"x": (1, 6)})
    assert tuple(calls.example()["x"].shape) == (2, 4)


def test_an_example_of_other_sizes_repeats_what_was_recorded():
    model = torch.nn.Identity()
    with record_calls(model) as calls:
        model(torch.arange(4).reshape(2, 2)), model(torch.arange(6).reshape(3, 2))
    assert calls.example(batch=5)["input"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(("sizes", "message"), [({"rows": 3}, "no size 'rows'"), ({"batch": 0}, "number of 1 or more")])
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(RecordError, match=message):
        record({"x": (2, 3)}, {"x": (3, 3)}).example(**sizes)


def test_a_slice_of_calls_states_what_these_calls_show():
    calls = record({"x": (2, 5)}, {"x": (3, 5)}, {"x": (4, 9)})
    assert calls.axes().names == {("x", 0): "batch", ("x", 1): "n"}
    first = calls[:2]
    assert (type(first), len(first)) == (type(calls), 2)
    assert first.axes().names == {("x", 0): "batch"}


class Encodes:
    def encode(self, x, scale=2):
        return x * scale


def test_a_method_of_any_object_is_recorded_and_exported():
    target = Encodes()
    with record_calls(target, method="encode") as calls:
        for rows in (2, 3):
            target.encode(torch.ones(rows, 4), scale=5)
    program = torch.export.export(calls.module(), (), calls.example(), dynamic_shapes=calls.dynamic_shapes())
    x = torch.randn(7, 4)
    assert torch.equal(program.module()(x=x), x * 5)
    assert calls.replay(program).ok
