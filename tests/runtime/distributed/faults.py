"""What ranks do when one of them fails, differs or is gone; each function returns plain values to compare."""

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_runtime import GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, load_checkpoint
from roundpipe_runtime.distributed.ranks import alarm
from roundpipe_runtime.distributed.replicas.reduction import rows_of_rank
from tests.runtime import small
from tests.runtime.small import same_bits

CONFIG = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
ROWS = 12


class BadRowError(Exception):
    """An error of a user's layer."""


class Layer(nn.Module):
    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.norm = nn.BatchNorm1d(features)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise BadRowError("a bad row")
        return torch.tanh(self.norm(self.linear(x)))


def layers(count: int = 4, features: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(features) for _ in range(count)))


batch = functools.partial(small.batch, ROWS, inputs=8, labels=8)


class Training:
    """A pipeline with its optimizer, as one rank of a mesh, or as one process that runs all groups."""

    def __init__(self, size: int, rank: int = 0, mesh: DeviceMesh | None = None) -> None:
        self.model = layers()
        self.own = rows_of_rank(ROWS, rank, 1 if mesh is None else size, size)
        self.pipeline = RoundPipe(self.model, devices="virtual:2", name="x", mesh=mesh, replicas=size)
        with OptimizerCtx():
            self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=1e-2)

    @classmethod
    @contextlib.contextmanager
    def of(cls, mesh: DeviceMesh, rank: int) -> Iterator["Training"]:
        """A training of this rank, closed at the end."""
        made = cls(mesh.size(), rank, mesh)
        yield made
        made.pipeline.close()

    @classmethod
    @contextlib.contextmanager
    def both(cls, mesh: DeviceMesh, rank: int) -> Iterator[tuple["Training", "Training"]]:
        """A training of this rank, and one of all groups in one process."""
        one = cls(mesh.size())
        with cls.of(mesh, rank) as ranks:
            yield ranks, one
        one.pipeline.close()

    def run(self, seed: int, loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss) -> float:
        inputs, labels = batch(seed)
        loss: torch.Tensor = self.pipeline.forward_backward(
            (inputs[self.own],), label=labels[self.own], loss_fn=loss_fn, run_config=CONFIG
        )
        return loss.item()

    def step(self) -> None:
        self.pipeline.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()))

    def state(self) -> list[torch.Tensor]:
        self.pipeline.synchronize()
        return [value.clone() for value in self.model.state_dict().values()]

    def gradients(self) -> list[torch.Tensor | None]:
        found = [target.grad for target in self.pipeline.optim_parameters()]
        return [None if one is None else one.to_local().clone() for one in found]  # type: ignore[attr-defined] # DTensors


def raised_by(function: Callable[[], Any]) -> list[str]:
    try:
        function()
    except Exception as error:
        return [type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])]
    return []


def raised_in_time(function: Callable[[], Any]) -> dict[str, Any]:
    begin = time.monotonic()
    return {"error": raised_by(function), "seconds": time.monotonic() - begin}


def exception_on_one_rank(mesh: DeviceMesh, rank: int, where: str) -> dict[str, Any]:
    """An exception in a layer, in the loss or before the call, next to gradients of a call before it."""
    is_bad = rank == mesh.size() - 1

    def bad_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if is_bad:
            raise BadRowError("a bad loss")
        return nn.functional.mse_loss(outputs, labels)

    with Training.both(mesh, rank) as (ranks, one):
        for training in (ranks, one):
            training.run(0)
            training.step()
            training.run(1)  # its gradients are there when the next call fails
        before = ranks.gradients(), ranks.state()
        ranks.model[1].fails = is_bad and where == "layer"
        argument: Any = "no function" if is_bad else nn.functional.mse_loss
        loss_fn = {"layer": nn.functional.mse_loss, "loss": bad_loss, "argument": argument}[where]
        dist.barrier()
        found = raised_in_time(lambda: ranks.run(2, loss_fn))
        ranks.model[1].fails = False
        is_unchanged = same_bits(before[0], ranks.gradients()) and same_bits(before[1], ranks.state())
        for training in (ranks, one):
            for seed in (2, 3):
                training.run(seed)
                training.step()
        return {**found, "unchanged": is_unchanged, "goes on": same_bits(ranks.state(), one.state())}


def infinity_in_one_shard(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """A gradient that is infinite in the rows of rank 0: no rank steps, all halve the scale."""
    scaler = GradScaler(init_scale=4.0)
    with Training.of(mesh, rank) as training:
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        training.run(0, lambda outputs, labels: scaler.scale(nn.functional.mse_loss(outputs, labels)))
        if rank == 0:
            next(training.pipeline.optim_parameters()).grad.to_local()[0] = float("inf")  # type: ignore[union-attr] # it is there
        training.pipeline.step(lambda: (scaler.step(training.optimizer), training.optimizer.zero_grad()))
        scaler.update()
        training.pipeline.synchronize()
        return {"skipped": same_bits(before, list(training.model.parameters())), "scale": scaler.get_scale()}


def refused(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "Muon": lambda targets: torch.optim.Muon([t for t in targets if t.dim() == 2], lr=1e-3),
        "AdamW8bit": lambda targets: type("AdamW8bit", (torch.optim.AdamW,), {})(targets),
        "Adafactor": lambda targets: torch.optim.Adafactor(targets, lr=1e-3),
    }
    with Training.of(mesh, rank) as training:
        training.run(0)
        before = training.state()
        for name, make in makers.items():
            optimizer = make(list(training.pipeline.optim_parameters()))
            found[name] = raised_by(lambda made=optimizer: training.pipeline.step(made.step))
        whole = torch.optim.SGD(training.model.parameters(), lr=1.0)
        found["whole parameters"] = raised_by(lambda: training.pipeline.step(whole.step))
        found["unchanged"] = same_bits(before, training.state())
    found["another model"] = raised_by(lambda: RoundPipe(layers(features=8 + (rank == 1)), mesh=mesh))
    config = RoundPipeRunConfig(num_microbatch=1 + (rank == 1), loss_reduction="mean")
    with Training.of(mesh, rank) as training:
        inputs, labels = batch(0)
        found["another call"] = raised_by(
            lambda: training.pipeline.forward_backward(
                (inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config
            )
        )
        found["another backward"] = raised_by(
            lambda: training.pipeline(inputs).sum().backward() if rank == 1 else training.run(0)
        )
        training.run(0)
    return found


def evaluated_alone(mesh: DeviceMesh, rank: int) -> bool:
    """Forwards of rank 0 only, with and without gradients, between steps of all ranks."""
    with Training.of(mesh, rank) as training:
        training.run(0)
        if rank == 0:
            training.pipeline(batch(1)[0])
            with torch.no_grad():
                training.pipeline(batch(1)[0])
        training.run(1)
    return True


def backward_without_rows(mesh: DeviceMesh, rank: int) -> bool:
    """Rank 0 has one row and the others none: the sum of all ranks is the gradient of that row."""
    inputs, plain = batch(0)[0][:1], layers().eval()
    plain(inputs).square().sum().backward()
    with Training.of(mesh, rank) as training:
        training.model.eval()
        training.pipeline(inputs if rank == 0 else inputs[:0]).square().sum().backward()
        return all(
            torch.allclose(one.grad.full_tensor(), other.grad, atol=1e-6)  # type: ignore[union-attr,attr-defined,arg-type] # DTensors
            for one, other in zip(training.pipeline.optim_parameters(), plain.parameters(), strict=True)
        )


def weights_of_rank_0(mesh: DeviceMesh, rank: int) -> bool:
    """Ranks that begin with other weights train those of rank 0."""
    expected = layers().state_dict()
    model = layers()
    if rank:
        nn.init.ones_(model[2].linear.weight)
    pipeline = RoundPipe(model, devices="virtual:1", mesh=mesh)
    found = all(torch.equal(value, model.state_dict()[name]) for name, value in expected.items())
    pipeline.close()
    return found


def exception_in_a_step(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """A step function that fails on one rank, while the others wait for it in the middle of theirs; then a good one."""
    with Training.of(mesh, rank) as training:
        training.run(0)

        def step() -> None:
            if rank == mesh.size() - 1:
                raise BadRowError("a bad step")
            training.pipeline.clip_grad_norm_(1.0)
            training.optimizer.step()

        found = raised_in_time(lambda: training.pipeline.step(step))
        training.pipeline.step(lambda: training.pipeline.clip_grad_norm_(1.0))
    return found


def steps_without_the_pipeline(mesh: DeviceMesh, rank: int) -> bool:
    """An optimizer that the caller steps, as loops of other libraries do."""
    with Training.both(mesh, rank) as (ranks, one):
        for training in (ranks, one):
            for seed in range(3):
                training.run(seed)
                training.optimizer.step()
                training.optimizer.zero_grad()
        return same_bits(ranks.state(), one.state())


def in_ranks() -> dict[str, Any]:
    """What one rank finds, without trainings: last, what leaves not all ranks alive."""
    mesh, rank = whole_mesh(), dist.get_rank()
    return {
        **{f"fault: {where}": exception_on_one_rank(mesh, rank, where) for where in ("layer", "loss", "argument")},
        "infinity": infinity_in_one_shard(mesh, rank),
        "step": exception_in_a_step(mesh, rank),
        "refused": refused(mesh, rank),
        "evaluated alone": evaluated_alone(mesh, rank),
        "backward without rows": backward_without_rows(mesh, rank),
        "weights of rank 0": weights_of_rank_0(mesh, rank),
        "steps without the pipeline": steps_without_the_pipeline(mesh, rank),
        "cut off": cut_off(mesh, rank),
    }


def cut_off(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """The last rank loses its network in the middle of a call, as when its process ends; the others report it."""
    training = Training(mesh.size(), rank, mesh)
    training.run(0)
    training.step()
    training.state()
    ranks: Any = training.pipeline.ranks

    def leave(*_: object) -> None:
        ranks.alarm.close()
        for channel in list(ranks._groups):
            ranks._close(channel)

    if rank == mesh.size() - 1:
        training.model[1].register_forward_hook(leave)
    return raised_in_time(lambda: training.run(1))


def write_own(found: Any) -> None:
    """Write what this rank returns, which ends before it could."""
    Path(sys.argv[3], f"{dist.get_rank()}.json").write_text(json.dumps(found))


def whole_mesh() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def killed() -> None:
    """The last rank ends in the middle of a call without a word, while the others compute for seconds."""
    rank, size, ended = dist.get_rank(), dist.get_world_size(), Path(sys.argv[3], "ended")
    training = Training(size, rank, whole_mesh())
    training.run(0)

    def work(*_: object) -> None:
        if rank == size - 1:
            write_own(None)
            ended.write_text(str(time.monotonic()))
            os._exit(0)
        time.sleep(0.3)

    for layer in training.model:
        layer.register_forward_hook(work)
    error = raised_by(lambda: training.run(1))
    write_own([error, time.monotonic() - float(ended.read_text())])
    os._exit(0)


def stopped(patience: float, is_alone: bool, stopped_rank: int) -> None:
    """A rank is stopped in the middle of a call, and keeps its connections, while the others wait for it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alarm.Alarm.patience = patience
    if is_alone:
        alarm.this_machine = lambda: str(rank == stopped_rank)
    training = Training(size, rank, whole_mesh())
    training.run(0)

    def stop(*_: object) -> None:
        write_own(None)
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == stopped_rank:
        training.model[1].register_forward_hook(stop)
    write_own(list(raised_in_time(lambda: training.run(1)).values()))
    if is_alone:  # the test ends what the others cannot
        parent = os.getppid()
        Path(sys.argv[3], f"{rank}.done").touch()
        if len(list(Path(sys.argv[3]).glob("*.done"))) == size - 1:
            for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                if int(child) != os.getpid():
                    with contextlib.suppress(ProcessLookupError):  # a rank that has ended by itself meanwhile
                        os.kill(int(child), signal.SIGKILL)
    os._exit(0)


def gone_early(where: str, folder: str) -> None:
    """Rank 1 ends before it makes its pipeline, or before it loads; the others would connect to it then."""
    rank, mesh = dist.get_rank(), whole_mesh()

    def work() -> None:
        if rank == 1 and where == "make":
            return
        pipeline = RoundPipe(layers(1), devices="virtual:1", mesh=mesh)
        if rank == 0:
            load_checkpoint(folder, pipeline)

    write_own(list(raised_in_time(work).values()))
    os._exit(0)  # without a word to the others
