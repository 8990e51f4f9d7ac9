"""Messages of the tools around an export are explained; every message here was raised by torch itself."""

import dataclasses
import enum
import io
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import (
    NotRegisteredError,
    dynamic_shapes,
    explain_error,
    register,
    unregister_class_flattening,
)

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
    """What an error means, raised with torch's warnings out of the way."""
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


def test_a_stored_program_that_cannot_be_read(tmp_path, pair_registered):
    """torch puts the reason into a warning."""
    torch.export.save(torch.export.export(Adds(), (Pair(X, X),)), tmp_path / "x.pt2")
    unregister_class_flattening(Pair)
    explanation = explained(lambda: torch.export.load(tmp_path / "x.pt2"))
    assert "not registered in this process" in explanation.text


def test_devices_that_differ_are_named():
    """The inputs that are elsewhere; the line moves them."""
    module, args = torch.nn.Linear(3, 2), (torch.ones(2, 3, device="meta"),)
    explanation = explained(lambda: torch.export.export(module, args), module, args)
    assert (explanation.paths, explanation.text) == (
        ("input",),
        "The weights are on cpu, and input is elsewhere. Move the inputs:",
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
    """The line traces the module all the same."""
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


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 refuses it in the trace")
def test_an_enum_among_the_inputs_is_not_stored():
    """torch exports it, ignores it in a call, and cannot store the program."""
    args = (X, Color.RED)
    program = torch.export.export(Ignores(), args)
    explanation = explained(lambda: torch.export.save(program, io.BytesIO()), Ignores(), args)
    assert (explanation.paths, "here Color.RED" in explanation.text) == (("y",), True)


def test_the_inputs_of_a_program_traced_strictly(pair_registered):
    """A dtype is named, with the line that makes it static."""
    args = (X, torch.float32)
    explanation = explained(lambda: torch.export.export(Ignores(), args, strict=True), Ignores(), args)
    assert (explanation.paths, "static" in explanation.remedy) == (("y",), True)


def test_other_messages_are_not_known():
    """Nothing is made up."""
    assert not explain_error(ZeroDivisionError("division by zero")).known
    assert explain_error(NotRegisteredError("as it is")).text == "as it is"
