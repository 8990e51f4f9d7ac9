"""Each line that is printed can be pasted: afterwards torch takes the object apart."""

import collections
import dataclasses
import enum

import pytest
import torch
import torch.utils._pytree as pytree

import yobx_flatten
from yobx_flatten import check_inputs, check_recipe, find_unregistered, register, unregister_class_flattening

X = torch.zeros(2, 3)


class Plain:
    def __init__(self):
        self.key, self.value, self.window, self.mask = X, [X], 8, None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = X, "name"


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    step: int = dataclasses.field(default=1, metadata={"static": True})


class Items(dict):
    pass


class Row(list):
    pass


def with_attributes(obj, **attributes):
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


class Default(collections.defaultdict):
    pass


class Color(enum.Enum):
    RED = 1


class Written:
    def __init__(self, a, name):
        self.a, self.name = a, name

    def tree_flatten(self):
        return (self.a,), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


@pytest.mark.parametrize(
    ("sample", "lines"),
    [
        (Plain(), "register(Plain, children=['key', 'value', 'mask'], static=['window'])"),
        (Slotted(), "register(Slotted)"),
        (Frozen(X), "register(Frozen)"),
        (Items(a=X), "register(Items)"),
        (Row([X]), "register_class_flattening(Row, lambda x: (list(x), None), lambda items, _: Row(items), None)"),
        (with_attributes(Row([X]), scale=X, name="n"), "register(Row, children=['scale'], static=['name'])"),
        (with_attributes(Items(a=X), scale=X), "register(Items, children=['scale'])"),
        (Written(X, "n"), "register_pytree_node_class(Written)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_the_line_registers_the_class(sample, lines):
    (found,) = find_unregistered(sample)
    assert found.remedy == lines
    cls = type(sample)
    exec(found.remedy, {**{name: getattr(yobx_flatten, name) for name in yobx_flatten.__all__}, cls.__name__: cls})
    try:
        assert find_unregistered(sample) == []
        assert X in pytree.tree_leaves(sample)[:1]
        check_recipe(cls, sample)
    finally:
        unregister_class_flattening(cls)


def test_the_block_registers_the_outputs_of_diffusers(monkeypatch):
    """diffusers registers them itself; where it did not, the block does."""
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_utils")
    output = scheduling.SchedulerOutput(prev_sample=X)
    others = {cls: node for cls, node in pytree.SUPPORTED_NODES.items() if cls is not scheduling.SchedulerOutput}
    monkeypatch.setattr(pytree, "SUPPORTED_NODES", others)
    found = find_unregistered(output)
    assert [one.remedy for one in found] == ["with register_flattening_functions(patch_diffusers=True): ..."]


def test_a_class_that_jax_knows_is_mirrored():
    jax = pytest.importorskip("jax", reason="JAX is optional")

    class Known:
        def __init__(self, a):
            self.a = a

    jax.tree_util.register_pytree_node(Known, lambda k: ((k.a,), None), lambda _, children: Known(*children))
    sample = Known(X)
    (found,) = find_unregistered(sample)
    assert found.remedy == "mirror(Known)"
    exec(found.remedy, {"mirror": yobx_flatten.mirror, "Known": Known})
    try:
        assert pytree.tree_leaves(sample)[0] is X
    finally:
        unregister_class_flattening(Known)


def test_a_class_without_attributes_gets_the_names_of_the_arguments():
    """Nothing can be read off it; it is refused by torch.export all the same."""
    found = yobx_flatten.check_inputs(Takes(), (object.__new__(Empty),))
    assert found[0].remedy == "register_class_flattening(Empty, f_flatten, f_unflatten, f_flatten_with_keys)"


class Empty:
    pass


class Takes(torch.nn.Module):
    def forward(self, x):
        return x


def test_no_line_is_printed_that_loses_the_items_of_a_defaultdict():
    """What its factory is cannot be written; the keys alone would be no line either."""
    (found,) = find_unregistered(Default(list, a=X))
    assert found.remedy == "register_class_flattening(Default, f_flatten, f_unflatten, f_flatten_with_keys)"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Color.RED, "Color"),
        (torch.float16, "torch.dtype"),
        (torch.channels_last, "torch.memory_format"),
        (Color, "type"),
        (slice(1, 2), "slice"),
    ],
    ids=str,
)
def test_a_constant_is_to_be_static(value, name):
    """Nobody can register it, and torch.export refuses it, or ignores it in a call; the line declares it static."""

    class Takes(torch.nn.Module):
        def forward(self, x, mode):
            return x + 1 if mode == value else x

    (error,) = check_inputs(Takes(), (X, value)).errors
    line = f'field: {name} = dataclasses.field(metadata={{"static": True}})'
    assert error.remedy == line
    scope = {"dataclasses": dataclasses, "torch": torch, "Color": Color}
    exec(line, scope, namespace := {"__annotations__": {"x": object}})
    cls = dataclasses.dataclass(type("State", (), namespace))
    register(cls, backends="torch")
    try:
        check_recipe(cls, cls(X, value))
        assert pytree.tree_leaves(cls(X, value)) == [X]
    finally:
        unregister_class_flattening(cls)
