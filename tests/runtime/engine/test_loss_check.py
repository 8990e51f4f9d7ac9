"""The check of a loss function leaves no trace: generators, buffers and other threads are as without its calls."""

import copy
import functools
import queue
import random
import threading
import types
import warnings

import numpy
import pytest
import torch
from torch import nn

from roundpipe_runtime import LossError, RoundPipe, RoundPipeRunConfig, RoundPipeWarning, WeightedLoss
from roundpipe_runtime.batch.entries import FlatBatch
from roundpipe_runtime.batch.loss_proof import NoDropout
from roundpipe_runtime.batch.splitting import split_flat
from roundpipe_runtime.device.worker import generator_lock
from roundpipe_runtime.engine.code_state import state_of
from roundpipe_runtime.engine.loss_check import LossChecks, Sample
from roundpipe_runtime.engine.rows import RowTrial
from tests.modules import module_of
from tests.runtime.small import batch, near, near_gradients, trains_like

F = nn.functional


def check(loss_fn, outputs, labels, stated="mean"):
    microbatches = [types.SimpleNamespace(labels=[labels])]
    (whole,), parts = (split_flat(FlatBatch.of((outputs,), {}, labels), number) for number in (1, 2))
    trial = RowTrial(whole, parts)
    sample = Sample.of(trial, [one.inputs[0] for one in (trial.whole, *trial.parts)], [labels])
    return LossChecks().reduction(loss_fn, stated, microbatches, lambda: iter([sample]))


class Curriculum:
    """A mean over rows that becomes a loss of pairs."""

    def __init__(self):
        self.step = 0

    def __call__(self, outputs, labels):
        return contrast(outputs, labels) if self.step else F.cross_entropy(outputs, labels)


@pytest.mark.parametrize("target", [-100, 5])
@pytest.mark.parametrize("right", [torch.tensor([[1, 2, 3], [4, 1, -100]]), torch.tensor([1, 2, 3, 4, 1])])
def test_ctc_targets_that_are_no_classes_are_refused_and_padding_is_not(right, target):
    """torch does not check targets: its kernel reads other memory, which can end the process."""
    scores, lengths = torch.randn(9, 2, 5).log_softmax(-1), (torch.tensor([9, 9]), torch.tensor([3, 2]))
    expected, wrong = F.ctc_loss(scores, right, *lengths), right.clone()
    wrong.flatten()[0] = target
    with NoDropout():
        assert torch.equal(F.ctc_loss(scores, right, *lengths), expected)
        with pytest.raises(IndexError, match="CTC targets must be from 0 to 4"):
            F.ctc_loss(scores, wrong, *lengths[:1], target_lengths=lengths[1])


def test_nobody_draws_while_a_loss_is_checked():
    """A layer of another thread that draws nothing would be taken for one that does, and one that draws for another."""
    taken = queue.SimpleQueue()  # what a call adds to a list is undone

    def loss_fn(outputs, labels):
        def take():
            lock = generator_lock()
            is_free = lock.acquire(timeout=0.05)
            taken.put(is_free)
            if is_free:
                lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return F.mse_loss(outputs, labels)

    check(loss_fn, *(batch(3)[1],) * 2)
    assert {taken.get() for _ in range(taken.qsize())} == {False}


def test_generators_are_as_they_were():
    own = torch.Generator().manual_seed(5)

    def noisy(self, outputs, labels):
        noise = torch.rand(()) + random.random() + numpy.random.rand() + torch.rand((), generator=self.own)
        return F.mse_loss(outputs, labels) + 0 * noise

    def states():
        found = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
        return *found, own.get_state().tolist()

    before = states()
    check(module_of(noisy, own=own), batch(3)[1], torch.zeros(3, 3))
    assert states() == before


@pytest.mark.parametrize("devices", ["virtual:1", "virtual:2"])
def test_a_loss_that_begins_to_draw_is_counted_once(devices):
    """It is called a second time with its seed, and the mean of the first time is not another mean of the loss."""
    calls = []

    def loss_fn(outputs, labels):
        return F.mse_loss(outputs, labels) + 0 * (torch.rand(()) if "second" in calls else torch.zeros(()))

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    inputs, labels = batch(8)
    expected = F.mse_loss(model(inputs), labels)
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    pipe = RoundPipe(model, devices=devices, model_run_config=config)
    for call in ("first", "second"):
        calls.append(call)
        assert near(pipe.forward_backward((inputs,), label=labels, loss_fn=loss_fn), expected)


class Learned(nn.Module):
    """It trains a scale, and counts rows."""

    def __init__(self):
        super().__init__()
        self.scale, self.rows = nn.Parameter(torch.ones(5)), 0

    def forward(self, outputs, labels):
        self.rows += len(labels)
        return F.cross_entropy(outputs * self.scale, labels)


def contrast(outputs, labels):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def focal(outputs, labels):
    each = F.cross_entropy(outputs, labels.clamp(min=0), reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


LOSSES = {
    "mean": (lambda: F.cross_entropy, "items"),
    "module": (nn.CrossEntropyLoss, "items"),
    "smoothed": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), "items"),
    "class weights": (lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])), "items"),
    "halved": (lambda: lambda outputs, labels: F.cross_entropy(outputs, labels) / 2, "items"),
    "learned": (Learned, "items"),
    "of the user's own": (lambda: focal, "rows"),
    "sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), "sum"),
    "sum and weight": (
        lambda: lambda out, y: WeightedLoss(F.cross_entropy(out, y, reduction="sum"), (y != -100).sum()),
        "rows",
    ),
    "rows compared": (lambda: contrast, "joined"),
    "two means": (lambda: lambda out, y: F.cross_entropy(out, y) + out.logsumexp(-1).square().mean(), "joined"),
}


def made(rows, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)
    return layers, torch.randn(rows, 8, dtype=dtype), torch.randint(0, 5, (rows,))


def found_ways(pipeline):
    return [proof.way for proof in pipeline._rp_engine.loss_checks.proofs.values()]


@pytest.mark.parametrize("rows", [3, 6, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_by_default_a_loss_is_that_of_the_plain_layers(name, rows):
    make, way = LOSSES[name]
    loss_fn, own = make(), make()
    layers, x, y = made(rows)
    if rows > 3:
        y[2:4] = -100
    pipeline = RoundPipe(copy.deepcopy(layers), devices="virtual:2")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert trains_like(pipeline, layers, loss_fn, x, y, own=own, rtol=1e-4, atol=1e-5)
    assert found_ways(pipeline) == [way]
    assert [one.category for one in heard] == [RoundPipeWarning] * (way == "joined")
    if isinstance(loss_fn, Learned):
        assert loss_fn.rows == rows
        assert near(loss_fn.scale.grad, own.scale.grad)


class Labelled(nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.inner, self.reduction = nn.Linear(8, 5), reduction

    def forward(self, x):
        features, labels = x
        return F.cross_entropy(self.inner(features), labels, reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_layer_that_returns_the_loss_is_weighted_as_well(reduction):
    layers = nn.Sequential(nn.Identity(), Labelled(reduction))
    _, x, y = made(7)
    pipeline = RoundPipe(copy.deepcopy(layers), devices="virtual:2")
    expected = layers((x, y))
    expected.backward()
    assert near(pipeline.forward_backward(((x, y),)), expected)
    assert near_gradients(pipeline, layers)


class Setting:
    def __init__(self):
        self.value, self.weights = 1, torch.ones(2)

    def of(self, *given):
        return self.value


def inside(setting):
    layer = nn.Linear(1, 1)
    layer.inner = nn.Module()
    vars(layer.inner).update(vars(setting))
    return [layer, nn.Linear(1, 1)]


# how code reads a setting, each time made anew as scripts do, and layers that hold it
CODE = {
    "closure": lambda setting: lambda *given: setting.value,
    "default": lambda setting: lambda *given, own=setting: own.value,
    "method": lambda setting: setting.of,
    "partial": lambda setting: functools.partial(torch.add, setting),
    "partial of a method": lambda setting: functools.partial(setting.of, 1),
    "object": lambda setting: setting,
    "layers": inside,
}


@pytest.mark.parametrize("way", CODE)
def test_what_code_reads_is_noted(way):
    setting = Setting()
    before = state_of(CODE[way](setting))
    if way != "layers":  # which have other parameters each time
        assert state_of(CODE[way](setting)) == before
    setting.value = 2
    changed = state_of(CODE[way](setting))
    assert changed != before
    setting.weights.add_(1)
    assert state_of(CODE[way](setting)) not in (before, changed)


def with_modules_of_torch(outputs, labels):
    return F.cross_entropy(outputs, labels) + torch.zeros(()) + nn.functional.relu(outputs).sum()


def test_attributes_of_libraries_are_not_noted():
    """Torch has thousands of numbers and texts among its attributes, which no training changes."""
    assert len(state_of(with_modules_of_torch)) < 10


@pytest.mark.filterwarnings("ignore::roundpipe_runtime.RoundPipeWarning")
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_loss_whose_attribute_changes_is_shown_again(after):
    """At the call in which it has changed, which need not be call 2, 4 or 8."""
    loss_fn = Curriculum()
    layers, x, y = made(6)
    pipeline = RoundPipe(copy.deepcopy(layers), devices="virtual:2")
    for call in range(after + 1):
        loss_fn.step = call // after
        layers.zero_grad()
        pipeline.zero_grad()
        assert trains_like(pipeline, layers, loss_fn, x, y, rtol=1e-4, atol=1e-5)


MIXES = False


def by_a_global(outputs, labels):
    return contrast(outputs, labels) if MIXES else F.cross_entropy(outputs, labels)


@pytest.mark.parametrize("way", ["a global", "by itself"])
def test_a_loss_that_becomes_another_one_is_refused(way, monkeypatch):
    """A global that a loss reads is an attribute of it. One that counts its calls is found at calls 2, 4, 8, ..."""
    seen = []

    def by_itself(outputs, labels):
        seen.append(len(labels))
        return contrast(outputs, labels) if sum(seen) > 18 else F.cross_entropy(outputs, labels)

    layers, x, y = made(6)
    loss_fn, calls = (by_a_global, 2) if way == "a global" else (by_itself, 3)
    pipeline = RoundPipe(layers, devices="virtual:2", model_run_config=RoundPipeRunConfig(loss_reduction="mean"))
    for _ in range(calls):
        pipeline.forward_backward((x,), label=y, loss_fn=loss_fn)
    assert sum(seen) == (18 if way == "by itself" else 0)  # the proof leaves no effect
    monkeypatch.setitem(globals(), "MIXES", True)
    with pytest.raises(LossError, match="not a mean over rows"):
        pipeline.forward_backward((x,), label=y, loss_fn=loss_fn)


class Warmed:
    """A loss that grows with its calls, as a weight that is warmed up."""

    calls = 0

    def __call__(self, outputs, labels):
        self.calls += 1
        return F.cross_entropy(outputs, labels) * self.calls


class Balanced(nn.Module):
    """A loss with class weights that follow the labels it has seen, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(5))

    def forward(self, outputs, labels):
        self.seen += torch.bincount(labels, minlength=5)
        return F.cross_entropy(outputs, labels, weight=1 / self.seen, reduction="sum") / len(labels)


class Smoothed:
    """A loss next to the average of the losses before, in a list."""

    def __init__(self):
        self.before = [1.0]

    def __call__(self, outputs, labels):
        loss = F.cross_entropy(outputs, labels)
        self.before.append(loss.item())
        return loss / (sum(self.before) / len(self.before))


class Noted(Smoothed):
    def __call__(self, outputs, labels):
        super().__call__(outputs, labels)
        return F.cross_entropy(outputs, labels)


@pytest.mark.filterwarnings("ignore::roundpipe_runtime.RoundPipeWarning")
@pytest.mark.parametrize("loss", [Warmed, Balanced, Smoothed, Noted])
def test_a_loss_that_reads_what_its_calls_change_is_called_once_in_a_step(loss):
    layers, x, y = made(9)
    own, given = loss(), loss()
    expected = [own(layers(x), y).item() for _ in range(4)]
    pipeline = RoundPipe(layers, devices="virtual:2")
    config = RoundPipeRunConfig(num_microbatch=3)
    found = [pipeline.forward_backward((x,), label=y, loss_fn=given, run_config=config) for _ in range(4)]
    assert [one.item() for one in found] == pytest.approx(expected, rel=1e-5)
    assert found_ways(pipeline) == ["items" if loss is Noted else "joined"]
    if loss is Noted:
        assert len(given.before) == 13  # and none of a proof


class Checked(nn.Module):
    """A layer, or a loss of rows, that refuses what is no number."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, given, *labels):
        if given.isnan().any():
            raise ValueError("not a number")
        return self.inner(given, *labels)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("raises", ["layers", "loss"])
def test_an_error_for_all_rows_shows_nothing_of_the_loss(raises, failing):
    layers, x, y = made(6)
    loss_fn = F.cross_entropy
    if raises == "layers":
        layers = nn.Sequential(Checked(layers))
    else:
        loss_fn = Checked(loss_fn)
    pipeline = RoundPipe(layers, devices="virtual:2")
    for call in range(4):
        given = x.clone()
        if call == failing:
            given[0] = torch.nan
            with pytest.raises(ValueError, match="not a number"):
                pipeline.forward_backward((given,), label=y, loss_fn=loss_fn)
        else:
            pipeline.forward_backward((given,), label=y, loss_fn=loss_fn)
            assert found_ways(pipeline) == ["items"]


def own_mean(outputs, labels):
    return (outputs - labels).square().mean()


@pytest.mark.parametrize("rows", [5, 7])
@pytest.mark.parametrize("how", [torch.float16, torch.bfloat16, "autocast"], ids=str)
@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.l1_loss, own_mean])
def test_a_scaled_mean_of_16_bits_is_a_mean(loss_fn, how, rows):
    """A scaler returns 32 bits of a mean that was rounded to 16. Loss and gradients are those of plain layers."""
    torch.manual_seed(rows)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    x, y = torch.randn(rows, 8), 3 * torch.randn(rows, 5)
    if how != "autocast":
        layers, x, y = layers.to(how), x.to(how), y.to(how)
    plain, scaler = copy.deepcopy(layers), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    pipeline = RoundPipe(layers, devices="virtual:2")
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        expected = scaler.scale(loss_fn(plain(x), y))
        found = pipeline.forward_backward((x,), label=y, loss_fn=lambda *given: scaler.scale(loss_fn(*given)))
    expected.backward()
    assert found_ways(pipeline) == ["rows"]
    rounding = 0.05 if how == torch.bfloat16 else 0.01
    assert torch.allclose(found, expected, rtol=rounding)
    for one, other in zip(layers.parameters(), plain.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= rounding * other.grad.norm()


@pytest.mark.filterwarnings("ignore::roundpipe_runtime.RoundPipeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_of_16_bits_in_the_loss_is_called_in_its_own_type(dtype):
    head = nn.Linear(5, 5).to(dtype)
    layers, x, y = made(6, dtype)
    for loss_fn, way in (
        (lambda outputs, labels: F.cross_entropy(head(outputs), labels), "items"),
        (lambda outputs, labels: contrast(head(outputs), labels), "joined"),
    ):
        pipeline = RoundPipe(layers, devices="virtual:2")
        pipeline.forward_backward((x,), label=y, loss_fn=loss_fn)
        assert found_ways(pipeline) == [way]


@pytest.mark.filterwarnings("ignore::roundpipe_runtime.RoundPipeWarning")
@pytest.mark.parametrize("then", ["mean", "sum", "rows compared"])
@pytest.mark.parametrize("first", ["mean", "sum", "rows compared"])
def test_a_repeated_proof_takes_no_earlier_one_back(first, then):
    losses = {name: LOSSES[name][0]() for name in ("mean", "sum", "rows compared")}

    class Changing:
        now = first

        def __call__(self, outputs, labels):
            return losses[self.now](outputs, labels)

    loss_fn = Changing()
    layers, x, y = made(6)
    pipeline = RoundPipe(copy.deepcopy(layers), devices="virtual:2")
    ways = []
    for call in range(8):
        loss_fn.now = first if call < 2 else then  # an attribute changes before call 3, at which nothing else is due
        layers.zero_grad()
        pipeline.zero_grad()
        assert trains_like(pipeline, layers, loss_fn, x, y, rtol=1e-4, atol=1e-5)
        ways += found_ways(pipeline)
    before = LOSSES[first][1]
    assert ways == [before] * 2 + [before if then == first else "joined"] * 6


def test_a_repeated_proof_compares_one_set_of_values(monkeypatch):
    """So that calls 2, 4, 8, ... cost little; the first proof has labels and outputs with other values."""
    sets, evaluate = [], Sample._evaluate

    def counted(self, *given):
        sets.append(len(given))
        return evaluate(self, *given)

    monkeypatch.setattr(Sample, "_evaluate", counted)
    layers, x, y = made(6)
    pipeline, found = RoundPipe(layers, devices="virtual:2"), []
    for _ in range(4):
        sets.clear()
        pipeline.forward_backward((x,), label=y, loss_fn=F.cross_entropy)
        found.append(len(sets))
    assert found[0] > 5
    assert found[1:] == [1, 0, 1]
