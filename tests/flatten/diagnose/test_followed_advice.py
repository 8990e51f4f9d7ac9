"""Each line that is printed can be pasted: what failed exports, and torch takes the object apart."""

import collections
import dataclasses
import enum
import re

import pytest
import torch
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import yobx_flatten
from tests.flatten.diagnose.test_export_errors import CASES, Adds, Both, Opaque, raised_by
from tests.modules import module_class
from yobx_flatten import (
    FlattenError,
    check_inputs,
    check_recipe,
    dynamic_shapes,
    explain_error,
    export_program,
    find_unregistered,
    register,
    unregister_class_flattening,
)

X = torch.ones(2, 3)


Scales = module_class("Scales", lambda self, x, **kwargs: x * kwargs["scale"] + kwargs["shift"])
AnyNames = module_class("AnyNames", lambda self, **named: sum(value * 2 for value in named.values()))


AnyNumber = module_class("AnyNumber", lambda self, *given: sum(value * 2 for value in given))
Nested = module_class("Nested", lambda self, x, **rest: x + rest["two"]["a"] * rest["two"]["b"][0])


def rows(tree, count):
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.randn(count, *t.shape[1:]), tree)


def exported(line, module, args, kwargs):
    names = {"module": module, "args": args, "kwargs": kwargs, "dynamic_shapes": dynamic_shapes}
    if line.startswith("dynamic_shapes="):
        return export(module, args, kwargs, dynamic_shapes=eval(line.removeprefix("dynamic_shapes="), names)).module()
    return eval(line, names | {"export_program": export_program}).program.module()


@pytest.mark.parametrize(
    ("module", "args", "kwargs"),
    [
        (Scales(), (X,), {"scale": X + 1, "shift": X + 2}),
        (AnyNames(), (), {"one": X, "other": X + 1}),
        (AnyNumber(), (X, X + 1), {}),
        (Nested(), (), {"x": X, "two": {"a": X + 1, "b": [X + 2]}}),
        (Adds(), (), {"x": X, "y": X + 1}),
        (Both(), (X, X + 1), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
@pytest.mark.parametrize("knows", [True, False], ids=["with the call", "the error alone"])
def test_shapes_that_do_not_fit_are_written(module, args, kwargs, knows):
    shapes = dynamic_shapes(kwargs) if kwargs else {"given": [{0: Dim.AUTO}]}
    if isinstance(module, (Adds, Both)) or args:
        shapes = {"z": {0: Dim.AUTO}}
    with pytest.raises(Exception, match=r"dynamic_shapes|structure") as raised:
        export(module, args, kwargs, dynamic_shapes=shapes)
    found = explain_error(raised.value, *((module, args, kwargs, shapes) if knows else ()))
    program = exported(found.remedy, module, args, kwargs)
    args, kwargs = rows(args, 7), rows(kwargs, 7)
    torch.testing.assert_close(program(*args, **kwargs), module(*args, **kwargs))


def advice(name):
    error, about = raised_by(CASES[name], strict=False)
    return CASES[name], explain_error(error, *about).remedy


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "dynamic_shapes(" in case.remedy])
def test_shapes_of_each_wrong_kind_are_written(name):
    case, line = advice(name)  # which passes one tensor twice: torch takes both for one
    program = exported(line, case.module, rows(case.args, 2), rows(case.kwargs or {}, 2))
    args, kwargs = rows(case.args, 5), rows(case.kwargs or {}, 5)
    torch.testing.assert_close(program(*args, **kwargs), case.module(*args, **kwargs))


SIZES = {
    "a Dim that the code fixes": 2,
    "a dynamic axis that the code fixes": 2,
    "a Dim of size 1": 1,
    "a branch on a size": 3,
    "two Dims that are one": 5,
    "two Dims that go together": 5,
    "a Dim whose range leaves the example out": 5,
}


@pytest.mark.parametrize(("name", "count"), SIZES.items(), ids=SIZES)
def test_a_size_is_changed_as_the_line_writes_it(name, count):
    case, line = advice(name)
    dims = [one for shape in case.shapes.values() for one in shape.values()]
    names = {dim.__name__: dim for dim in dims if dim is not Dim.DYNAMIC} | {"Dim": Dim}
    if " = " in line.partition("#")[0]:
        exec(line, names)
        new = [names[dim.__name__] for dim in dims]
    else:
        new = [eval(line, names)] * len(dims)
    later = iter(new)
    shapes = {key: {axis: next(later) for axis in shape} for key, shape in case.shapes.items()}
    program = export(case.module, case.args, dynamic_shapes=shapes).module()
    sizes = [count + arg.shape[0] - case.args[0].shape[0] for arg in case.args]
    args = tuple(torch.randn(size, *arg.shape[1:]) for size, arg in zip(sizes, case.args, strict=True))
    torch.testing.assert_close(program(*args), case.module(*args))


@pytest.mark.parametrize("name", ["unregistered input", "unregistered output"])
def test_the_lines_that_register_a_class_register_it(name):
    case, lines = advice(name)
    try:
        exec(lines, {name: getattr(yobx_flatten, name) for name in yobx_flatten.__all__} | {"Opaque": Opaque})
        program = export(case.module, case.args, case.kwargs).module()
        found, wanted = (pytree.tree_leaves(call(*case.args, **(case.kwargs or {}))) for call in (program, case.module))
    finally:
        unregister_class_flattening(Opaque)
    torch.testing.assert_close(found, wanted)


def test_arguments_of_another_kind_are_converted():
    case, line = advice("an array")
    program = export(case.module, (X, eval(line, {"torch": torch, "y": case.args[1]}))).module()
    torch.testing.assert_close(program(X, torch.zeros(2)), X * 2)
    case, line = advice("args that are no tuple")
    program = eval(line, {"torch": torch, "module": case.module, "x": X}).module()
    torch.testing.assert_close(program(X), X * 2)


@pytest.mark.parametrize("name", ["a missing argument", "an unknown argument"])
def test_the_check_that_is_named_finds_the_argument(name):
    case, line = advice(name)
    found = eval(line, {"check_inputs": check_inputs, "module": case.module, "args": case.args, "kwargs": case.kwargs})
    assert re.search(rf"\b{case.paths[0]}\b", str(found))


@pytest.mark.parametrize("name", ["called with another size", "called with another number"])
def test_what_was_fixed_by_the_example_varies(name):
    case, line = advice(name)
    shapes = eval(line.removeprefix("dynamic_shapes=").replace(", ...", ""), {"Dim": Dim})
    shapes = dict.fromkeys(("x", "y")[: len(case.args)]) | shapes
    program = export(case.module, case.args, dynamic_shapes=shapes).module()
    torch.testing.assert_close(program(*case.call), case.module(*case.call))


class Limits(torch.nn.Module):
    def forward(self, x):
        torch._check(x["a"].shape[0] <= 6)
        return x["a"] * 2


OfOneSize = module_class("OfOneSize", lambda self, x: x["a"] + torch.ones(2, 3))


@pytest.mark.parametrize(
    ("module", "dim", "count", "text"),
    [
        (OfOneSize(), Dim.DYNAMIC, 2, "the code works for size 2 only. Change the code"),
        (OfOneSize(), "rows", 2, "the code works for size 2 only. Change the code"),
        (OfOneSize(), Dim.DYNAMIC(min=5, max=9), 2, "the code works for size 2 only. Change the code"),
        (Limits(), Dim.DYNAMIC(min=7, max=9), 5, "the code works for sizes from 2 to 6 only. Change the code"),
    ],
    ids=["a dynamic axis", "a named axis", "a range without the size", "a range outside the limits"],
)
def test_a_size_that_contradicts_the_range_is_named_by_the_export(module, dim, count, text):
    x = {"a": torch.randn(2, 3)}
    with pytest.raises(FlattenError, match=text) as raised:
        export_program(module, (x,), dynamic_shapes={"x": {"a": {0: dim}}})
    said, line = str(raised.value).splitlines()
    assert said.startswith(f"{type(module).__name__} cannot be exported. x['a'].shape[0] should vary, but ")
    assert str(explain_error(raised.value.__cause__)) in str(raised.value)
    found = export_program(module, (x,), dynamic_shapes={"x": {"a": {0: eval(line, {"Dim": Dim})}}})
    larger = rows(x, count)
    torch.testing.assert_close(found(larger), module(larger))


@pytest.mark.parametrize("line", CASES["a decision by value"].remedy.splitlines())
def test_each_way_to_decide_by_a_value_exports(line):

    class Decides(torch.nn.Module):
        def forward(self, x):
            condition, a, b = x.sum() > 0, x, x * 2
            if line.startswith("torch.where"):
                return torch.where(condition, a, b)
            if line.startswith("torch.cond"):
                return torch.cond(condition, lambda x: x.clone(), lambda x: x * 2, (x,))
            n = x.long().abs().sum().item()
            torch._check(n > 3)
            return x if n > 3 else x * 2

    assert line in advice("a decision by value")[1].splitlines()
    module = Decides()
    program = export(module, (X,)).module()
    for x in (X, -X):
        torch.testing.assert_close(program(x), module(x))


X_ALONE = torch.zeros(2, 3)


class Plain:
    def __init__(self):
        self.key, self.value, self.window, self.mask = X_ALONE, [X_ALONE], 8, None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a, self.b = X_ALONE, "name"


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
        (Frozen(X_ALONE), "register(Frozen)"),
        (Items(a=X_ALONE), "register(Items)"),
        (
            Row([X_ALONE]),
            "register_class_flattening(Row, lambda x: (list(x), None), lambda items, _: Row(items), None)",
        ),
        (
            with_attributes(Row([X_ALONE]), scale=X_ALONE, name="n"),
            "register(Row, children=['scale'], static=['name'])",
        ),
        (with_attributes(Items(a=X_ALONE), scale=X_ALONE), "register(Items, children=['scale'])"),
        (Written(X_ALONE, "n"), "register_pytree_node_class(Written)"),
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
        assert X_ALONE in pytree.tree_leaves(sample)[:1]
        check_recipe(cls, sample)
    finally:
        unregister_class_flattening(cls)


def test_the_block_registers_the_outputs_of_diffusers(monkeypatch):
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_utils")
    output = scheduling.SchedulerOutput(prev_sample=X_ALONE)
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
    sample = Known(X_ALONE)
    (found,) = find_unregistered(sample)
    assert found.remedy == "mirror(Known)"
    exec(found.remedy, {"mirror": yobx_flatten.mirror, "Known": Known})
    try:
        assert pytree.tree_leaves(sample)[0] is X_ALONE
    finally:
        unregister_class_flattening(Known)


def test_a_class_without_attributes_gets_the_names_of_the_arguments():
    found = yobx_flatten.check_inputs(Takes(), (object.__new__(Empty),))
    assert found[0].remedy == "register_class_flattening(Empty, f_flatten, f_unflatten, f_flatten_with_keys)"


class Empty:
    pass


Takes = module_class("Takes", lambda self, x: x)


def test_no_line_is_printed_that_loses_the_items_of_a_defaultdict():
    """What its factory is cannot be written; the keys alone would be no line either."""
    (found,) = find_unregistered(Default(list, a=X_ALONE))
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

    takes = module_class("Takes", lambda self, x, mode: x + 1 if mode == value else x)()
    (error,) = check_inputs(takes, (X_ALONE, value)).errors
    line = f'field: {name} = dataclasses.field(metadata={{"static": True}})'
    assert error.remedy == line
    scope = {"dataclasses": dataclasses, "torch": torch, "Color": Color}
    exec(line, scope, namespace := {"__annotations__": {"x": object}})
    cls = dataclasses.dataclass(type("State", (), namespace))
    register(cls, backends="torch")
    try:
        check_recipe(cls, cls(X_ALONE, value))
        assert pytree.tree_leaves(cls(X_ALONE, value)) == [X_ALONE]
    finally:
        unregister_class_flattening(cls)
