"""What the runtime does otherwise than the one whose interface it has, where no test of a part shows it."""

import copy
import functools
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from roundpipe_runtime import (
    ModelExecutePlan,
    PlanError,
    RoundPipe,
    RoundPipeRunConfig,
    UnevenSplitWarning,
    UnregisteredObjectError,
)
from tests.runtime.small import batch, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)

PROGRAM = """
import sys, threading
import torch
before, loaded = threading.active_count(), set(sys.modules)
import roundpipe_runtime
assert threading.active_count() == before, threading.enumerate()
assert not torch.cuda.is_initialized()
print(*{name.partition(".")[0] for name in set(sys.modules) - loaded})
roundpipe_runtime.RoundPipe(torch.nn.Linear(2, 2), devices="virtual:2")
assert threading.active_count() == before, threading.enumerate()
"""


@pytest.fixture
def pipe():
    return functools.partial(RoundPipe, devices="virtual:2:check")


def test_the_import_needs_no_accelerator_and_starts_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    libraries = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    assert libraries == {"roundpipe_runtime", "yobx_flatten"}


def test_the_documented_quotient_warns_when_it_is_no_mean(pipe):
    inputs, labels = batch(10)
    config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="sum")
    wrapped = pipe(small_model())
    with pytest.warns(UnevenSplitWarning, match="WeightedLoss") as seen:
        wrapped.forward_backward((inputs,), label=labels, loss_fn=lambda o, t: F.mse_loss(o, t) / 4, run_config=config)
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.forward_backward(
            (inputs[:8],), label=labels[:8], loss_fn=lambda o, t: F.mse_loss(o, t) / 4, run_config=config
        )


def test_a_call_without_anything_to_cut_is_one_microbatch(pipe):
    class Counts(nn.Module):
        calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model = Counts()
    config = RoundPipeRunConfig(num_microbatch=3)
    with torch.no_grad():
        assert pipe(model)(None, 3, name="x", roundpipe_run_config=config) == ((None, 3), {"name": "x"})
        assert model.calls == 1
        assert pipe(model)(roundpipe_run_config=config) == ((), {})
    assert model.calls == 2


class Hidden:
    """Holds a tensor, and nobody registered it."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_an_unregistered_object_with_tensors_is_refused(pipe):
    """It is not handed whole to every microbatch: as input and between layers, the error says where it is."""

    class Take(nn.Module):
        def forward(self, x):
            return Hidden(x)

    with pytest.raises(UnregisteredObjectError, match=r"args\[0\][\s\S]*Hidden"):
        pipe(nn.Identity())(Hidden(torch.zeros(4)))
    with pytest.raises(UnregisteredObjectError, match=r"layer 0 \(Take\)[\s\S]*Hidden"):
        pipe(nn.Sequential(Take(), nn.Identity()))(torch.zeros(4, 2))


def test_a_fused_plan_without_the_last_layers_is_refused(pipe):
    plan = ModelExecutePlan([range(3)], [range(3, 6), range(3)])
    inputs, labels = batch(4)
    with pytest.raises(PlanError, match="misses layer 6"):
        pipe(small_model()).forward_backward(
            (inputs,), label=labels, loss_fn=F.mse_loss, run_config=RoundPipeRunConfig(execute_plan=plan)
        )


def test_hooks_on_layers_run_with_the_layer_itself(pipe):
    model = small_model()
    calls = []
    model[0].register_forward_pre_hook(lambda module, args: calls.append(("pre", module)))
    model[0].register_forward_hook(lambda module, args, output: calls.append(("post", module)))
    model[2].register_full_backward_hook(lambda module, gi, go: calls.append(("back", module)))
    inputs, labels = batch(4)
    plan = ModelExecutePlan([], [range(7)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=2, execute_plan=plan)
    pipe(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    assert [kind for kind, _ in calls] == ["pre", "post", "back"] * 2
    assert all(module is model[2 if kind == "back" else 0] for kind, module in calls)


def test_the_wrapper_is_pickled_copied_and_saved(pipe):
    """A copy by pickle or deepcopy has the names and values of the model, and trains alike."""
    model = small_model()
    wrapped = pipe(model)
    inputs, labels = batch(6)
    assert list(wrapped.state_dict()) == list(model.state_dict())
    wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    for twin in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert twin[0].weight is not model[0].weight
        twin.zero_grad()
        twin.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        assert same_bits(state(twin), state(model))


def test_training_goes_on_from_a_saved_pipeline():
    inputs, labels = batch(6)

    def third_step(wrapped, optimizer):
        torch.manual_seed(9)
        loss = wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(optimizer.step)
        return [loss, *(p.detach() for p in wrapped.parameters())]

    wrapped = RoundPipe(small_model(dropout=0.4), devices="virtual:2")
    optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    loaded = pickle.loads(pickle.dumps((wrapped, optimizer)))
    assert same_bits(third_step(wrapped, optimizer), third_step(*loaded))
