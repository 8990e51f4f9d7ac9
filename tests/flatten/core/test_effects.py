"""What a call changes beside what it returns, found and undone."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from yobx_flatten.core.effects import Snapshot, shared_generators, undisturbed

HISTORY: list[float] = []
COUNT = 0


class Slotted:
    __slots__ = ("total", "unset")

    def __init__(self):
        self.total = 0


@dataclasses.dataclass
class State:
    keys: torch.Tensor
    seen: list = dataclasses.field(default_factory=list)
    extra: dict = dataclasses.field(default_factory=dict)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.queue = torch.zeros(3)
        self.recent = collections.deque(maxlen=2)


def _state():
    return State(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("state.keys[0, 0] = 1.0", {"state.keys": "written"}),
        ("state.keys[:, 1].add_(1)", {"state.keys": "written"}),
        ("state.keys.numpy()[0, 2] = 4.0", {}),  # which leaves no version
        ("state.keys = torch.cat([state.keys, torch.ones(2, 1)], 1)", {"state.keys": "grown"}),
        ("state.keys = torch.ones(5)", {"state.keys": "replaced"}),
        ("state.keys.data = torch.full((2, 3), 2.0)", {"state.keys": "written"}),
        ("state.seen.append(1)", {"state.seen": "grown"}),
        ("state.extra['a'] = torch.ones(1)", {"state.extra['a']": "set"}),
        ("state.more = 3", {"state.more": "set"}),
        ("del state.extra", {"state.extra": "removed"}),
    ],
)
def test_a_change_has_its_key_path_and_is_undone(act, expected):
    state = _state()
    tensor, version = state.keys, state.keys._version
    held, alone = dict(vars(state)), Snapshot.of(state=state)

    def call():
        with undisturbed(state=state) as before:
            assert not before.changes()
            exec(act, {"state": state, "torch": torch})
            assert before.changes() == expected
            assert alone.changes() == expected
            raise KeyError("half-way")

    with pytest.raises(KeyError, match="half-way"):
        call()
    assert list(vars(state)) == list(held)
    assert all(vars(state)[name] is value for name, value in held.items())
    assert state.keys is tensor
    assert torch.equal(tensor, torch.zeros(2, 3))
    assert tensor._version == version
    assert state.seen == []
    assert state.extra == {}


def test_a_write_without_a_version_is_seen_in_buffers():
    """Arrays of NumPy and ``.data`` share memory and leave no version; so does the norm of a batch in its buffers."""
    for act in (lambda state: state.keys.numpy().fill(4), lambda state: state.keys.data.add_(1)):
        state, holder = _state(), nn.Module()
        before = Snapshot.of(state=state)
        act(state)
        assert not before.changes()
        state = _state()
        holder.register_buffer("keys", state.keys)
        before = Snapshot.of(holder=holder)
        act(state)
        assert before.changes() == {"holder.keys": "written"}


def test_a_read_changes_nothing_and_the_objects_before_and_after_are_known():
    model, state = Counting().eval(), _state()
    first, before = state.keys, Snapshot.of(model=model, state=state)
    with torch.no_grad():
        model.inner[1](model.inner[0](state.keys[:, :2]))
    assert before.changes() == {}
    state.keys = torch.cat([state.keys, torch.ones(2, 1)], 1)
    one, now = before.changes().objects["state.keys"]
    assert one is first
    assert now is state.keys


def test_state_of_a_module_is_named_as_users_name_it_and_undone():
    model = Counting().train()
    stored, hooks = copy.deepcopy(model.state_dict()), dict(model._forward_hooks)
    weight = model.inner[0].weight
    with undisturbed(model=model) as before:
        model.inner[1](torch.randn(4, 2))
        model.inner[0].weight = nn.Parameter(torch.ones(2, 2))
        model.queue = model.queue + 1
        model.recent.append(1)
        assert before.changes() == {
            "model.inner[1].running_mean": "written",
            "model.inner[1].running_var": "written",
            "model.inner[1].num_batches_tracked": "written",
            "model.inner[0].weight": "replaced",
            "model.queue": "replaced",
            "model.recent": "grown",
        }
        model.register_forward_hook(lambda *args: None)
        model.eval()
        model.inner.append(nn.Linear(1, 1))
    assert (model.training, len(model.inner), dict(model._forward_hooks)) == (True, 2, hooks)
    assert model.inner[0].weight is weight
    torch.testing.assert_close(model.state_dict(), stored, rtol=0, atol=0)


def test_gradients_are_effects():
    layer = nn.Linear(2, 1)
    before = Snapshot.of(layer=layer)
    layer(torch.ones(1, 2)).sum().backward()
    assert before.changes() == {"layer.weight.grad": "set", "layer.bias.grad": "set"}
    again = Snapshot.of(layer=layer)
    layer(torch.ones(1, 2)).sum().backward()
    assert again.changes() == {"layer.weight.grad": "written", "layer.bias.grad": "written"}


def _counting_loss():
    count, losses = 0, []

    def loss(value):
        nonlocal count
        count += 1
        losses.append(value)
        loss.last = value

    return loss


def _of_globals(value):
    global COUNT
    COUNT += 1
    HISTORY.append(value)


class Loss:
    calls = 0

    def __init__(self):
        self.slots = Slotted()

    def __call__(self, value):
        Loss.calls += 1
        self.slots.total += value

    def method(self, value):
        self(value)


def _with_default(value, seen=[]):  # noqa: B006 # the state that is looked for
    seen.append(value)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (_counting_loss(), {"loss.count": "replaced", "loss.losses": "grown", "loss.last": "set"}),
        (_of_globals, {"COUNT": "replaced", "HISTORY": "grown"}),
        (Loss(), {"Loss.calls": "replaced", "loss.slots.total": "replaced"}),
        (Loss().method, {"Loss.calls": "replaced", "loss.slots.total": "replaced"}),
        (_with_default, {"loss[0]": "grown"}),
    ],
    ids=["closure", "globals", "class", "method", "default"],
)
def test_python_state_of_a_function_is_seen_and_undone(loss, expected):
    with undisturbed(loss=loss) as before:
        loss(2.0)
        assert before.changes() == expected
    assert before.changes() == {}


def test_generators_of_random_numbers_are_state():
    held = {"torch": torch.Generator(), "python": random.Random(1), "numpy": np.random.default_rng(1)}
    first = copy.deepcopy(held["numpy"]).random(), copy.deepcopy(held["python"]).random()
    with undisturbed(held=held) as before:
        torch.rand(1, generator=held["torch"])
        held["python"].random()
        held["numpy"].random()
        assert set(before.changes().values()) == {"written"}
        assert len(before.changes()) == 3
    assert (held["numpy"].random(), held["python"].random()) == first


def test_a_parameter_that_is_named_is_copied_and_a_graph_still_runs_backward():
    layer, weight = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    stored, state = layer.weight.detach().clone(), State(torch.ones(2))
    out = (weight * state.keys).sum()
    with undisturbed(layer=layer, state=state, parameters=[layer.weight]), torch.no_grad():
        layer.weight.zero_()
        state.keys.zero_()
    assert torch.equal(layer.weight, stored)
    out.backward()
    assert torch.equal(weight.grad, torch.ones(2))


def test_views_and_expanded_tensors_are_restored():
    base = torch.arange(6.0)
    held = {"base": base, "view": base[2:4], "wide": torch.zeros(1).expand(3)}
    with undisturbed(held=held) as before:
        held["view"].fill_(-1)
        assert before.changes() == {"held['base']": "written", "held['view']": "written"}
    assert torch.equal(base, torch.arange(6.0))
    assert base[2:4].data_ptr() == held["view"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_each_dtype_and_an_array_is_seen_and_restored(dtype):
    tensor, array = torch.zeros(4).to(dtype), np.zeros(3)
    bits = tensor.view(torch.uint8).clone()
    with undisturbed(tensor=tensor, array=array) as before:
        tensor.view(torch.uint8).fill_(1)
        array[1] = 2
        assert before.changes() == {"tensor": "written", "array": "written"}
    assert torch.equal(tensor.view(torch.uint8), bits)
    assert array.tolist() == [0, 0, 0]


def test_tensors_of_inference_mode_have_no_version():
    with torch.inference_mode():
        tensor = torch.zeros(3)
        with undisturbed(tensor=tensor) as before:
            tensor.add_(1)
            assert before.changes() == {"tensor": "written"}
    assert torch.equal(tensor, torch.zeros(3))


def test_objects_that_hold_each_other_end_and_rows_of_a_data_set_are_not_entered():
    one, two, rows = {}, [], list(range(1_000_000))
    one["two"], one["self"] = two, one
    two.append(one)
    before = Snapshot.of(one=one, rows=rows)
    two.append(1)
    rows.append(1)
    assert before.changes() == {"one['two']": "grown", "rows": "grown"}


def test_containers_are_put_back_with_their_order_and_locks_and_files_are_left_alone(tmp_path):
    weight, other = torch.ones(2), torch.ones(3)
    held = {
        "lock": threading.Lock(),
        "file": (tmp_path / "a").open("w"),
        "ordered": collections.OrderedDict(x=1, y=2),
        "default": collections.defaultdict(list, k=[1]),
        "set": {3, 4},
        "moments": collections.defaultdict(dict, {weight: {"count": 1}}),
    }
    with held["file"], undisturbed(held=held):
        held["ordered"].move_to_end("x")
        held["default"]["new"].append(1)
        held["set"].add(5)
        held["moments"][weight]["count"] = 2
        held["moments"][other]["count"] = 1
    assert list(held["ordered"]) == ["x", "y"]
    assert (dict(held["default"]), held["default"].default_factory) == ({"k": [1]}, list)
    assert held["set"] == {3, 4}
    assert [*held["moments"]] == [weight]
    assert held["moments"][weight] == {"count": 1}


def test_an_optimizer_is_not_entered():
    """A loss that is a method of a trainer reaches it; a step in another thread may write its state meanwhile."""
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    held = {"optimizer": optimizer}
    with undisturbed(held=held):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 2


@functools.cache
def table(length):
    return torch.zeros(length)


class Tables(nn.Module):
    def forward(self, length):
        return table(length) + self.bounded(length)

    @functools.lru_cache(maxsize=8)  # noqa: B019 # as users write it
    def bounded(self, length):
        return torch.ones(length)


def test_what_a_function_remembers_of_a_call_is_forgotten():
    """A trace would leave tensors without data in it; what it knew before stays where nothing was added."""
    model = Tables()
    known = model(2), table(2)
    with undisturbed(model=model):
        model(2)
    assert table(2) is known[1]
    with undisturbed(model=model):
        model(3)
    assert table.cache_info().currsize == Tables.bounded.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("name", "draw"),
    [("random", random.random), ("numpy.random", np.random.rand), ("torch", lambda: float(torch.rand(())))],
)
def test_shared_generators_are_seeded_and_put_back(name, draw):
    with undisturbed(seed=3):
        first = draw()
    with undisturbed():
        expected = draw()
    with undisturbed(seed=3):
        assert draw() == first
    before = Snapshot.of(**shared_generators())
    assert not before.changes()
    assert draw() == expected
    assert before.changes() == ({} if name == "torch" else {name: "written"})


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.queue, self.names, self.sizes = [torch.zeros(2)], {"a"}, {"one": [1]}
        self.counts = np.zeros(2)
        self.own, self.peak = Owned(), 0.0


class Owned:
    def __init__(self):
        self.seen = collections.deque([1])


def test_attributes_of_a_module_are_restored_and_its_parameters_are_not():
    """A recomputation starts with the attributes of the first forward, and with the present parameters."""
    made = nn.Sequential(Holds(), nn.Linear(2, 2))
    holds = made[0]
    queue, own, before = holds.queue, holds.own, Snapshot.of_attributes(made)
    assert not before.changes()
    holds.queue[0].add_(1)
    holds.queue.append(1)
    holds.names.add("b")
    holds.sizes["one"].append(2)
    holds.counts[0] = 5
    holds.own.seen.append(2)
    holds.peak, holds.added, holds.own = 3.0, "new", Owned()
    weight = holds.linear.weight = nn.Parameter(torch.ones(2, 2))
    assert set(before.changes()) >= {"0.peak", "0.added", "0.own", "0.queue", "0.names"}
    before.restore()
    assert holds.queue is queue
    assert len(queue) == 1
    assert queue[0].tolist() == [0, 0]
    assert (holds.names, holds.sizes, holds.peak) == ({"a"}, {"one": [1]}, 0.0)
    assert holds.own is own
    assert list(own.seen) == [1]
    assert holds.counts.tolist() == [0, 0]
    assert not hasattr(holds, "added")
    assert holds.linear.weight is weight
