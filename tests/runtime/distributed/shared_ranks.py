"""What processes see that share the weights of their machine: three of them, the last one as if on another machine."""

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_runtime import RoundPipe, load_checkpoint, save_checkpoint
from roundpipe_runtime.distributed.weights import shards, shared_store
from tests.runtime.distributed.faults import CONFIG, Training, batch, layers, raised_by, same
from tests.runtime.small import without_row_check

SHARED = {"host_weights": "shared"}
LATE = 0.4  # seconds


def in_ranks(folder: str) -> dict[str, Any]:
    """What one rank finds."""
    mesh, rank = dist.init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    shared_store.this_machine = lambda: str(rank // 2)  # of ranks 0 and 1, and of rank 2
    return {
        "memory": memory(mesh, rank),
        "late writer": late_writer(mesh, rank),
        "late reader": late_reader(mesh, rank),
        "resumed": resumed(mesh, rank, folder),
        "refused": refused(mesh, rank),
    }


def memory(mesh: DeviceMesh, rank: int) -> list[str]:
    """The file in which each parameter is, by the kernel."""
    training = Training(mesh.size(), rank, mesh, **SHARED)
    found = set()
    for parameter in training.model.parameters():
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, stop = (int(number, 16) for number in line.split()[0].split("-"))
            if start <= parameter.data_ptr() < stop:
                found.add(" ".join(line.split()[3:]))
    training.pipeline.close()
    return sorted(found)


def late_writer(mesh: DeviceMesh, rank: int) -> bool:
    """Whether a training has the bits of one process although a rank writes its rows late."""
    size = mesh.size()
    write = shards.Target.write
    one, ranks = Training(size), Training(size, rank, mesh, **SHARED)
    last = ranks.model[-1].linear.weight

    def late(self: Any, parameter: nn.Parameter) -> None:
        if rank == 1 and parameter is last:  # of which rank 0 hears by memory alone
            time.sleep(LATE)
        write(self, parameter)

    shards.Target.write = late  # type: ignore[method-assign] # of this process
    try:
        for training in (one, ranks):
            training.run(0)
            training.step()
            training.run(1)
            training.step()
        found = same(one.state(), ranks.state())
    finally:
        shards.Target.write = write  # type: ignore[method-assign] # as it was
    for training in (one, ranks):
        training.pipeline.close()
    return found


def late_reader(mesh: DeviceMesh, rank: int) -> bool:
    """Whether a forward of rank 0 reads the weights from before a step that all ranks do meanwhile."""
    training = Training(mesh.size(), rank, mesh, **SHARED)
    training.run(0)
    training.model.eval()
    expected = training.model(batch(1)[0]).detach()
    without_row_check(training.pipeline)  # which would be the first reader
    begun, outputs = threading.Event(), []
    table = training.pipeline._rp_engine.table
    start_read = table.start_read

    def late(*args: Any, **options: Any) -> None:
        if not begun.is_set():
            begun.set()
            time.sleep(LATE)
        start_read(*args, **options)

    def forward() -> None:
        with torch.no_grad():
            outputs.append(training.pipeline(batch(1)[0], roundpipe_run_config=CONFIG))

    reader = threading.Thread(target=forward)
    if rank == 0:
        table.start_read = late  # type: ignore[method-assign] # of this pipeline
        reader.start()
        begun.wait()
    training.step()
    if rank == 0:
        reader.join()
    training.pipeline.synchronize()
    after = training.model(batch(1)[0]).detach()
    training.pipeline.close()
    return all(torch.allclose(one, expected, atol=1e-6) for one in outputs) and not torch.allclose(after, expected)


def resumed(mesh: DeviceMesh, rank: int, folder: str) -> bool:
    """Whether a checkpoint brings weights and moments back, in place."""
    training = Training(mesh.size(), rank, mesh, **SHARED)
    states = []
    for seed in range(2):
        training.run(seed)
        training.step()
        states.append(training.state())
        if seed == 0:
            save_checkpoint(folder, training.pipeline, optimizer=training.optimizer)
    load_checkpoint(folder, training.pipeline, optimizer=training.optimizer)
    found = same(training.state(), states[0])
    training.run(1)
    training.step()
    found = found and same(training.state(), states[1])
    training.pipeline.close()
    return found


def refused(mesh: DeviceMesh, rank: int) -> dict[str, list[str]]:
    """A parameter that is replaced on one rank, and a mesh without shards."""
    training = Training(mesh.size(), rank, mesh, **SHARED)
    if rank == 1:
        training.model[0].linear.weight.data = training.model[0].linear.weight.data.clone()
    found = {"replaced": raised_by(lambda: training.run(0))}
    training.pipeline.close()
    whole = dist.init_device_mesh("cpu", (mesh.size(), 1))
    return {**found, "whole": raised_by(lambda: RoundPipe(layers(), mesh=whole, **SHARED))}  # type: ignore[arg-type]
