"""Errors between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import DistributedError


class StoppedByRankError(DistributedError):
    """Ends the work of this rank because another rank failed; it is replaced by the cause afterwards."""


class RankStepError(DistributedError):
    """The step of another rank failed, so this rank gives up its step."""


def format_failure(error: BaseException) -> str:
    """Return an exception in one text for the other ranks: class, message, and where it happened."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


def rank_failed(rank: int, failure: str) -> DistributedError:
    """Return the error to raise on this rank when another rank has failed."""
    return DistributedError(
        f"Rank {rank} failed, and no gradient, buffer or weight was changed on any rank. There:\n"
        + "\n".join(f"    {line}" for line in failure.splitlines())
    )


def raise_first(own: BaseException | None, said: Sequence[str | None]) -> None:
    """Raise the error of this rank, or else the first one of another rank."""
    # said: what `format_failure` returned on each rank; `None` for one that is well
    if own is not None:
        raise own
    for rank, failure in enumerate(said):
        if failure is not None:
            raise rank_failed(rank, failure)


def rank_failed_in_step(rank: int, failure: str) -> RankStepError:
    """Return the error of a rank whose step was given up, since that of another rank failed."""
    return RankStepError(
        f"The step function failed on rank {rank}, and other ranks may have stepped their rows: they do not hold one "
        "model any more. Load the newest checkpoint on all ranks. There:\n"
        + "\n".join(f"    {line}" for line in failure.splitlines())
    )


def ranks_gone(ranks: Sequence[int], cause: object, stopped: float = 0.0) -> DistributedError:
    """Return the error of a rank whose peers do not answer any more."""
    # stopped: for how many seconds they were stopped before
    who = f"Rank {', '.join(map(str, ranks))} is" if ranks else "A rank is"
    what = f"it was stopped (SIGSTOP) or silent for {stopped:.0f} s and given up" if stopped else "the process ended"
    return DistributedError(
        f"{who} gone: {what}, or its network did ({cause}). Nothing can be exchanged any more. Start again "
        "from the newest checkpoint; torchrun does so by itself:\n"
        "    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts=3 ... train.py\n"
        "Without the variable, restarted workers read the addresses of those that are gone from torchrun's store."
    )


def ranks_disagree(values: Sequence[Mapping[str, object]]) -> DistributedError | None:
    """Return the error for a rank whose values differ from those of rank 0; ``None`` if all agree."""
    for rank, stated in enumerate(values):
        for name in {**values[0], **stated}:
            first, other = values[0].get(name, "nothing"), stated.get(name, "nothing")
            if first != other:
                return DistributedError(
                    f"The ranks do not train the same: {name} is {other!r} on rank {rank}, and {first!r} on rank 0. "
                    "All ranks must make the same model, with the same options, and call it in the same way. Start "
                    "one script, which differs between ranks in its rows only:\n"
                    "    torchrun --nproc-per-node=2 train.py"
                )
    return None
