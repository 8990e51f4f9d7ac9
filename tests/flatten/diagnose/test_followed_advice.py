"""Each claim is tried with torch: what `check_inputs` finds before a trace, and each line that is printed."""

import collections
import dataclasses
import operator
import warnings

import numpy
import pytest
import torch
from torch.export import Dim, export
from torch.utils import _pytree as pytree

import yobx_flatten
from tests.flatten.diagnose.test_export_errors import CASES, Adds, Both, Color, Opaque, Takes, raised_by
from tests.flatten.diagnose.test_opaque import Items, Row
from tests.modules import module_class, module_of
from yobx_flatten import check_inputs, check_recipe, dynamic_shapes, explain, explain_error, find_unregistered
from yobx_flatten.declare import register, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import DynamicShapesError, FlattenError, InvalidArgumentError, NotRegisteredError
from yobx_flatten.export import export_program

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
    args = tuple(torch.randn(count + len(arg) - len(case.args[0]), *arg.shape[1:]) for arg in case.args)
    torch.testing.assert_close(program(*args), case.module(*args))


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
    def decides(self, x):
        condition, a, b = x.sum() > 0, x, x * 2
        if line.startswith("torch.where"):
            return torch.where(condition, a, b)
        if line.startswith("torch.cond"):
            return torch.cond(condition, lambda x: x.clone(), lambda x: x * 2, (x,))
        n = x.long().abs().sum().item()
        torch._check(n > 3)
        return x if n > 3 else x * 2

    assert line in advice("a decision by value")[1].splitlines()
    module = module_of(decides)
    program = export(module, (X,)).module()
    for x in (X, -X):
        torch.testing.assert_close(program(x), module(x))


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


def with_attributes(obj, **attributes):
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


class Default(collections.defaultdict):
    pass


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
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_utils")
    others = {cls: node for cls, node in pytree.SUPPORTED_NODES.items() if cls is not scheduling.SchedulerOutput}
    monkeypatch.setattr(pytree, "SUPPORTED_NODES", others)
    (found,) = find_unregistered(scheduling.SchedulerOutput(prev_sample=X))
    assert found.remedy == "with register_flattening_functions(patch_diffusers=True): ..."


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


def test_a_class_whose_line_cannot_be_written_gets_the_names_of_the_arguments():
    """Without attributes; or with a factory, as a defaultdict: the keys alone would lose its items."""
    (found,) = yobx_flatten.check_inputs(Takes(), (type("Empty", (), {})(),))
    assert found.remedy == "register_class_flattening(Empty, f_flatten, f_unflatten, f_flatten_with_keys)"
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
    takes = module_class("Takes", lambda self, x, mode: x + 1 if mode == value else x)()
    (error,) = check_inputs(takes, (X, value)).errors
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


Scale = module_class("Scale", lambda self, x, y=None: x * 2 if y is None else (x * 2, y))
Swallows = module_class("Swallows", lambda self, input_ids, attention_mask=None, **kwargs: (input_ids, attention_mask))


def findings(*args):
    return [(found.severity, found.path) for found in check_inputs(*args)]


def test_good_inputs_give_nothing():
    found = check_inputs(Scale(), (X,), {"y": [torch.ones(2, 5)]}, {"x": {0: Dim.AUTO}, "y": [{0: Dim.AUTO}]})
    assert not found
    assert str(found) == "nothing found"
    found.raise_errors()
    with pytest.raises(InvalidArgumentError, match=r"Make an instance: Scale\("):
        check_inputs(Scale, (X,)).raise_errors()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {"z": X}, r"unexpected keyword argument 'z'.*Its parameters are x, y\."),
        ((X,), {"yy": X}, r"Did you mean 'y'\?"),
        ((), {}, "missing a required argument: 'x'"),
        ((X, X, X), {}, "too many positional arguments"),
        ([X], {}, "args: expected a tuple"),
        ((X,), [X], "kwargs: expected a dict"),
    ],
)
def test_arguments_that_forward_does_not_take_are_errors(args, kwargs, message):
    found = check_inputs(Scale(), args, kwargs)
    with pytest.raises(InvalidArgumentError, match=message):
        found.raise_errors()
    with pytest.raises((TypeError, RuntimeError)):  # RuntimeError: torch's UserError
        export(Scale(), args, kwargs)


def test_a_misspelt_name_that_disappears_in_kwargs_and_an_argument_that_is_surely_never_read_are_warnings():
    """The model would run without its mask and say nothing. No module is called."""
    (found,) = check_inputs(Swallows(), (), {"input_ids": X, "attention_masks": torch.ones(2)})
    assert found.severity == "warning"
    assert found.message == (
        "Swallows.forward has no parameter 'attention_masks'; its **kwargs swallow the argument. Did you mean "
        "'attention_mask'?"
    )

    class Reads(torch.nn.Module):
        def forward(self, a, b, c, *, d):
            c = a  # noqa: F841 # written, not read: that is the case
            raise AssertionError(f"called, or traced: {(lambda: b)()}")

    found = check_inputs(Reads(), (X, X + 1, X + 2), {"d": X + 3})
    assert [(one.severity, one.path) for one in found] == [("warning", "c"), ("warning", "d")]
    assert found[0].message == f"c is passed, but {Reads.__qualname__}.forward never reads it."
    assert not check_inputs(ReadsAll(), (X,), {"scale": X + 1})
    assert not check_inputs(Scale(), (X,), {"y": None})
    found = check_inputs(Compiled(), (X,))
    assert [one for one in found if "never reads" in one.message] == []


ReadsAll = module_class("ReadsAll", lambda self, x, scale=None: sum(v for v in locals().values() if v is not self))
Compiled = type("Compiled", (torch.nn.Module,), {"forward": operator.itemgetter(0)})


@pytest.mark.parametrize(
    ("library", "make"), [("numpy", "ones"), ("numpy", "float32"), ("jax.numpy", "ones"), ("pandas", "Series")]
)
def test_the_line_for_an_array_makes_the_tensor(library, make):
    y = getattr(pytest.importorskip(library), make)([2.0, 3.0] if make == "Series" else 2)
    (found,) = check_inputs(Scale(), (X,), {"y": y})
    tensor = eval(found.remedy, {"torch": torch, "y": y})
    assert torch.equal(tensor, torch.tensor(y.tolist(), dtype=tensor.dtype))
    with pytest.raises(NotRegisteredError) as caught:
        export_program(Scale(), (X, y))
    assert str(caught.value).endswith(f"Pass a tensor instead:\n    {found.remedy}")


def test_one_tensor_passed_twice_is_an_error():
    """The program of torch 2.13 computes something else, in silence."""
    adds = module_class("Adds", lambda self, x, y: x * 2 + y)()
    (found,) = check_inputs(adds, (X, X))
    assert (found.severity, found.path, found.remedy) == ("error", "y", "y.clone()")
    wrong = export(adds, (X, X)).module()(X, 5 * X)
    assert wrong[0, 0] == 15  # eager gives 7
    assert export(adds, (X, X.clone())).module()(X, 5 * X)[0, 0] == 7


def test_two_tensors_of_one_memory_are_a_warning():
    """A module that writes into one is exported, and cannot be decomposed: torch 2.13 ends in an assertion."""

    class Writes(torch.nn.Module):
        def forward(self, x, y):
            x.add_(1)
            return y * 1

    base = torch.zeros(4)
    (found,) = check_inputs(Writes(), (base, base[:2]))
    assert (found.severity, found.path) == ("warning", "y")
    with pytest.raises(AssertionError, match="expected compiled_fn to be GraphModule"):
        export(Writes(), (base, base[:2])).run_decompositions()
    export(Writes(), (base, base[:2].clone())).run_decompositions()
    assert findings(Scale(), (base[:2], base[2:])) == []


def test_a_slice_is_a_warning_outside_the_block():
    """Its strides become part of the program; inside the block the trace gets a contiguous copy."""
    sliced = torch.ones(5, 9)[:, 2:6]
    shapes = {"x": {0: Dim.AUTO, 1: Dim.AUTO}}
    (found,) = check_inputs(Scale(), (sliced,), None, shapes)
    assert (found.severity, found.path, found.remedy) == ("warning", "x", "x.contiguous()")
    with pytest.raises(Exception, match=r"size|stride"):
        export(Scale(), (sliced,), dynamic_shapes=shapes).module()(torch.ones(3, 7))
    assert findings(Scale(), (torch.ones(5, 6).T,), None, shapes) == []  # torch keeps a permuted tensor apart
    with register_flattening_functions():
        assert findings(Scale(), (sliced,), None, shapes) == []
        assert export(Scale(), (sliced,), dynamic_shapes=shapes).module()(torch.ones(3, 7)).shape == (3, 7)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [({"x": {5: Dim.AUTO}, "y": None}, "axis 5"), (({}, {}, {}), "3 entries for 2 inputs"), ("all", "dynamic_shapes")],
)
def test_dynamic_shapes_that_do_not_fit_are_errors(shapes, message):
    with pytest.raises(DynamicShapesError, match=message):
        check_inputs(Scale(), (X,), {"y": [X + 1]}, shapes).raise_errors()


def test_a_size_of_one_that_may_vary_and_axes_of_one_size_whose_dims_differ_are_warnings():
    (found,) = check_inputs(Scale(), (X[:1],), None, {"x": {0: Dim.AUTO}})
    assert found.message.startswith("x has size 1 along axis 0, which may vary")
    with pytest.raises(AssertionError, match=r"x\.size\(\)\[0\] == 1"):
        export(Scale(), (X[:1],), dynamic_shapes={"x": {0: Dim.AUTO}}).module()(X)
    square = module_class("Square", lambda self, x: x * 2 if x.shape[0] == x.shape[1] else x)()
    shapes = {"x": {0: Dim.AUTO, 1: Dim.AUTO}}
    (found,) = check_inputs(square, (torch.ones(4, 4),), None, shapes)
    assert found.message.startswith("axis 0 of x and axis 1 of x may vary and have the same size, 4")
    with pytest.raises(AssertionError, match="Guard failed"):
        export(square, (torch.ones(4, 4),), dynamic_shapes=shapes).module()(torch.ones(3, 7))
    batch = Dim("batch")
    assert findings(Scale(), (X, X + 1), None, ({0: Dim.AUTO}, {0: Dim.AUTO})) == []
    assert findings(Scale(), (X, X.T.contiguous()), None, ({0: batch}, {1: batch})) == []
    assert findings(Scale(), (X, X + 1), None, ({0: Dim("a")}, {0: Dim("b")})) == [("warning", "x")]
    assert findings(Scale(), (torch.ones(3, 3),), None, "auto") == [("warning", "x")]


def test_errors_stand_first_and_warnings_are_not_raised():
    found = check_inputs(Scale(), (X[:1],), {"y": [Opaque(), numpy.zeros(2)]}, {"x": {0: Dim.AUTO}, "y": None})
    assert [one.severity for one in found] == ["error", "error", "warning"]
    registers = r"y\[0\] is a .*Opaque, (.|\n)*register\(Opaque, children="
    with pytest.raises(NotRegisteredError, match=registers) as raised:
        found.raise_errors()
    assert str(raised.value).count("y[") == 3  # each place, and one in the line to type
    check_inputs(Scale(), (X[:1],), None, {"x": {0: Dim.AUTO}}).raise_errors()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_with_its_place(layout):
    """torch.export takes neither layout, and torch ends in an internal error; the line makes a tensor that it takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        tensor = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    (error,) = check_inputs(Scale(), (X,), {"y": [tensor]}, dynamic_shapes="auto").errors
    assert error.path == "y[0]"
    assert error.message.startswith("y[0] is a nested tensor, which torch.export does not accept.")
    with pytest.raises(InvalidArgumentError, match=r"^y\[0\] is a nested tensor"):
        export_program(Scale(), (X,), {"y": [tensor]})
    line = error.message.splitlines()[-1].strip()
    padded = eval(line, {"torch": torch, "y": [tensor]})
    assert padded.shape == (2, 4, 3)
    assert not check_inputs(Scale(), (X,), {"y": [padded]}).errors
    middle = "…" if layout is torch.strided else "j"
    assert f"float32[2, {middle}" in str(explain([tensor]))
