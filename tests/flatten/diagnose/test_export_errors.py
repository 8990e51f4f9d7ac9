"""`explain_error` puts torch's messages into other words; every message here was raised by torch itself.

Each case is exported, or exported and called, with ``strict=False`` and ``strict=True``: torch words many of its
messages differently.
"""

import copy
import dataclasses
import re
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch.export import Dim, export

from yobx_flatten import (
    DynamicShapesError,
    explain_error,
    make_dynamic_cache,
    register,
    register_flattening_functions,
    unregister_class_flattening,
)

X = torch.ones(2, 3)


class Opaque:
    def __init__(self, x=None):
        self.x = X if x is None else x


class Takes(torch.nn.Module):
    def forward(self, x, y=None):
        return x * 2


class Both(torch.nn.Module):
    def forward(self, x, y):
        return x * 2, y * 3


class Returns(torch.nn.Module):
    def forward(self, x):
        return {"a": [x, Opaque(x * 2)]}


class Adds(torch.nn.Module):
    def forward(self, x, y):
        return x + y


class AddsShifted(torch.nn.Module):
    def forward(self, x, y):
        return x + y[1:]


class Fixes(torch.nn.Module):
    def forward(self, x):
        return x + torch.ones(2, 3)


class BySize(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 3 else x


class ByValue(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return x * 2


class ByItem(torch.nn.Module):
    def forward(self, x):
        count = int(x.sum().item())
        return x if count > 3 else x * 2


@dataclasses.dataclass
class Case:
    text: str
    module: torch.nn.Module
    args: Any
    kwargs: Any = None
    shapes: Any = None
    call: Any = None
    paths: tuple[str, ...] = ()
    remedy: str = ""


CASES = {
    "unregistered input": Case(
        r"takes no object of this class as input: y\['d'\]\[1\] is a .*Opaque\. Register it first:",
        Takes(),
        (X,),
        {"y": {"d": [X, Opaque()]}},
        paths=("y['d'][1]",),
        remedy="register(Opaque, children=['x'])",
    ),
    "unregistered output": Case(
        r"takes no object of this class as output: output\['a'\]\[1\] is a .*Opaque\. Register it first:",
        Returns(),
        (X,),
        paths=("output['a'][1]",),
        remedy="register(Opaque, children=['x'])",
    ),
    "an array": Case(
        r"y is a numpy\.ndarray\. Pass a tensor instead:",
        Takes(),
        (X, numpy.zeros(2)),
        paths=("y",),
        remedy="torch.from_numpy(y)",
    ),
    "a Dim that the code fixes": Case(
        "batch should vary, but the code works for size 2 only",
        Fixes(),
        (X,),
        shapes={"x": {0: Dim("batch")}},
        paths=("batch",),
        remedy="batch = 2",
    ),
    "a dynamic axis that the code fixes": Case(
        r"x\.shape\[0\] should vary, but the code works for size 2 only",
        Fixes(),
        (X,),
        shapes={"x": {0: Dim.DYNAMIC}},
        paths=("x.shape[0]",),
        remedy="Dim.AUTO  # instead of Dim.DYNAMIC",
    ),
    "a Dim of size 1": Case(
        "batch should vary, but has size 1 in the example",
        Takes(),
        (X[:1],),
        shapes={"x": {0: Dim("batch")}},
        paths=("batch",),
        remedy="batch = 1",
    ),
    "a branch on a size": Case(
        r"takes another branch for some sizes of batch \(x\.shape\[0\]\): the trace is valid where .*x\.shape\[0\] "
        r"<= 3",
        BySize(),
        (X,),
        shapes={"x": {0: Dim("batch")}},
        paths=("batch (x.shape[0])",),
        remedy="batch = Dim('batch', max=3)",
    ),
    "two Dims that are one": Case(
        r"works only where b \(y\.shape\[0\]\) and a \(x\.shape\[0\]\) are equal",
        Adds(),
        (X, X + 1),
        shapes={"x": {0: Dim("a")}, "y": {0: Dim("b")}},
        paths=("b (y.shape[0])", "a (x.shape[0])"),
        remedy="b = a",
    ),
    "two Dims that go together": Case(
        r"works only where b \(y\.shape\[0\]\) and a \(x\.shape\[0\]\) vary together",
        AddsShifted(),
        (X, torch.ones(3, 3)),
        shapes={"x": {0: Dim("a")}, "y": {0: Dim("b")}},
        paths=("b (y.shape[0])", "a (x.shape[0])"),
        remedy="b = a + 1",
    ),
    "a Dim whose range leaves the example out": Case(
        r"The example has size 2 where the Dim allows \[5, int_oo\]",
        Takes(),
        (X,),
        shapes={"x": {0: Dim("b", min=5)}},
        remedy='Dim("name", min=2)',
    ),
    "shapes with too few entries": Case(
        r"dynamic_shapes does not fit the inputs: y: list has 2 children",
        Takes(),
        (X, [X, X + 1]),
        shapes={"x": {0: Dim("a")}, "y": [{0: Dim("a")}]},
        paths=("dynamic_shapes['y']",),
        remedy="dynamic_shapes=dynamic_shapes(args)",
    ),
    "shapes for other names": Case(
        r"Missing: \['y'\]; unknown: \['z'\]",
        Takes(),
        (X,),
        {"y": X + 1},
        {"x": None, "z": None},
        remedy="export_program(module, args, kwargs)  # writes them",
    ),
    "shapes of another rank": Case(
        r"x: expected one entry for each of the 2 axes",
        Takes(),
        (X,),
        shapes={"x": [Dim("a")]},
        paths=("dynamic_shapes['x']",),
        remedy="dynamic_shapes=dynamic_shapes(args)",
    ),
    "shapes that are no Dim": Case(
        r"expected a Dim, .* found 3\.5",
        Takes(),
        (X,),
        shapes={"x": {0: 3.5}},
        paths=("dynamic_shapes['x']",),
        remedy="dynamic_shapes=dynamic_shapes(args)",
    ),
    "a decision by value": Case(
        r"The code branches on the value of a tensor in forward, .*test_export_errors\.py:\d+",
        ByValue(),
        (X,),
        remedy="torch.where(condition, a, b)\ntorch.cond(condition, f, g, (x,))\ntorch._check(n > 3)",
    ),
    "a number read from a tensor": Case(
        r"The code branches on the value of a tensor in forward, .*test_export_errors\.py:\d+",
        ByItem(),
        (X.long(),),
        remedy="torch.where(condition, a, b)\ntorch.cond(condition, f, g, (x,))\ntorch._check(n > 3)",
    ),
    "a missing argument": Case(
        "cannot be called with these args and kwargs: missing a required argument: 'x'",
        Takes(),
        (),
        paths=("x",),
        remedy="check_inputs(module, args, kwargs)",
    ),
    "an unknown argument": Case(
        "cannot be called with these args and kwargs: got an unexpected keyword argument 'z'",
        Takes(),
        (X,),
        {"z": X},
        paths=("z",),
        remedy="check_inputs(module, args, kwargs)",
    ),
    "args that are no tuple": Case(
        "args must be a tuple", Takes(), [X], paths=("args",), remedy="torch.export.export(module, (x,))"
    ),
    "called with another size": Case(
        "x has another size along axis 0 than 2, which the program was exported for",
        Takes(),
        (X,),
        call=(torch.ones(5, 3),),
        paths=("x",),
        remedy="dynamic_shapes={'x': {0: Dim.AUTO}, ...}  # with an example of size 2 or more",
    ),
    "called on the other side of a branch": Case(
        r"The program is valid only for x\.shape\[0\] <= 3",
        BySize(),
        (X,),
        shapes={"x": {0: Dim.AUTO}},
        call=(torch.ones(9, 3),),
        paths=("x",),
    ),
    "called with another number": Case(
        "The program is valid only for y == 3: a number",
        Takes(),
        (X, 3),
        call=(X, 4),
        paths=("y",),
        remedy="dynamic_shapes={'y': Dim.AUTO, ...}",
    ),
    "called with another structure": Case(
        r"exported for inputs of another structure:\nargs\[0\]\n    exported: a leaf\n    called:   list of 1",
        Takes(),
        (X,),
        call=([X],),
        paths=("args[0]",),
    ),
    "called with other keywords": Case(
        r"kwargs\['z'\] was not passed by keyword .* y is missing",
        Both(),
        (),
        {"x": X, "y": X + 1},
        call={"x": X, "z": X},
        paths=("kwargs['z']",),
        remedy="program.module()(..., x=..., y=...)",
    ),
    "called with None": Case(
        "could not check its inputs. Known causes: None instead of a tensor",
        Both(),
        (X, X + 1),
        call=(X, None),
        remedy="example.contiguous()",
    ),
}


def raised_by(case, strict):
    # an export that fails leaves its marks on the example (which axes vary), and the next one believes them
    case = copy.deepcopy(case)
    about = (case.module, case.args, case.kwargs, case.shapes)
    try:
        program = export(case.module, case.args, case.kwargs, dynamic_shapes=case.shapes, strict=strict)
        args, kwargs = ((), case.call) if isinstance(case.call, dict) else (case.call, {})
        about = (program, args, kwargs, None)
        program.module()(*args, **kwargs)
    except Exception as error:
        return error, about
    raise AssertionError("torch has nothing against it")


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_torch_says_is_explained(case, strict):
    error, about = raised_by(case, strict)
    explained = explain_error(error, *about)
    assert explained.known
    assert re.search(case.text, explained.text, re.DOTALL), explained.text
    assert (explained.paths, explained.remedy) == (case.paths, case.remedy)


@pytest.mark.parametrize("name", ["unregistered input", "unregistered output", "called with another structure"])
def test_the_message_alone_is_explained_too(name):
    error, _ = raised_by(CASES[name], strict=False)
    explained = explain_error(error)
    assert explained.known
    assert "Opaque" in explained.text or "args[0]" in explained.text
    assert str(explain_error(str(error))) == str(explained)  # as a log has it


def test_a_slice_whose_strides_became_a_guard():
    """Both modes fail, each in its own way."""
    sliced = torch.ones(5, 9)[:, 2:6]
    for strict in (False, True):
        case = Case("", Takes(), (sliced,), shapes={"x": {0: Dim.AUTO, 1: Dim.AUTO}}, call=(torch.ones(5, 3),))
        error, about = raised_by(case, strict)
        assert "slice of a larger tensor" in str(explain_error(error, *about))


def test_an_axis_that_is_not_there():
    """torch 2.13 ends in an IndexError without a place."""
    error, about = raised_by(Case("", Takes(), (X,), shapes={"x": {5: Dim("a")}}), strict=False)
    assert str(error) == "list assignment index out of range"
    assert "the specification names axis 5" in explain_error(error, *about).text
    assert not explain_error(error).known


@dataclasses.dataclass
class State:
    x: torch.Tensor


def test_a_program_that_outlives_a_registration():
    """torch ends in a KeyError, or compares with a leaf."""
    register(State, backends="torch")
    try:
        program = export(Takes(), (X,), {"y": State(X + 1)})
    finally:
        unregister_class_flattening(State)
    with pytest.raises(Exception, match=r"State|structure|TreeSpec") as raised:
        program.module()(X, y=State(X))
    explained = explain_error(raised.value, program, (X,), {"y": State(X)})
    assert explained.known
    assert "State" in explained.text


def test_a_key_error_with_a_class_names_the_line():
    explained = explain_error(KeyError(State))
    assert explained.text.startswith("The program takes or returns a State, which is not registered (any more)")
    assert explained.remedy == "register(State)"


def test_a_cache_in_an_output():

    class Fills(torch.nn.Module):
        def forward(self, x):
            cache = transformers.DynamicCache()
            cache.update(x[None, None], x[None, None], 0)
            return x, {"past_key_values": cache}

    error, about = raised_by(Case("", Fills(), (X,)), strict=False)
    explained = explain_error(error, *about)
    assert explained.paths == ("output[1]['past_key_values']",)
    assert explained.remedy == "with register_flattening_functions(patch_transformers=True): ..."
    with register_flattening_functions(patch_transformers=True):
        export(Fills(), (X,))


def test_the_block_is_named_for_a_cache_that_is_not_there_to_be_looked_at():
    """torch's message alone names the class, and the class its remedy."""

    class Reader(torch.nn.Module):
        def forward(self, cache):
            return cache.layers[0].keys + 1

    with pytest.raises(Exception, match="DynamicCache") as caught:
        export(Reader(), (make_dynamic_cache([(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))]),))
    assert explain_error(caught.value).remedy == "with register_flattening_functions(patch_transformers=True): ..."


def test_our_own_errors_explain_themselves():
    explained = explain_error(DynamicShapesError("x: no"))
    assert (explained.known, str(explained)) == (True, "x: no")


@pytest.mark.parametrize(
    "error", [OSError("no space\nleft"), KeyError("a"), ValueError(), TypeError("too many positional")]
)
def test_what_is_not_known_is_called_unknown(error):
    explained = explain_error(error, Takes(), (X,))
    assert not explained.known
    first = str(error).split("\n")[0]
    assert explained.text.endswith(f"torch reports: {type(error).__name__}" + (f": {first}" if first else ""))
    assert (explained.paths, explained.remedy) == ((), "")


FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    run(x)\n    ^^^^^^\n'


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (FRAMES + "ValueError: the lamp is broken\nbuy another", "ValueError: the lamp is broken"),
        (
            FRAMES + "KeyError: 'a'\n\nDuring handling, another:\n\n" + FRAMES + "lamp.Broken: no light\n",
            "lamp.Broken: no light",
        ),
        ("INFO: started\n" + FRAMES + "KeyboardInterrupt", "KeyboardInterrupt"),
        ("the lamp is broken\nbuy another", "the lamp is broken"),
    ],
)
def test_a_log_that_is_not_known_is_named_by_its_error(log, first):
    explained = explain_error(log)
    assert not explained.known
    assert explained.text.split("\n")[0] == f"This error is unknown. torch reports: {first}"


def test_a_log_with_a_known_error_is_explained():
    error, _ = raised_by(CASES["a Dim that the code fixes"], strict=False)
    assert str(explain_error(f"{FRAMES}{type(error).__name__}: {error}")) == str(explain_error(error))
