"""`check_inputs` says before a trace what torch.export would say in it, or never; each claim is tried with torch."""

import operator
import warnings

import numpy
import pytest
import torch
import transformers
from torch.export import Dim, export

from tests.modules import module_class
from yobx_flatten import (
    DynamicShapesError,
    FlattenError,
    InvalidArgumentError,
    NotRegisteredError,
    check_inputs,
    explain,
    export_program,
    register_flattening_functions,
)

X = torch.ones(2, 3)


Scale = module_class("Scale", lambda self, x, y=None: x * 2 if y is None else (x * 2, y))


class Swallows(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None, **kwargs):
        return input_ids if attention_mask is None else attention_mask


class Opaque:
    def __init__(self):
        self.x = X


def findings(*args):
    return [(found.severity, found.path) for found in check_inputs(*args)]


def test_good_inputs_give_nothing():
    found = check_inputs(Scale(), (X,), {"y": [torch.ones(2, 5)]}, {"x": {0: Dim.AUTO}, "y": [{0: Dim.AUTO}]})
    assert not found
    assert str(found) == "nothing found"
    found.raise_errors()


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


def test_a_class_instead_of_a_module_is_an_error():
    with pytest.raises(InvalidArgumentError, match=r"Make an instance: Scale\("):
        check_inputs(Scale, (X,)).raise_errors()


def test_a_misspelt_name_that_disappears_in_kwargs_is_a_warning():
    """The model would run without its mask and say nothing."""
    (found,) = check_inputs(Swallows(), (), {"input_ids": X, "attention_masks": torch.ones(2)})
    assert found.severity == "warning"
    assert found.message == (
        "Swallows.forward has no parameter 'attention_masks'; its **kwargs swallow the argument. Did you mean "
        "'attention_mask'?"
    )


def test_an_argument_that_forward_never_reads_is_a_warning_and_nothing_is_called():

    class Reads(torch.nn.Module):
        def forward(self, a, b, c, *, d):
            def inner():
                return b

            c = a  # noqa: F841 # written, not read: that is the case
            raise AssertionError(f"called, or traced: {inner()}")

    found = check_inputs(Reads(), (X, X + 1, X + 2), {"d": X + 3})
    assert [(one.severity, one.path) for one in found] == [("warning", "c"), ("warning", "d")]
    assert found[0].message == f"c is passed, but {Reads.__qualname__}.forward never reads it."


class ReadsAll(torch.nn.Module):
    def forward(self, x, scale=None):
        return sum(value for name, value in locals().items() if name in ("x", "scale") and value is not None)


class Compiled(torch.nn.Module):
    forward = operator.itemgetter(0)


def test_what_a_function_reads_is_not_guessed():
    assert not check_inputs(ReadsAll(), (X,), {"scale": X + 1})
    assert not check_inputs(Scale(), (X,), {"y": None})
    found = check_inputs(Compiled(), (X,))
    assert [one for one in found if "never reads" in one.message] == []


def test_unregistered_objects_are_errors_with_their_place():
    found = check_inputs(Scale(), (X,), {"y": {"deep": [Opaque(), object()]}})
    assert [(one.severity, one.path) for one in found] == [("error", "y['deep'][0]"), ("error", "y['deep'][1]")]
    with pytest.raises(NotRegisteredError, match=r"y\['deep'\]\[0\] is a .*Opaque, (.|\n)*register\(Opaque, children="):
        found.raise_errors()


def test_a_cache_is_an_error_outside_the_block_only():
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
    assert findings(Scale(), (X,), {"y": cache}) == [("error", "y")]
    with register_flattening_functions(patch_transformers=True):
        assert findings(Scale(), (X,), {"y": cache}) == []


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
    [
        ({"x": {5: Dim.AUTO}, "y": None}, "axis 5"),
        (({}, {}, {}), "3 entries for 2 inputs"),
        ("all", "dynamic_shapes"),
    ],
)
def test_dynamic_shapes_that_do_not_fit_are_errors(shapes, message):
    with pytest.raises(DynamicShapesError, match=message):
        check_inputs(Scale(), (X,), {"y": [X + 1]}, shapes).raise_errors()


def test_a_size_of_one_that_may_vary_is_a_warning():
    (found,) = check_inputs(Scale(), (X[:1],), None, {"x": {0: Dim.AUTO}})
    assert found.message.startswith("x has size 1 along axis 0, which may vary")
    with pytest.raises(AssertionError, match=r"x\.size\(\)\[0\] == 1"):
        export(Scale(), (X[:1],), dynamic_shapes={"x": {0: Dim.AUTO}}).module()(X)


Square = module_class("Square", lambda self, x: x * 2 if x.shape[0] == x.shape[1] else x)


def test_different_axes_of_one_size_are_a_warning():
    (found,) = check_inputs(Square(), (torch.ones(4, 4),), None, {"x": {0: Dim.AUTO, 1: Dim.AUTO}})
    assert found.message.startswith("axis 0 of x and axis 1 of x may vary and have the same size, 4")
    program = export(Square(), (torch.ones(4, 4),), dynamic_shapes={"x": {0: Dim.AUTO, 1: Dim.AUTO}})
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(torch.ones(3, 7))


def test_one_size_of_several_tensors_is_a_warning_where_their_dims_differ():
    batch = Dim("batch")
    assert findings(Scale(), (X, X + 1), None, ({0: Dim.AUTO}, {0: Dim.AUTO})) == []
    assert findings(Scale(), (X, X.T.contiguous()), None, ({0: batch}, {1: batch})) == []
    assert findings(Scale(), (X, X + 1), None, ({0: Dim("a")}, {0: Dim("b")})) == [("warning", "x")]
    assert findings(Scale(), (torch.ones(3, 3),), None, "auto") == [("warning", "x")]


def test_errors_stand_first_and_warnings_are_not_raised():
    found = check_inputs(Scale(), (X[:1],), {"y": [Opaque(), numpy.zeros(2)]}, {"x": {0: Dim.AUTO}, "y": None})
    assert [one.severity for one in found] == ["error", "error", "warning"]
    with pytest.raises(FlattenError) as raised:
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
