"""The line that `explain_error` prints is followed as it stands: what failed exports, with the values of the module."""

import re

import pytest
import torch
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import yobx_flatten
from tests.flatten.diagnose.test_export_errors import CASES, Adds, Both, Opaque, raised_by
from yobx_flatten import (
    FlattenError,
    check_inputs,
    dynamic_shapes,
    explain_error,
    export_program,
    unregister_class_flattening,
)

X = torch.ones(2, 3)


class Scales(torch.nn.Module):
    def forward(self, x, **kwargs):
        return x * kwargs["scale"] + kwargs["shift"]


class AnyNames(torch.nn.Module):
    def forward(self, **named):
        return sum(value * 2 for value in named.values())


class AnyNumber(torch.nn.Module):
    def forward(self, *given):
        return sum(value * 2 for value in given)


class Nested(torch.nn.Module):
    def forward(self, x, **rest):
        return x + rest["two"]["a"] * rest["two"]["b"][0]


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


class OfOneSize(torch.nn.Module):
    def forward(self, x):
        return x["a"] + torch.ones(2, 3)


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
