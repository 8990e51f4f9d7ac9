"""Recording keeps copies of what went in and came out, and leaves the model as it was."""

import copy
import dataclasses
import threading

import pytest
import torch
import transformers

from yobx_flatten import (
    InvalidArgumentError,
    NotRegisteredError,
    RecordError,
    record_calls,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)


class Adds(torch.nn.Module):
    def forward(self, x, y=1):
        return x + y

    def encode(self, x):
        return {"encoded": self(x, 2) * 2}


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    mode: str = "mean"


@pytest.fixture
def registered_state():
    register_class_flattening(
        State, lambda s: ([s.hidden], s.mode), lambda children, mode: State(children[0], mode), None
    )
    yield
    unregister_class_flattening(State)


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_arguments_are_kept_by_name_however_they_were_passed():
    model = Adds()
    with record_calls(model) as calls:
        model(torch.ones(2), torch.ones(2))
        model(y=3, x=torch.zeros(2))
    assert [list(call.inputs) for call in calls] == [["x", "y"], ["x", "y"]]
    assert calls[1].args == ()
    assert calls[1].kwargs["y"] == 3
    assert torch.equal(calls[0].outputs, torch.full((2,), 2.0))


def test_positional_only_and_starred_arguments_come_back_by_position():

    class Starred(torch.nn.Module):
        def forward(self, x, /, y, *rest, scale=1, **more):
            return (x + y + sum(rest)) * scale + more["offset"]

    model, one = Starred(), torch.ones(2)
    with record_calls(model) as calls:
        model(one, one, one, one, scale=2, offset=5)
        model(one, y=one, offset=5)
    assert [len(call.args) for call in calls] == [4, 1]
    for call in calls:
        assert torch.equal(model(*call.args, **call.kwargs), call.outputs)


def test_a_record_is_not_changed_by_what_happens_to_its_tensors():
    memory = torch.zeros(4)

    class Writes(torch.nn.Module):
        def forward(self, x):
            memory.add_(1)
            return memory[:2]

    model = Writes()
    with record_calls(model) as calls:
        model(memory[2:])
        model(memory[2:])
    assert [call.inputs["x"].tolist() for call in calls] == [[0, 0], [1, 1]]
    assert [call.outputs.tolist() for call in calls] == [[1, 1], [2, 2]]


def test_what_is_read_off_a_record_is_a_contiguous_detached_copy():
    """Code compiled for it takes what everybody else passes. No graph is kept alive, and writing changes no record."""
    model = Adds()
    x = torch.arange(12, dtype=torch.bfloat16).reshape(2, 6).requires_grad_()[:, 2:]
    with record_calls(model) as calls:
        model(x)
    found = calls[0].inputs["x"]
    assert found.dtype is torch.bfloat16
    assert not found.requires_grad
    assert not calls[0].outputs.requires_grad
    assert (found.stride(), calls.example()["x"].stride()) == ((4, 1), (4, 1))
    found.fill_(-9)
    calls.example()["x"].fill_(-9)
    assert torch.equal(calls[0].inputs["x"], x)


def test_a_cache_is_kept_as_it_was_before_the_call():
    """The model fills the cache it is given; the record of the inputs holds the tokens seen before."""

    class Remembers(torch.nn.Module):
        def forward(self, x, past_key_values):
            past_key_values.update(x, x, 0)
            return past_key_values

    model, cache, x = Remembers(), transformers.DynamicCache(), torch.ones(1, 2, 3, 4)
    with record_calls(model) as calls:
        model(x, cache)
        model(x, cache)
    assert [call.inputs["past_key_values"].get_seq_length() for call in calls] == [0, 3]
    assert [call.outputs.get_seq_length() for call in calls] == [3, 6]
    assert [(call.kind, call.past, call.new) for call in calls] == [("prefill", 0, 3), ("decode", 3, 3)]


def test_a_dataclass_comes_back_as_itself(registered_state):

    class Reads(torch.nn.Module):
        def forward(self, x, state):
            return State(state.hidden + x, state.mode)

    model = Reads()
    with record_calls(model) as calls:
        for rows in (2, 3):
            model(torch.ones(rows, 4), State(torch.zeros(rows, 4), "sum"))
    assert type(calls[1].inputs["state"]) is State
    assert calls[1].outputs.mode == "sum"
    assert calls.dynamic_shapes() == {"x": {0: torch.export.Dim.AUTO}, "state": [{0: torch.export.Dim.AUTO}]}
    program = torch.export.export(calls.module(), (), calls.example(), dynamic_shapes=calls.dynamic_shapes())
    assert calls.replay(program).max_difference == 0.0


def test_a_class_that_nobody_registered_is_named_with_the_line_to_type():
    ran = []

    class Reads(torch.nn.Module):
        def forward(self, state):
            ran.append(state)

    model = Reads()
    with pytest.raises(NotRegisteredError, match=r"inputs\['state'\] is a .*State(.|\n)*register"), record_calls(model):
        model(State(torch.zeros(2)))
    assert ran == []
    assert "forward" not in vars(model)


# -- options ---------------------------------------------------------------------------------------------------------


def test_limit_records_the_first_calls_that_return():
    model = Adds()
    with record_calls(model, limit=2) as calls:
        for value in (torch.ones(1), "text", torch.ones(2), torch.ones(3)):
            if isinstance(value, str):
                with pytest.raises(TypeError):
                    model(value)
            else:
                model(value)
    assert [tuple(call.inputs["x"].shape) for call in calls] == [(1,), (2,)]


def test_outputs_may_be_left_out():
    model = Adds()
    with record_calls(model, outputs=False) as calls:
        model(torch.ones(1))
    with pytest.raises(RecordError, match="outputs=True"):
        _ = calls[0].outputs


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_a_method_is_recorded_by_name_or_as_it_is():
    model = Adds()
    with (
        record_calls(model, method="encode") as by_name,
        record_calls(model.encode) as bound,
        record_calls(model) as own,
    ):
        model.encode(torch.ones(2))
    assert len(by_name) == len(bound) == len(own) == 1
    assert by_name[0].outputs["encoded"].tolist() == [6, 6]
    assert vars(model).keys() == vars(Adds()).keys()


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        *((target, {}, "expected a module, or a method") for target in (Adds, 3, torch.add, lambda x: x)),
        *((Adds(), {"limit": limit}, "limit must be a number of 1 or more") for limit in (0, -1, 2.5, True)),
        (Adds(), {"method": "decode"}, "Adds has no method 'decode'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_something_is_replaced(target, options, said):
    with pytest.raises(InvalidArgumentError, match=said), record_calls(target, **options):
        pass
    assert not isinstance(target, Adds) or "forward" not in vars(target)


# -- the model is as it was ------------------------------------------------------------------------------------------


def test_the_model_is_as_it_was_after_an_exception():
    model, found = Adds(), []

    def record():
        with record_calls(model) as calls:
            found.append(calls)
            model(torch.ones(1))
            model("half-way")

    with pytest.raises(TypeError, match="str"):
        record()
    assert "forward" not in vars(model)
    assert len(found[0]) == 1


def test_a_forward_of_the_instance_is_put_back():
    """Some libraries put a function on the module; that very function is there afterwards."""
    model = Adds()
    own = model.forward = lambda x: x * 5
    with record_calls(model) as calls:
        assert model(torch.ones(1)).item() == 5
    assert model.forward is own
    assert len(calls) == 1


def test_recordings_may_be_left_in_any_order():
    model = Adds()
    first, second = record_calls(model), record_calls(model)
    one, two = first.__enter__(), second.__enter__()
    model(torch.ones(1))
    first.__exit__(None, None, None)
    model(torch.ones(1))
    second.__exit__(None, None, None)
    model(torch.ones(1))
    assert (len(one), len(two)) == (1, 2)
    assert "forward" not in vars(model)


def test_what_others_put_on_the_model_meanwhile_stays():
    model = Adds()
    with record_calls(model) as calls:
        inner = model.forward
        outer = model.forward = lambda x: inner(x) * 2
        model(torch.ones(1))
    assert model.forward is outer
    assert model(torch.ones(1)).item() == 4
    assert len(calls) == 1


def test_a_deep_copy_made_meanwhile_is_not_recorded():
    model = torch.nn.Linear(2, 2)
    with record_calls(model) as calls:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.weight.zero_(), twin.bias.zero_()
        assert twin(torch.ones(1, 2)).abs().sum() == 0
    assert len(calls) == 0


def test_a_trace_is_not_recorded():
    """Its tensors are placeholders."""
    model = Adds()
    with record_calls(model) as calls:
        torch.export.export(model, (torch.ones(2),))
    assert len(calls) == 0


def test_calls_of_several_threads_are_all_recorded():
    model, barrier = Adds(), threading.Barrier(4)

    def work(number):
        barrier.wait()
        for _ in range(20):
            model(torch.full((2,), float(number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with record_calls(model) as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [call.index for call in calls] == list(range(80))
    assert all(torch.equal(call.outputs, call.inputs["x"] + 1) for call in calls)


def test_inside_the_block_of_the_user_too():

    class Passes(torch.nn.Module):
        def forward(self, past_key_values):
            return past_key_values

    model = Passes()
    with register_flattening_functions(patch_transformers=True):
        with record_calls(model) as calls:
            model(transformers.DynamicCache())
        assert torch.utils._pytree.tree_leaves(transformers.DynamicCache()) == []
    assert type(calls[0].outputs) is transformers.DynamicCache
