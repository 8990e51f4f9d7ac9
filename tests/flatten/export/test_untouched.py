"""The module of a proof is called with the objects of the caller, whatever their flatten function leaves out."""

import threading

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import export_onnx, export_program, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import InvalidArgumentError, ReplayError
from yobx_flatten.export.proof.eager_runs import Case, eager_steps


class Given:
    def __init__(self, x, bias=None):
        self.x, self.bias = x, bias


class Adds(torch.nn.Module):
    def forward(self, given):
        return given.x if given.bias is None else given.x + given.bias


@pytest.fixture
def lossy():
    """Registered with functions that drop an attribute."""

    def keyed(obj):
        return [(pytree.GetAttrKey("x"), obj.x)], None

    register_class_flattening(Given, lambda obj: ([obj.x], None), lambda children, static: Given(*children), keyed)
    yield
    unregister_class_flattening(Given)


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("is_positional", [True, False])
def test_what_a_flatten_function_drops_fails_the_proof(is_positional, tmp_path):
    """Eagerly 6, and 1 in the program, which is never given the attribute."""
    given = Given(torch.ones(2, 3), torch.full((2, 3), 5.0))
    args, kwargs = ((given,), {}) if is_positional else ((), {"given": given})
    with pytest.raises(ReplayError, match="5"):
        export_program(Adds(), args, kwargs)
    with pytest.raises(ReplayError, match="5"):
        export_onnx(Adds(), args, kwargs, path=tmp_path / "adds.onnx")
    assert given.bias is not None


class Spoils(torch.nn.Module):
    """Writes to what it is given, also where no flatten function looks."""

    def forward(self, given):
        given.x += 1
        given.bias[0].mul_(2)
        given.bias.append(given.x)
        given.seen = given.x.sum()
        return given.x * 1


def test_the_objects_of_the_caller_are_afterwards_as_they_were():
    """Tensors, lists and attributes; a lock, which cannot be copied, and one object that is given twice."""
    given = Given(torch.ones(2), [torch.ones(1)])
    given.lock, x, bias = threading.Lock(), given.x, given.bias
    (step,) = eager_steps(Spoils(), Case("spoils", (given,)))
    assert torch.equal(step.outputs, torch.full((2,), 2.0))
    assert vars(given).keys() == {"x", "bias", "lock"}
    assert given.x is x
    assert given.bias is bias
    assert len(bias) == 1
    assert (x.tolist(), bias[0].tolist()) == ([1.0, 1.0], [1.0])
    assert (x._version, bias[0]._version) == (0, 0)


def test_the_objects_of_the_caller_are_as_they_were_after_an_exception():
    """A module that stops half-way has written something."""

    class Stops(Spoils):
        def forward(self, given):
            super().forward(given)
            raise RuntimeError("half-way")

    given = Given(torch.ones(2), [torch.ones(1)])
    with pytest.raises(InvalidArgumentError, match="half-way"):
        eager_steps(Stops(), Case("stops", (), {"given": given}))
    assert (given.x.tolist(), len(given.bias), hasattr(given, "seen")) == ([1.0, 1.0], 1, False)
