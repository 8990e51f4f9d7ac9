"""The processes of one training (a single one, or several started by torchrun), and the signals that end a training."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from yobx_flatten import FlattenError
from yobx_flatten.core.private_names.of_torch import default_store
from yobx_flatten.errors.failures import result_or

from ..checkpoint.shards import CheckpointRanks
from ..distributed.ranks.torchrun import join_job
from ..errors import DistributedError, FineTuneError, RoundPipeError, format_failure, ranks_disagree

T = TypeVar("T")


class Job:
    """The processes of one training; creating a ``Job`` joins the process group of torchrun.

    Attributes:
        rank: rank of this process.
        size: number of processes.
    """

    def __init__(self) -> None:
        self._is_made_here = join_job()
        count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._ranks = CheckpointRanks(tuple(range(count)))
        self.rank, self.size = self._ranks.rank, self._ranks.size

    @property
    def is_first(self) -> bool:
        """Whether this process is the first process, which prints and writes files."""
        return self.rank == 0

    def mesh(self) -> DeviceMesh | None:
        """Return the mesh of the processes; ``None`` for a single process."""
        return init_device_mesh("cpu", (self.size,)) if self.size > 1 else None

    def was_restarted(self) -> bool:
        """Report whether torchrun has restarted the processes; every process must call this method."""
        # each machine counts only the restarts of its own processes
        return any(self.exchange(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))

    def exchange(self, value: T) -> list[T]:
        """Return the values of all processes, in rank order (all-gather).

        Args:
            value: object of this process, which all processes get.
        """
        return self._ranks.exchange(value)

    def together(self, work: Callable[[], T]) -> T:
        """Call ``work`` and return its result; if ``work`` fails in one process, raise an error in all processes.

        Args:
            work: function that each process calls. The function must not make collective calls.

        Raises:
            FineTuneError: one of the processes failed with an error of these packages or an ``OSError``.
            DistributedError: one of the processes failed with an error of another library.
            Exception: all processes failed with the same error.
        """
        if self.size == 1:
            return work()
        failures: list[Exception] = []
        result = result_or(work, failures.append)
        failure = failures[0] if failures else None
        is_request = isinstance(failure, (FlattenError, RoundPipeError, OSError))
        text = str(failure) if is_request or failure is None else format_failure(failure)
        said = self.exchange(None if failure is None else (is_request, text))
        if failure is not None and all(one == said[0] for one in said):
            raise failure
        for rank, described in enumerate(said):
            if described is not None:
                raise _raised_on(rank, *described) from failure
        return cast(T, result)

    def claim(self, what: str) -> bool:
        """Return whether this process is the first to call ``claim`` for a task, without waiting for other processes.

        Args:
            what: name of the task, equal in all processes.
        """
        if self.size == 1:
            return True
        try:
            count: int = default_store().add(f"roundpipe/{what}", 1)
        except RuntimeError:  # the process that held the store has ended
            return True
        return count == 1

    def check_alike(self, stated: Mapping[str, object]) -> None:
        """Check that ``stated`` is equal in all processes; every process must call this method.

        Args:
            stated: settings and other values of this process, by name.

        Raises:
            DistributedError: a value differs between processes.
        """
        if error := ranks_disagree(self.exchange(stated)):
            raise error

    def close(self) -> None:
        """Leave the process group, if this object has joined it."""
        if self._is_made_here and dist.is_initialized():
            self._is_made_here = False
            dist.destroy_process_group()


def named_error(rank: int, error: Exception) -> Exception:
    """Return an error that names the rank of this process; an error of this package is returned unchanged.

    Args:
        rank: rank of this process.
        error: error that ended the training.

    Returns:
        The error.
    """
    return error if isinstance(error, RoundPipeError) else _raised_on(rank, False, format_failure(error))


def _raised_on(rank: int, is_request: bool, text: str) -> RoundPipeError:
    if is_request:
        return FineTuneError(f"Rank {rank}: {text}" if rank else text)  # rank 0 often works for all ranks
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return DistributedError(f"Rank {rank} failed. Its error:\n{lines}")


class Interruption:
    """A context manager in which the first Ctrl-C or SIGTERM is recorded instead of ending the process.

    ::

        with Interruption() as interruption:
            while not interruption.status:
                step()

    Only the main thread receives signals, so the context manager has no effect in other threads.
    """

    # is_silent: whether a first signal is recorded without a message, in one of several processes

    def __init__(self, *, is_silent: bool = False) -> None:
        self.status = 0
        self.is_silent = is_silent
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.status:  # end at once, without waiting for threads; readers ignore incomplete files
            os.write(2, b"\nleft at once; nothing more was saved\n")
            os._exit(128 + number)
        if not self.is_silent:
            os.write(2, b"\nstopping after this step; press Ctrl-C again to quit now\n")
        self.status = 128 + number
