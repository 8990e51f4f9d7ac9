"""Messages of the tools around an export are explained; every message here was raised by torch itself."""

import dataclasses
import enum
import io
import logging
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import dynamic_shapes, explain_error, register, unregister_class_flattening

X = torch.ones(2, 3)


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any = None


class Color(enum.Enum):
    RED = 1


class Adds(torch.nn.Module):
    def forward(self, pair):
        return pair.a + pair.b


class Ignores(torch.nn.Module):
    def forward(self, x, y=None):
        return x + 1


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
            torch.jit.trace(Adds(), args)
        else:
            torch.onnx.export(Adds(), args, str(tmp_path / "x.onnx"), dynamo=False)

    explanation = explained(call, Adds(), args)
    assert "ignores registrations." in explanation.text
    assert explanation.remedy == 'export_onnx(module, args, kwargs, path="model.onnx")'
    unregister_class_flattening(Pair)
    assert explained(call, Adds(), args).paths == ("pair",)


def test_an_unflattened_program_that_is_called_where_nothing_is_registered(pair_registered):
    """torch speaks of adapters; the line registers the class."""
    args = (Pair(X, X),)
    program = torch.export.unflatten(torch.export.export(Adds(), args))
    unregister_class_flattening(Pair)
    explanation = explained(lambda: program(*args), program, args)
    assert (explanation.paths, explanation.remedy) == (("args[0]",), "register(Pair)")
    assert "register_flattening_functions" in explained(lambda: program(X, X)).remedy


def test_a_stored_program_that_cannot_be_read(tmp_path, pair_registered):
    """torch puts the reason into a warning."""
    torch.export.save(torch.export.export(Adds(), (Pair(X, X),)), tmp_path / "x.pt2")
    unregister_class_flattening(Pair)
    explanation = explained(lambda: torch.export.load(tmp_path / "x.pt2"))
    assert "not registered in this process" in explanation.text


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


def test_a_module_among_the_inputs_is_named():
    """torch counts shapes."""
    args = (X, torch.nn.Linear(2, 2))

    def call():
        shapes = {"x": {0: torch.export.Dim.AUTO}, "y": None}
        torch.export.export(Ignores(), args, dynamic_shapes=shapes)

    explanation = explained(call, Ignores(), args)
    assert (explanation.paths, explanation.remedy) == (("y",), "self.part = part")


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 refuses it in the trace")
def test_an_enum_among_the_inputs_is_not_stored():
    """torch exports it, ignores it in a call, and cannot store the program."""
    args = (X, Color.RED)
    program = torch.export.export(Ignores(), args)
    explanation = explained(lambda: torch.export.save(program, io.BytesIO()), Ignores(), args)
    assert (explanation.paths, "(Color.RED)" in explanation.text) == (("y",), True)


def test_vmap_over_an_object_with_numbers(pair_registered):
    pair = Pair(X, 3)
    explanation = explained(lambda: torch.vmap(lambda p: p.a * p.b)(pair))
    in_dims = eval(explanation.remedy.removeprefix("in_dims="), {"torch": torch, "input": pair})
    assert torch.vmap(lambda p: p.a * p.b, in_dims=in_dims)(pair).tolist() == [[3.0] * 3] * 2


def test_grad_by_an_object_with_none(pair_registered):
    pair = Pair(X)
    explanation = explained(lambda: torch.func.grad(lambda p: p.a.square().sum())(pair))
    line = explanation.remedy.replace("x=x", "a=x").replace("obj.x", "obj.a")
    names = {"torch": torch, "dataclasses": dataclasses, "obj": pair, "function": lambda p: p.a.square().sum()}
    assert eval(line, names).tolist() == [[2.0] * 3] * 2


def test_the_inputs_of_a_program_traced_strictly(pair_registered):
    args = (X, torch.float32)
    explanation = explained(lambda: torch.export.export(Ignores(), args, strict=True), Ignores(), args)
    assert (explanation.paths, "static" in explanation.remedy) == (("y",), True)
