"""A step in the background runs with the names that its function read when it was given."""

import functools
import threading

import pytest
import torch

from roundpipe_runtime import RoundPipe
from roundpipe_runtime.pipeline.optimized_model import bound_now

NAME = "first"


def read():
    return NAME


def indirect():
    return read()


def test_names_of_a_module_and_of_the_functions_that_are_named(monkeypatch):
    made = [bound_now(function) for function in (read, indirect, lambda: NAME, lambda: [read() for _ in "x"].pop())]
    monkeypatch.setitem(globals(), "NAME", "second")
    assert [function() for function in made] == ["first"] * 4
    assert read() == "second"


def test_names_of_the_function_around_it():
    name, default = "first", "first"

    def inner():
        return name

    made = [bound_now(lambda: name), bound_now(lambda: inner()), bound_now(lambda default=default: default)]
    name = "second"
    assert [function() for function in made] == ["first"] * 3
    assert inner() == "second"


def test_a_function_that_writes_names_is_left_alone():
    count = 0

    def step():
        nonlocal count
        count += 1

    assert bound_now(step) is step
    bound_now(step)()
    assert count == 1


@pytest.mark.parametrize("callable_", [functools.partial(print), threading.Event().set])
def test_what_holds_its_arguments_is_left_alone(callable_):
    assert bound_now(callable_) is callable_


def trained(mode):
    """Weights after steps of two optimizers in turns."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 256), *[torch.nn.Linear(256, 256) for _ in range(6)])
    model = RoundPipe(layers, devices="virtual:2")
    parameters = list(model.parameters())
    first, second = torch.optim.Adam(parameters[:8], lr=1e-3), torch.optim.SGD(parameters[8:], lr=1e-2)
    x = torch.randn(6, 8)
    for step in range(8):
        optimizer = second if step % 2 else first
        model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=mode)  # noqa: B023 # the point
        optimizer = None
    model.synchronize()
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    model.close()
    return weights


def test_two_optimizers_in_turns_train_as_without_a_thread():
    assert torch.equal(trained("exact"), trained(False))
