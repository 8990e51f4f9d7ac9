"""Tests of host="disk:DIR": the numbers are those of a training in memory, and memory holds a few layers."""

import json
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, load_checkpoint, optim, save_checkpoint
from roundpipe_runtime.device.disk import disk_of
from roundpipe_runtime.errors import CheckpointError, ConfigError
from tests import fresh_process
from tests.runtime.small import Tied, same_bits

WIDTH, CLASSES = 64, 50
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: optim.Adam(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True),
}


def model(*, half: bool = False, frozen: bool = False) -> nn.Sequential:
    """An embedding, dropout, two layers with one weight, a head; of sizes that fill pages."""
    torch.manual_seed(0)
    first = Tied(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8))
    layers = [nn.Embedding(CLASSES, WIDTH), nn.Dropout(0.1), first, nn.Linear(WIDTH, WIDTH), Tied(first.weight)]
    made = nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    made[3].requires_grad_(not frozen)
    return made.bfloat16() if half else made


def wrapped(host: str, *, half: bool = False, frozen: bool = False, devices: int = 2) -> RoundPipe:
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
    dtype = torch.float32 if half else None
    made = model(half=half, frozen=frozen)
    return RoundPipe(made, dtype, "run", config, devices=f"virtual:{devices}", host=host)


TOKENS = torch.arange(24).reshape(6, 4)


def run(pipe, loss=None):
    pipe.forward_backward((TOKENS,), label=TOKENS, loss_fn=loss or loss_fn)


def copies_of(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def loss_fn(outputs, labels):
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


def optimizer_of(pipe: RoundPipe, kind: str = "adamw") -> torch.optim.Optimizer:
    with OptimizerCtx():
        return OPTIMIZERS[kind](p for p in pipe.parameters() if p.requires_grad)


def train(pipe, optimizer, steps, *, is_async=False, batches=1, first=0):
    """The losses of some steps: 7 rows in 3 microbatches, gradients of several batches, clipped to a norm."""
    found = []

    def step():
        torch.nn.utils.clip_grad_norm_(list(pipe.optim_parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(first, first + steps):
        for part in range(batches):
            tokens = torch.randint(CLASSES, (7, 4), generator=torch.Generator().manual_seed(10 * number + part))
            found.append(pipe.forward_backward((tokens,), label=tokens, loss_fn=loss_fn).item())
        pipe.step(step, is_async=is_async)
    pipe.synchronize()
    return found


def all_of(pipe, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return copies_of([*pipe.parameters(), *pipe.optim_parameters(), *states])


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {}),
        ({"half": True}, {"batches": 2}),
        ({"half": True, "devices": 3}, {"is_async": "exact"}),
        ({"frozen": True, "devices": 1}, {"is_async": "exact", "batches": 2}),
    ],
)
def test_twenty_steps_have_the_bits_of_memory(folder_on_disk, options, how):
    found = []
    for host in ("memory", f"disk:{folder_on_disk}"):
        torch.manual_seed(1)
        pipe = wrapped(host, **options)
        optimizer = optimizer_of(pipe)
        found.append((train(pipe, optimizer, 20, **how), all_of(pipe, optimizer)))
        pipe.close()
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_all_of_the_training_is_on_the_disk(folder_on_disk, kind):
    pipe = wrapped(f"disk:{folder_on_disk}", half=True)
    optimizer = optimizer_of(pipe, kind)
    train(pipe, optimizer, 2)
    run(pipe)
    held = [*pipe.parameters(), *pipe.optim_parameters(), *(p.grad for p in pipe.optim_parameters())]
    held += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.nbytes >= 4096]
    assert all(disk_of(tensor) is not None for tensor in held)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_has_the_bits_of_torch(folder_on_disk, norm_type):
    pipe = wrapped(f"disk:{folder_on_disk}")
    run(pipe)
    copies = [nn.Parameter(copy) for copy in copies_of(pipe.parameters())]
    for copy, parameter in zip(copies, pipe.parameters(), strict=True):
        copy.grad = parameter.grad.clone()
    for limit in (1e9, 0.01):
        expected = torch.nn.utils.clip_grad_norm_(copies, limit, norm_type)
        assert torch.equal(torch.nn.utils.clip_grad_norm_(pipe.parameters(), limit, norm_type), expected)
        assert same_bits([p.grad for p in pipe.parameters()], [copy.grad for copy in copies])
    next(pipe.parameters()).grad.fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0, error_if_nonfinite=True)


def test_a_run_that_fails_changes_nothing(folder_on_disk):
    def fails(outputs, labels):
        if labels[0, 0] == 8:
            raise ValueError("no loss")
        return loss_fn(outputs, labels)

    found = []
    for host in ("memory", f"disk:{folder_on_disk}"):
        pipe = wrapped(host, half=True)
        optimizer = optimizer_of(pipe)
        run(pipe)
        before = copies_of(p.grad for p in pipe.optim_parameters())
        with pytest.raises(ValueError, match="no loss"):
            run(pipe, fails)
        assert same_bits(before, [p.grad for p in pipe.optim_parameters()])
        train(pipe, optimizer, 2)
        found.append(all_of(pipe, optimizer))
        pipe.close()
    assert same_bits(*found)


def test_changed_parameters_are_what_trains(folder_on_disk):
    found = []
    for host in ("memory", f"disk:{folder_on_disk}"):
        pipe = wrapped(host, half=True, frozen=True)
        optimizer = optimizer_of(pipe)
        train(pipe, optimizer, 1)
        pipe.load_state_dict(model(half=True).state_dict())
        with torch.no_grad():
            pipe.model[6].weight.mul_(0.5)
        pipe.model[3].weight.data = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
        pipe.model[3].requires_grad_(True)
        optimizer.add_param_group({"params": pipe._rp_engine.store.targets(list(pipe.model[3].parameters()))})
        train(pipe, optimizer, 2, first=1)
        found.append(all_of(pipe, optimizer))
        if host != "memory":
            assert disk_of(pipe.model[3].weight) is not None
        pipe.close()
    assert same_bits(*found)


class OfAll(torch.optim.SGD):
    """Scales each update by the norm of all gradients, so that no part of the step has the bits of the whole."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / norm)


def test_what_a_disk_cannot_hold_is_refused(tmp_path, folder_on_disk):
    """An optimizer without parts, a copy of the state in memory, or sums of groups, which are in memory."""
    pipe = wrapped(f"disk:{folder_on_disk}")
    optimizer = OfAll(pipe.optim_parameters(), lr=0.1)
    run(pipe)
    before = copies_of(pipe.parameters())
    with pytest.raises(ConfigError, match=r'does not update one parameter after the other.*\n.*host="memory"'):
        pipe.step(optimizer.step)
    with pytest.raises(ConfigError, match="LBFGS was given a closure"):
        torch.optim.LBFGS(pipe.optim_parameters()).step(lambda: torch.zeros(()))
    with pytest.raises(ConfigError, match=r'is_async="exact"'):
        pipe.step(torch.optim.SGD(pipe.optim_parameters(), lr=0.1).step, is_async=True)
    with pytest.raises((ConfigError, CheckpointError), match=r"is_async=False"):
        save_checkpoint(tmp_path, pipe, is_async=True)
    assert same_bits(before, list(pipe.parameters()))
    mesh = object.__new__(DeviceMesh)  # it is not asked for anything
    for options in ({"mesh": mesh}, {"replicas": 2}):
        with pytest.raises(ConfigError, match="works only in one process, without mesh="):
            RoundPipe(model(), devices="virtual:1", host=f"disk:{folder_on_disk}", **options)


def test_nothing_changes_where_the_disk_is_full(folder_on_disk, monkeypatch):
    """The room is taken before a parameter is moved, and before a step changes anything."""

    def full(*_):
        raise OSError(28, "No space left on device")

    made = model()
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(ConfigError, match="too small for this training"):
            RoundPipe(made, devices="virtual:1", host=f"disk:{folder_on_disk}")
    assert all(disk_of(p) is None for p in made.parameters())
    pipe = wrapped(f"disk:{folder_on_disk}")
    optimizer = optimizer_of(pipe)
    run(pipe)
    before = copies_of(pipe.parameters())
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(ConfigError, match="too small for this training"):
            pipe.step(optimizer.step)
    assert not optimizer.state
    assert same_bits(before, list(pipe.parameters()))
    pipe.step(optimizer.step)


@pytest.mark.parametrize("way", [("memory", "disk"), ("disk", "memory"), ("disk", "disk")])
def test_checkpoints_go_from_either_place_to_either(tmp_path, folder_on_disk, way):
    hosts = {"memory": "memory", "disk": f"disk:{folder_on_disk}"}
    pipe = wrapped("memory", half=True)
    optimizer = optimizer_of(pipe)
    train(pipe, optimizer, 6)
    expected = all_of(pipe, optimizer)
    pipe.close()
    pipe = wrapped(hosts[way[0]], half=True)
    optimizer = optimizer_of(pipe)
    train(pipe, optimizer, 3)
    save_checkpoint(tmp_path / "checkpoints", pipe, optimizer=optimizer)
    pipe.close()
    pipe = wrapped(hosts[way[1]], half=True)
    optimizer = optimizer_of(pipe)
    load_checkpoint(tmp_path / "checkpoints", pipe, optimizer=optimizer)
    if way[1] == "disk":
        moments = [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].nbytes >= 4096]
        assert moments
        assert all(disk_of(moment) is not None for moment in moments)
    train(pipe, optimizer, 3, first=3)
    assert same_bits(all_of(pipe, optimizer), expected)


@pytest.mark.slow
def test_memory_grows_by_a_third_of_an_added_state_at_most(folder_on_disk):
    """Two sizes of a model: the memory of the libraries, the same for both, would hide a bound at one size."""

    def printed(host, layers):
        program = ("-m", "tests.runtime.pipeline.beyond_memory", folder_on_disk, host, layers)
        done = fresh_process.run(*program, timeout=600, imported=fresh_process.TRAINER)
        return json.loads(done.stdout.splitlines()[-1])

    disk, large_disk, memory = printed("disk", "16"), printed("disk", "32"), printed("memory", "16")
    assert disk.pop("losses") == memory.pop("losses")
    state, large_state = disk.pop("state"), large_disk.pop("state")
    grown = {what: large_disk[what] - bytes_ for what, bytes_ in disk.items()}
    assert max(grown.values()) <= 0.3 * (large_state - state), grown
    assert memory["step"] > 0.9 * state  # a training in memory breaks the bound
