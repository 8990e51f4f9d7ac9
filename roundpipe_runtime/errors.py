"""Exceptions and warnings of ``roundpipe_runtime``."""

from __future__ import annotations

import os
import sys
import textwrap
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from yobx_flatten.errors import VersionDependentError, without_cause

if TYPE_CHECKING:
    from torch import nn


class RoundPipeError(Exception):
    """Base class of the errors of ``roundpipe_runtime``."""


class ConfigError(RoundPipeError, ValueError):
    """A field of ``RoundPipeRunConfig``, or a function argument, has an invalid value."""


class SplitError(RoundPipeError, ValueError):
    """Inputs or labels cannot be split into microbatches, or it is unclear along which axis."""


class UnregisteredObjectError(SplitError, TypeError):
    """An object holds tensors, but no flattening function is registered for its class."""


class JoinError(RoundPipeError, ValueError):
    """The outputs of the microbatches cannot be joined."""


class LossError(RoundPipeError, ValueError):
    """A loss function returned something that is not a loss."""


class PlanError(RoundPipeError, ValueError):
    """An execution plan omits, repeats or reorders a layer."""


class DeviceError(RoundPipeError, RuntimeError):
    """A device does not exist, is closed, or does not support an operation."""


class UseAfterReleaseError(DeviceError):
    """A tensor was read before it was written, after its memory was released, or by a device that does not hold it."""


class DeviceMemoryError(DeviceError, MemoryError):
    """A device is out of memory."""


class DistributedError(RoundPipeError, RuntimeError):
    """Ranks made different calls, or a rank failed or ended; all ranks discard the results of the current call."""


class StageError(RoundPipeError, RuntimeError):
    """A forward, backward or optimizer step failed. Exceptions of layers and loss functions are raised unchanged."""


class RoundPipeWarning(UserWarning):
    """Base class of the warnings of ``roundpipe_runtime``."""


class UnevenSplitWarning(RoundPipeWarning):
    """Microbatches have different sizes, so the average of their mean losses is not the mean loss of the batch."""


_INSIDE = ("roundpipe_runtime", "torch", "contextlib")


def warn(message: str, category: type[Warning]) -> None:
    """Emit a warning at the innermost line of the call stack that is outside ``roundpipe_runtime`` and torch."""
    warnings.warn(message, category, stacklevel=_of_caller()[0])


def call_site() -> str:
    """Return ``"file:line"`` of the innermost line of the call stack outside ``roundpipe_runtime`` and torch."""
    frame = _of_caller()[1]
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _of_caller() -> tuple[int, types.FrameType]:
    """Return the stack frame of the user's code, and the ``stacklevel`` of this frame for ``warnings.warn``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    return level, frame


class CheckpointError(RoundPipeError, ValueError):
    """A training state cannot be stored, or a checkpoint does not fit the objects into which it is loaded."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete, or its files differ from the files that were written."""


class CheckpointWarning(RoundPipeWarning):
    """A damaged checkpoint was skipped, or a part of a checkpoint was not loaded."""


class StoppedByRankError(DistributedError):
    """Another rank failed, so this rank stops its call. The caller gets the error of the other rank instead."""


class RankStepError(DistributedError):
    """The optimizer step of another rank failed, so this rank stops its own step."""


def format_failure(error: BaseException) -> str:
    """Return the class, message and notes of an exception as one text, which is sent to the other ranks."""
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    return "\n".join([f"{type(error).__name__}: {error}", *notes])


def raise_first(own: BaseException | None, failures: Sequence[str | None]) -> None:
    """Raise the error of this rank if it failed, otherwise the error of the first rank that failed."""
    # failures: the result of `format_failure` on each rank; `None` for a rank without an error
    if own is not None:
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise DistributedError(
                f"Rank {rank} failed, and no gradient, buffer or weight was changed on any rank. Its error:\n"
                + textwrap.indent(failure, "    ")
            )


def rank_failed_in_step(rank: int, failure: str) -> RankStepError:
    return RankStepError(
        f"The step function failed on rank {rank}, and other ranks may have updated their parameters, so the models "
        "may differ. Load the newest checkpoint on all ranks. Its error:\n" + textwrap.indent(failure, "    ")
    )


def ranks_gone(ranks: Sequence[int], cause: object, stopped: float = 0.0) -> DistributedError:
    # stopped: seconds that the other ranks did not answer; 0 if their processes have ended
    who = f"Rank {', '.join(map(str, ranks))} is" if ranks else "A rank is"
    what = f"was stopped (SIGSTOP) or did not answer for {stopped:.0f} s" if stopped else "ended"
    return DistributedError(
        f"{who} gone: its process {what}, or its network failed ({cause}). The other ranks cannot continue. Start "
        "again from the newest checkpoint; torchrun does so automatically:\n"
        "    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts=3 ... train.py\n"
        "Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE, restarted workers read outdated addresses from torchrun's store."
    )


def ranks_disagree(values: Sequence[Mapping[str, object]]) -> DistributedError | None:
    for rank, stated in enumerate(values):
        for name in {**values[0], **stated}:
            first, other = values[0].get(name, "nothing"), stated.get(name, "nothing")
            if first != other:
                return DistributedError(
                    f"The ranks differ: {name} is {other!r} on rank {rank}, and {first!r} on rank 0. All ranks must "
                    "make the same model, with the same options, and call the model in the same way. Start the same "
                    "script on all ranks; only the rows of the batch may differ:\n"
                    "    torchrun --nproc-per-node=2 train.py"
                )
    return None


REPLACED_FORWARD = (
    ". Its forward was replaced by a function, which may call the original model, not the split copy. If this batch "
    "takes another path, wrap the model with this batch:\n    wrap_model_to_roundpipe(model, example=batch)"
)


WRAP_WITH_BATCH = "Wrap the model with an example like this batch:\n    wrap_model_to_roundpipe(model, example=batch)"


class CutError(VersionDependentError, RoundPipeError, ValueError):
    """A model cannot be split into layers.

    Attributes:
        reason: ``"layers"`` (no layers found), ``"example"`` (the model fails on the example batch), ``"copy"`` (the
            model cannot be copied), ``"structure"`` (a value cannot be passed from layer to layer), or ``"values"``
            (the split model computes other values).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[CutError], tuple[str, str]]:
        return type(self), (self.reason, without_cause(self))


class BatchStructureError(VersionDependentError, RoundPipeError, RuntimeError):
    """A batch runs other parts of the model's code than the example batch with which the model was split."""


class MissingEmbeddingError(BatchStructureError):
    """Code between or after the layers of a model reads an embedding that it did not read for the example batch."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"After its layers, the model uses {name}, which it did not use with the example that it was split with. "
            f"{WRAP_WITH_BATCH}"
        )
        self.name = name

    def __reduce__(self) -> tuple[type[MissingEmbeddingError], tuple[str]]:
        return type(self), (self.name,)


class CutRefusedWarning(RoundPipeWarning):
    """A model could not be split into layers, so it runs unsplit."""


def changed_results(layer: str) -> str:
    return (
        f"Layers before {layer} return tensors for this batch where they returned None with the example that the "
        f"model was split with, or the reverse. {WRAP_WITH_BATCH}"
    )


KEEPS_STATE = (
    "The outputs of a layer depend on an attribute or a buffer that its earlier calls changed. Each microbatch is a "
    "call, so results depend on the number of microbatches. For one call per batch:\n"
    "    RoundPipeRunConfig(num_microbatch=1)"
)


def mixes_rows_forward(layer: nn.Module, number: int) -> SplitError:
    kind = type(layer).__name__
    inner = next((type(m).__name__ for m in layer.modules() if getattr(m, "batch_first", None) is False), None)
    cause = "" if inner is None else f" ({inner} with batch_first=False)"
    return SplitError(
        f"The batch is split along axis 0, and layer {number} ({kind}) mixes rows{cause}: one call with some rows "
        "returns different values than two calls with a part of these rows each. Results would depend on the split. If "
        "the rows are on another axis, name it; otherwise run the batch as one microbatch:\n"
        '    RoundPipeRunConfig(split_input={"args[0]": TensorChunkSpec(1)}, merge_output=TensorChunkSpec(1))\n'
        "    RoundPipeRunConfig(num_microbatch=1)"
    )


def mixes_rows_backward(layer: nn.Module, number: int) -> SplitError:
    return SplitError(
        f"The batch is split along axis 0, but the backward of layer {number} ({type(layer).__name__}) or of a later "
        "layer mixes rows: the gradients of two parts of the rows do not add up to the gradient of all rows. Results "
        "would depend on the split. Causes are scale_grad_by_freq=True, a division by the number of rows, or detach() "
        "of some rows. Run the batch as one microbatch:\n"
        "    RoundPipeRunConfig(num_microbatch=1)"
    )


class FineTuneError(RoundPipeError, ValueError):
    """A model, text, tokenizer or folder cannot be used for fine-tuning, or a fine-tuning cannot continue."""
