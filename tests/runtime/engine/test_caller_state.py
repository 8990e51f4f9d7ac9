"""What a caller sets around a call reaches the threads that run layers: thread locals and modes of torch."""

import copy
import threading
import types

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.runtime.small import all_recomputed, near, near_gradients

F = nn.functional
STATE = threading.local()
SWITCHES = types.SimpleNamespace(local=threading.local())
X, Y = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) for size in (8, 4))


class Own(threading.local):
    scale = 1.0


OWN = Own()


def factor():
    return getattr(STATE, "scale", 1.0)


class Reads(nn.Linear):
    """Reads the switch itself."""

    def forward(self, x):
        return super().forward(x) * getattr(STATE, "scale", 1.0)


class Asks(nn.Linear):
    """Asks a function for it, in a method of its own."""

    def forward(self, x):
        return super().forward(x) * self.scale()

    def scale(self):
        return factor()


class OfObject(nn.Linear):
    def forward(self, x):
        return super().forward(x) * getattr(SWITCHES.local, "scale", 1.0)


class OfClass(nn.Linear):
    def forward(self, x):
        return super().forward(x) * OWN.scale


class Holds(nn.Linear):
    """Has it as an attribute."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.state = STATE

    def __deepcopy__(self, memo):
        made = Holds(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x):
        return super().forward(x) * getattr(self.state, "scale", 1.0)


@pytest.mark.parametrize("devices", ["virtual:1", "virtual:2"])
@pytest.mark.parametrize("kind", [Reads, Asks, OfObject, OfClass, Holds])
def test_a_thread_local_of_the_caller_is_seen_by_layers(kind, devices):
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    pipeline = RoundPipe(model, devices=devices)
    for scale in (3.0, 1.0):
        plain.zero_grad()
        pipeline.zero_grad()
        for local in (STATE, SWITCHES.local, OWN):
            local.scale = scale
        expected = F.mse_loss(plain(X), Y) * factor()
        expected.backward()
        config = all_recomputed(3, 1)
        found = pipeline.forward_backward(
            (X,), label=Y, loss_fn=lambda out, y: F.mse_loss(out, y) * factor(), run_config=config
        )
        assert near(found, expected)
        assert near_gradients(model, plain)


class Doubles(TorchFunctionMode):
    """Doubles what linear layers return."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


def test_a_function_mode_of_the_caller_is_seen_by_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    pipeline = RoundPipe(copy.deepcopy(model), devices="virtual:2")
    with Doubles():
        expected = F.mse_loss(model(X), Y)
        config = RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean")
        assert near(pipeline.forward_backward((X,), label=Y, loss_fn=F.mse_loss, run_config=config), expected)


def test_operations_of_layers_are_counted():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    pipeline = RoundPipe(copy.deepcopy(model), devices="virtual:2")
    counted = []
    config = {"roundpipe_run_config": RoundPipeRunConfig(num_microbatch=1)}
    with torch.no_grad():
        for run, options in ((model, {}), (pipeline, config)):
            with FlopCounterMode(display=False) as counter:
                run(X, **options)
            counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] == 2 * 6 * 8 * (8 + 4)
