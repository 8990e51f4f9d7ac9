"""The module of a proof is called with the objects of the caller, whatever their flatten function leaves out."""

import threading

import pytest
import torch
import torch.utils._pytree as pytree

from yobx_flatten import export_onnx, export_program, register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import ReplayError
from yobx_flatten.export.proof.untouched_copy import untouched_copy


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


def test_a_copy_has_everything_and_shares_the_module():
    """Tensors are copies, also one that was computed; a lock is shared, since it cannot be copied."""
    module = Adds()
    given = Given(torch.ones(2, requires_grad=True) * 2, [torch.ones(1)])
    given.module, given.lock = module, threading.Lock()
    ((found,), named) = untouched_copy(((given,), {"given": given}), module)
    assert torch.equal(found.x, given.x)
    assert found.x is not given.x
    assert found.bias[0] is not given.bias[0]
    assert found.module is module
    assert found.lock is given.lock
    assert named["given"].lock is given.lock


def test_an_object_that_is_given_twice_is_copied_once():
    """As `clone` cannot know."""
    given = Given(torch.ones(2))
    (found,), named = untouched_copy(((given,), {"given": given}), Adds())
    assert found is named["given"]
