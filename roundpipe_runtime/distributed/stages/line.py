"""Send data between stages in several processes, and wake waiting stages when one fails.

A stage waits for the tensors of the stage before it, which never come from a process that has failed. So that process
states its error in the store of the job and closes its connections; the others find theirs closed, read the error, and
close theirs. The next call opens new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist

from yobx_flatten.private_names.of_torch import default_store

from ...errors import DistributedError
from ..ranks.alarm import Alarm
from ..ranks.errors import format_failure, ranks_gone
from ..ranks.ranks import job_timeout


class StageLine:
    """The group of a pipeline's stages, in one process; all of them make it."""

    # group: group of the processes. Default: all of them.
    # is_open: whether messages can be sent; after a failure, `open` must be called

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._size = dist.get_world_size(group)
        self._members = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        self._backend = dist.get_backend(group)
        self.group, self.is_open = group, False
        self.open()

    def open(self) -> None:
        """Open connections of the stages; all processes call it."""
        self.is_open = True
        rank, store = dist.get_rank(), None
        prefix = ""
        if self._size > 1:
            is_part = self._size < dist.get_world_size()
            self.group = dist.new_group(
                self._members, timeout=job_timeout(), backend=self._backend, use_local_synchronization=is_part
            )
            store, prefix = default_store(), self.group.group_name
        self._alarm = Alarm(store, self._members.index(rank), self._size, prefix=prefix)

    @contextlib.contextmanager
    def watched(self, forget: Callable[[], None]) -> Iterator[None]:
        """Run a call of all processes."""
        # forget: function that drops what holds the group, when a process has failed
        try:
            yield
        except BaseException as error:  # another one takes its place where another process failed first
            if self._size == 1:
                raise
            self.is_open = False
            found = self._error_of_others(error)
            if found is None:
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._alarm.notify_step_failed(format_failure(error))
            forget()
            self._close(error)
            if found is None:
                raise
            raise found from None

    def _error_of_others(self, error: BaseException) -> DistributedError | None:
        """The error to raise if another process has failed; ``None`` if this one has."""
        if not _is_network(error):
            return None
        if (failure := self._alarm.take_step_failure()) is not None:
            rank, text = failure
            return DistributedError(
                f"Rank {rank} failed, and gradients of this batch may be there in part: clear them before the next. "
                "There:\n" + "\n".join(f"    {line}" for line in text.splitlines())
            )
        return ranks_gone(self._alarm.find_gone(), error)

    def _close(self, error: BaseException) -> None:
        """Close the connections, which ends the waits of the other processes."""
        self._alarm.close()
        _release_frames(error)
        group, self.group = self.group, None
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


def _release_frames(error: BaseException | None) -> None:
    """Clear what torch's schedule has in its frames: messages under way, which keep connections open."""
    seen: set[int] = set()  # an error whose cause was raised in its place is in a circle with it
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback = error.__traceback__
        while traceback is not None:
            if str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
                with contextlib.suppress(RuntimeError):  # of a frame that still runs
                    traceback.tb_frame.clear()
            traceback = traceback.tb_next
        error = error.__cause__ or error.__context__


def _is_network(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
