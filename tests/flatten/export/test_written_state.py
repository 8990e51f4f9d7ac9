"""Modules that write to their own state while they are exported: buffers of any kind, tensors, and plain numbers."""

import copy
from typing import ClassVar

import onnxruntime
import pytest
import torch

from yobx_flatten import Case, export_onnx, export_program
from yobx_flatten.errors import ReplayError


class Scaled(torch.nn.Module):
    """Writes a number into a buffer, as rotary embeddings do, and multiplies by it: 1.0, and 2.0 for larger inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.factor.copy_(torch.where(x.max() > 1, 2.0, 1.0).expand(3))
        return x * self.factor


class Counting(torch.nn.Module):
    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


class Persistent(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))


class NotPersistent(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3), persistent=False)


class PlainTensor(Counting):
    def __init__(self):
        super().__init__()
        self.calls = torch.zeros(3)


class TwoNames(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3), persistent=False)
        self.register_buffer("seen", self.calls, persistent=False)

    def forward(self, x):
        self.seen.add_(1)
        return x * self.calls


class Replaced(NotPersistent):
    def forward(self, x):
        self.register_buffer("calls", self.calls + 1, persistent=False)
        return x * self.calls


class PlainNumber(torch.nn.Module):
    """Counts in an attribute that is no tensor, of which a program has the value of the trace."""

    calls: ClassVar[int] = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.calls


KINDS = [Persistent, NotPersistent, PlainTensor, TwoNames, Replaced]


def _state(module):
    return {name: copy.deepcopy(value) for name, value in [*vars(module).items(), *module._buffers.items()]}


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (5.0, 2.0)])
def test_a_program_writes_a_buffer_that_is_not_persistent(scale, factor):
    """A buffer of persistent=False is no part of the state dict, and is computed at each call."""
    exported = export_program(Scaled(), (torch.ones(2, 3),))
    assert exported.report.remarks[0].startswith("forward writes to factor")
    assert torch.equal(exported(torch.full((4, 3), scale)), torch.full((4, 3), scale * factor))


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (5.0, 2.0)])
def test_a_file_computes_a_buffer_that_is_not_persistent(scale, factor, tmp_path):
    export_onnx(Scaled(), (torch.ones(2, 3),), path=tmp_path / "scaled.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "scaled.onnx")
    (found,) = session.run(None, {"x": torch.full((4, 3), scale).numpy()})
    assert torch.equal(torch.tensor(found), torch.full((4, 3), scale * factor))


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_goes_on_from_call_to_call_and_the_module_is_as_it_was(kind):
    """The program keeps what it writes, wherever the module holds it: 1, 2, 3 times the input.

    Trace, replays and calls leave every tensor of the module with its identity and its numbers.
    """
    module = kind()
    tensors, before = {**vars(module), **module._buffers}, _state(module)
    exported = export_program(module, (torch.ones(2, 3),), cases=[Case("five rows", (torch.ones(5, 3),))])
    assert [exported(torch.ones(1, 3)).tolist() for _ in range(3)] == [[[count] * 3] for count in (1.0, 2.0, 3.0)]
    after = {**vars(module), **module._buffers}
    assert all(after[name] is value for name, value in tensors.items())
    assert str(_state(module)) == str(before)


def test_a_number_that_changes_from_call_to_call_is_refused():
    """A program has the number of the trace: its second call would give 1 times the input, the module's 2 times."""
    module = PlainNumber()
    with pytest.raises(ReplayError, match=r"largest difference 1\.0e\+00"):
        export_program(module, (torch.ones(2, 3),))
    assert "calls" not in vars(module), "the trace left it there"


def test_a_number_that_changes_nothing_is_taken():
    """A module may note the length of its last input, as long as its result does not depend on that."""

    class Noting(torch.nn.Module):
        def forward(self, x):
            self.length = x.shape[0]
            return x + 1

    module = Noting()
    exported = export_program(module, (torch.ones(2, 3),), cases=[Case("five rows", (torch.ones(5, 3),))])
    assert exported.report.ok
    assert "length" not in vars(module)
