"""Tests of roundpipe_runtime.checkpoint.training_state: all generators go on where they were."""

import types

import pytest
import torch

from roundpipe_runtime.checkpoint import training_state
from roundpipe_runtime.checkpoint.training_state import random_state, restore_random_state


@pytest.fixture(autouse=True)
def generators_left_as_found():
    before = random_state()
    yield
    restore_random_state(before)


class FakeLibrary:
    """What torch has for a kind of accelerator."""

    def __init__(self, count):
        self.states = [torch.tensor([number]) for number in range(count)]

    def device_count(self):
        return len(self.states)

    def get_rng_state(self, number):
        return self.states[number].clone()

    def set_rng_state(self, state, number):
        self.states[number] = state


@pytest.mark.parametrize(
    ("kind", "count", "expected"), [("cuda", 1, [0]), ("cuda", 2, [0, 1]), ("cuda", 3, [0, 1, -1]), ("xpu", 1, [-1])]
)
def test_generators_of_accelerators_come_back_where_there_are_any(monkeypatch, kind, count, expected):
    monkeypatch.setattr(training_state, "_accelerator", lambda: ("cuda", FakeLibrary(2)))
    state = random_state()
    here = FakeLibrary(count)
    here.states = [torch.tensor([-1])] * count
    monkeypatch.setattr(training_state, "_accelerator", lambda: (kind, here))
    restore_random_state(state)
    assert [generator.item() for generator in here.states] == expected


@pytest.mark.parametrize(("started", "expected"), [(True, "npu"), (False, "")])
def test_any_accelerator_that_the_process_uses_has_generators(monkeypatch, started, expected):
    library = FakeLibrary(1)
    library.is_initialized = lambda: started
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: library)
    assert training_state._accelerator()[0] == expected
