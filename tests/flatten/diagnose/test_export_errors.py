"""`explain_error` puts messages of torch and of tools around an export into other words; all were raised by torch."""

import copy
import dataclasses
import enum
import io
import logging
import re
import sys
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from torch.export import Dim, export

from tests.modules import module_class, module_of
from yobx_flatten import DynamicShapesError, dynamic_shapes, explain_error, make_dynamic_cache
from yobx_flatten.declare import register, register_flattening_functions, unregister_class_flattening

X = torch.ones(2, 3)


class Opaque:
    def __init__(self, x=None):
        self.x = X if x is None else x


Takes = module_class("Takes", lambda self, x, y=None: x * 2)
Both = module_class("Both", lambda self, x, y: (x * 2, y * 3))
Returns = module_class("Returns", lambda self, x: {"a": [x, Opaque(x * 2)]})
Adds = module_class("Adds", lambda self, x, y: x + y)
AddsShifted = module_class("AddsShifted", lambda self, x, y: x + y[1:])
Fixes = module_class("Fixes", lambda self, x: x + torch.ones(2, 3))
BySize = module_class("BySize", lambda self, x: x * 2 if x.shape[0] > 3 else x)


def _by_value(self, x):
    if x.sum() > 0:
        return x
    return x * 2


def _by_item(self, x):
    count = int(x.sum().item())
    return x if count > 3 else x * 2


@dataclasses.dataclass
class Case:
    module: torch.nn.Module
    args: Any
    kwargs: Any = None
    shapes: Any = None
    call: Any = None
    text: str = ""
    paths: tuple[str, ...] = ()
    remedy: str = ""

    def says(self, text, paths=(), remedy=""):
        return dataclasses.replace(self, text=text, paths=paths, remedy=remedy)


BATCH = {"x": {0: Dim("batch")}}
OF_BOTH = {"x": {0: Dim("a")}, "y": {0: Dim("b")}}
BY_VALUE = r"The code branches on the value of a tensor in _by_(value|item), .*test_export_errors\.py:\d+"
WAYS = "torch.where(condition, a, b)\ntorch.cond(condition, f, g, (x,))\ntorch._check(n > 3)"
REGISTERS, CHECKS = "register(Opaque, children=['x'])", "check_inputs(module, args, kwargs)"
WRITES = "dynamic_shapes=dynamic_shapes(args)"
SIDES = ("b (y.shape[0])", "a (x.shape[0])")

CASES = {
    "unregistered input": Case(Takes(), (X,), {"y": {"d": [X, Opaque()]}}).says(
        r"takes no object of this class as input: y\['d'\]\[1\] is a .*Opaque\. Register it first:",
        ("y['d'][1]",),
        REGISTERS,
    ),
    "unregistered output": Case(Returns(), (X,)).says(
        r"takes no object of this class as output: output\['a'\]\[1\] is a .*Opaque\. Register it first:",
        ("output['a'][1]",),
        REGISTERS,
    ),
    "an array": Case(Takes(), (X, numpy.zeros(2))).says(
        r"y is a numpy\.ndarray\. Pass a tensor instead:", ("y",), "torch.from_numpy(y)"
    ),
    "a Dim that the code fixes": Case(Fixes(), (X,), shapes=BATCH).says(
        "batch should vary, but the code works for size 2 only", ("batch",), "batch = 2"
    ),
    "a dynamic axis that the code fixes": Case(Fixes(), (X,), shapes={"x": {0: Dim.DYNAMIC}}).says(
        r"x\.shape\[0\] should vary, but the code works for size 2 only",
        ("x.shape[0]",),
        "Dim.AUTO  # instead of Dim.DYNAMIC",
    ),
    "a Dim of size 1": Case(Takes(), (X[:1],), shapes=BATCH).says(
        "batch should vary, but has size 1 in the example", ("batch",), "batch = 1"
    ),
    "a branch on a size": Case(BySize(), (X,), shapes=BATCH).says(
        r"another branch for some sizes of batch \(x\.shape\[0\]\): the trace is valid where .*x\.shape\[0\] <= 3",
        ("batch (x.shape[0])",),
        "batch = Dim('batch', max=3)",
    ),
    "two Dims that are one": Case(Adds(), (X, X + 1), shapes=OF_BOTH).says(
        r"works only where b \(y\.shape\[0\]\) and a \(x\.shape\[0\]\) are equal", SIDES, "b = a"
    ),
    "two Dims that go together": Case(AddsShifted(), (X, torch.ones(3, 3)), shapes=OF_BOTH).says(
        r"works only where b \(y\.shape\[0\]\) and a \(x\.shape\[0\]\) vary together", SIDES, "b = a + 1"
    ),
    "a Dim whose range leaves the example out": Case(Takes(), (X,), shapes={"x": {0: Dim("b", min=5)}}).says(
        r"The example has size 2 where the Dim allows \[5, int_oo\]", (), 'Dim("name", min=2)'
    ),
    "shapes with too few entries": Case(
        Takes(), (X, [X, X + 1]), shapes={"x": {0: Dim("a")}, "y": [{0: Dim("a")}]}
    ).says(r"dynamic_shapes does not fit the inputs: y: list has 2 children", ("dynamic_shapes['y']",), WRITES),
    "shapes for other names": Case(Takes(), (X,), {"y": X + 1}, {"x": None, "z": None}).says(
        r"Missing: \['y'\]; unknown: \['z'\]", (), "export_program(module, args, kwargs)  # writes them"
    ),
    "shapes of another rank": Case(Takes(), (X,), shapes={"x": [Dim("a")]}).says(
        r"x: expected one entry for each of the 2 axes", ("dynamic_shapes['x']",), WRITES
    ),
    "shapes that are no Dim": Case(Takes(), (X,), shapes={"x": {0: 3.5}}).says(
        r"expected a Dim, .* found 3\.5", ("dynamic_shapes['x']",), WRITES
    ),
    "a decision by value": Case(module_of(_by_value), (X,)).says(BY_VALUE, (), WAYS),
    "a number read from a tensor": Case(module_of(_by_item), (X.long(),)).says(BY_VALUE, (), WAYS),
    "a missing argument": Case(Takes(), ()).says(
        "cannot be called with these args and kwargs: missing a required argument: 'x'", ("x",), CHECKS
    ),
    "an unknown argument": Case(Takes(), (X,), {"z": X}).says(
        "cannot be called with these args and kwargs: got an unexpected keyword argument 'z'", ("z",), CHECKS
    ),
    "args that are no tuple": Case(Takes(), [X]).says(
        "args must be a tuple", ("args",), "torch.export.export(module, (x,))"
    ),
    "called with another size": Case(Takes(), (X,), call=(torch.ones(5, 3),)).says(
        "x has another size along axis 0 than 2, which the program was exported for",
        ("x",),
        "dynamic_shapes={'x': {0: Dim.AUTO}, ...}  # with an example of size 2 or more",
    ),
    "called on the other side of a branch": Case(
        BySize(), (X,), shapes={"x": {0: Dim.AUTO}}, call=(torch.ones(9, 3),)
    ).says(r"The program is valid only for x\.shape\[0\] <= 3", ("x",)),
    "called with another number": Case(Takes(), (X, 3), call=(X, 4)).says(
        "The program is valid only for y == 3: a number", ("y",), "dynamic_shapes={'y': Dim.AUTO, ...}"
    ),
    "called with another structure": Case(Takes(), (X,), call=([X],)).says(
        r"exported for inputs of another structure:\nargs\[0\]\n    exported: a leaf\n    called:   list of 1",
        ("args[0]",),
    ),
    "called with other keywords": Case(Both(), (), {"x": X, "y": X + 1}, call={"x": X, "z": X}).says(
        r"kwargs\['z'\] was not passed by keyword .* y is missing",
        ("kwargs['z']",),
        "program.module()(..., x=..., y=...)",
    ),
    "called with None": Case(Both(), (X, X + 1), call=(X, None)).says(
        "could not check its inputs. Known causes: None instead of a tensor", (), "example.contiguous()"
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


@pytest.mark.parametrize("name", ["unregistered input", "called with another structure", "a Dim that the code fixes"])
def test_the_message_alone_and_a_log_with_it_are_explained_too(name):
    error, _ = raised_by(CASES[name], strict=False)
    explained = explain_error(error)
    assert explained.known
    assert "Opaque" in explained.text or "args[0]" in explained.text or "batch" in explained.text
    assert str(explain_error(str(error))) == str(explained)
    assert str(explain_error(f"{FRAMES}{type(error).__name__}: {error}")) == str(explained)


@pytest.mark.parametrize("strict", [False, True])
def test_a_slice_whose_strides_became_a_guard(strict):
    shapes = {"x": {0: Dim.AUTO, 1: Dim.AUTO}}
    error, about = raised_by(
        Case(Takes(), (torch.ones(5, 9)[:, 2:6],), shapes=shapes, call=(torch.ones(5, 3),)), strict
    )
    assert "slice of a larger tensor" in str(explain_error(error, *about))


def test_an_axis_that_is_not_there():
    """torch 2.13 ends in an IndexError without a place."""
    error, about = raised_by(Case(Takes(), (X,), shapes={"x": {5: Dim("a")}}), strict=False)
    assert str(error) == "list assignment index out of range"
    assert "the specification names axis 5" in explain_error(error, *about).text
    assert not explain_error(error).known


def test_the_block_is_named_for_a_cache_in_an_output_and_one_that_is_not_there_to_be_looked_at():
    def fills(self, x):
        cache = transformers.DynamicCache()
        cache.update(x[None, None], x[None, None], 0)
        return x, {"past_key_values": cache}

    error, about = raised_by(Case(module_of(fills), (X,)), strict=False)
    explained = explain_error(error, *about)
    assert explained.paths == ("output[1]['past_key_values']",)
    assert explained.remedy == "with register_flattening_functions(patch_transformers=True): ..."
    with register_flattening_functions(patch_transformers=True):
        export(module_of(fills), (X,))
    reader = module_class("Reader", lambda self, cache: cache.layers[0].keys + 1)()
    with pytest.raises(Exception, match="DynamicCache") as caught:
        export(reader, (make_dynamic_cache([(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))]),))
    assert explain_error(caught.value).remedy == "with register_flattening_functions(patch_transformers=True): ..."


FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    run(x)\n    ^^^^^^\n'


@pytest.mark.parametrize(
    "error", [OSError("no space\nleft"), KeyError("a"), ValueError(), TypeError("too many positional")]
)
def test_what_is_not_known_is_called_unknown_and_errors_of_ours_explain_themselves(error):
    explained = explain_error(error, Takes(), (X,))
    assert not explained.known
    first = str(error).split("\n")[0]
    assert explained.text.endswith(f"torch reports: {type(error).__name__}" + (f": {first}" if first else ""))
    assert (explained.paths, explained.remedy) == ((), "")
    explained = explain_error(DynamicShapesError("x: no"))
    assert (explained.known, str(explained)) == (True, "x: no")


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


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any = None


class Color(enum.Enum):
    RED = 1


AddsPair = module_class("AddsPair", lambda self, pair: pair.a + pair.b)
Ignores = module_class("Ignores", lambda self, x, y=None: x + 1)


@pytest.fixture
def pair_registered():
    register(Pair, backends="torch")
    yield
    if Pair in pytree.SUPPORTED_NODES:
        unregister_class_flattening(Pair)


def explained(call, *about):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)  # one of torch 2.13 has a place too few, and pytest raises
        try:
            with pytest.raises((RuntimeError, TypeError, ValueError, AttributeError, AssertionError)) as caught:
                call()
        finally:
            logging.disable(logging.NOTSET)
    explanation = explain_error(caught.value, *about)
    assert explanation.known, caught.value
    return explanation


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("exporter", ["jit", "onnx"])
def test_the_old_tracer_looks_at_no_registration(exporter, tmp_path, pair_registered):
    args = (Pair(X, X),)

    def call():
        if exporter == "jit":
            torch.jit.trace(AddsPair(), args)
        else:
            torch.onnx.export(AddsPair(), args, str(tmp_path / "x.onnx"), dynamo=False)

    explanation = explained(call, AddsPair(), args)
    assert "ignores registrations." in explanation.text
    assert explanation.remedy == 'export_onnx(module, args, kwargs, path="model.onnx")'
    unregister_class_flattening(Pair)
    assert explained(call, AddsPair(), args).paths == ("pair",)


def test_a_program_that_is_called_or_read_where_nothing_is_registered_any_more(tmp_path, pair_registered):
    """torch speaks of adapters where it was unflattened, and puts the reason for one that is stored into a warning."""
    args = (Pair(X, X),)
    program = export(AddsPair(), args)
    torch.export.save(program, tmp_path / "x.pt2")
    unflattened = torch.export.unflatten(program)
    unregister_class_flattening(Pair)
    assert "Pair" in explained(lambda: program.module()(*args), program, args).text
    alone = explain_error(KeyError(Pair))
    assert alone.text.startswith("The program takes or returns a Pair, which is not registered (any more)")
    assert alone.remedy == "register(Pair)"
    explanation = explained(lambda: unflattened(*args), unflattened, args)
    assert (explanation.paths, explanation.remedy) == (("args[0]",), "register(Pair)")
    assert "register_flattening_functions" in explained(lambda: unflattened(X, X)).remedy
    assert "not registered in this process" in explained(lambda: torch.export.load(tmp_path / "x.pt2")).text


def test_a_memory_format_among_the_inputs_is_stored_with_a_newer_pickle(tmp_path):
    """The line works; Python 3.13 stores it with the older one."""
    if sys.version_info < (3, 13):
        assert "pickle_protocol=4" in explained(lambda: torch.save(torch.channels_last, io.BytesIO())).remedy
    torch.save(torch.channels_last, tmp_path / "x", pickle_protocol=4)
    assert torch.load(tmp_path / "x", weights_only=False) is torch.channels_last


def test_devices_that_differ_are_named():
    module, args = torch.nn.Linear(3, 2), (torch.ones(2, 3, device="meta"),)
    explanation = explained(lambda: torch.export.export(module, args), module, args)
    assert (explanation.paths, explanation.text) == (
        ("input",),
        "The weights are on cpu, and input is not. Move the inputs:",
    )
    made = {"torch": torch, "inputs": args}
    for text in (
        "Tensor on device meta is not on the expected device cpu!",
        # of torch 2.11
        "Unhandled FakeTensor Device Propagation for aten.mm.default, found two different devices meta, cpu",
    ):
        moved = explain_error(RuntimeError(text), module, args).remedy
        assert "tensor.to('cpu')" in moved
    # a tensor without data goes nowhere; on another device than that the line is the same
    assert eval(moved.replace("'cpu'", "'meta'"), made)[0].device.type == "meta"


@pytest.mark.parametrize(
    "call", [lambda module: module.weight.sum().item(), lambda module: module.to("cpu")], ids=["item", "to"]
)
def test_weights_without_data_are_said_to_be_that(call):
    module, args = torch.nn.Linear(3, 2, device="meta"), (torch.ones(4, 3, device="meta"),)
    explanation = explained(lambda: call(module), module, args)
    assert "have no data" in explanation.text
    names = {
        "torch": torch,
        "module": module,
        "args": (),
        "kwargs": {"input": args[0]},
        "dynamic_shapes": dynamic_shapes,
    }
    assert isinstance(eval(explanation.remedy, names), torch.export.ExportedProgram)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_named(layout):
    """torch ends in an internal error."""
    if layout is torch.jagged and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11 exports it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout),)
    explanation = explained(lambda: torch.export.export(Ignores(), args), Ignores(), args)
    assert (explanation.paths, explanation.remedy) == (("x",), "torch.nested.to_padded_tensor(x, 0.0)")


def test_a_module_among_the_inputs_and_a_constant_of_a_strict_trace_are_named():
    args, shapes = (X, torch.nn.Linear(2, 2)), {"x": {0: torch.export.Dim.AUTO}, "y": None}
    explanation = explained(lambda: export(Ignores(), args, dynamic_shapes=shapes), Ignores(), args)
    assert (explanation.paths, explanation.remedy) == (("y",), "self.part = part")
    given = (X, torch.float32)
    explanation = explained(lambda: export(Ignores(), given, strict=True), Ignores(), given)
    assert (explanation.paths, "static" in explanation.remedy) == (("y",), True)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 refuses it in the trace")
def test_an_enum_among_the_inputs_is_not_stored():
    """torch exports it, ignores it in a call, and cannot store the program."""
    args = (X, Color.RED)
    program = torch.export.export(Ignores(), args)
    explanation = explained(lambda: torch.export.save(program, io.BytesIO()), Ignores(), args)
    assert (explanation.paths, "(Color.RED)" in explanation.text) == (("y",), True)


def test_vmap_over_an_object_with_numbers_and_grad_by_one_with_none(pair_registered):
    pair = Pair(X, 3)
    explanation = explained(lambda: torch.vmap(lambda p: p.a * p.b)(pair))
    in_dims = eval(explanation.remedy.removeprefix("in_dims="), {"torch": torch, "input": pair})
    assert torch.vmap(lambda p: p.a * p.b, in_dims=in_dims)(pair).tolist() == [[3.0] * 3] * 2
    pair = Pair(X)
    explanation = explained(lambda: torch.func.grad(lambda p: p.a.square().sum())(pair))
    line = explanation.remedy.replace("x=x", "a=x").replace("obj.x", "obj.a")
    names = {"torch": torch, "dataclasses": dataclasses, "obj": pair, "function": lambda p: p.a.square().sum()}
    assert eval(line, names).tolist() == [[2.0] * 3] * 2
