"""Errors of cutting a model, and of batches that a cut cannot run."""

from __future__ import annotations

from yobx_flatten.errors.tried_versions import VersionDependentError, without_cause

from ..errors import ConfigError, LossError, RoundPipeError, RoundPipeWarning, SplitError

REPLACED_FORWARD = (
    ". Its forward was replaced by a function, which may call the model itself and not its copy. If batches take "
    "another path, wrap it with an example that does:\n    wrap_model_to_roundpipe(model, example=batch)"
)


class CutError(VersionDependentError, RoundPipeError, ValueError):
    """A model cannot be split into layers.

    Attributes:
        reason: ``"layers"`` (none found), ``"example"`` (the model does not run on the example), ``"copy"``,
            ``"structure"`` (a value between layers cannot pass between pieces), or ``"values"`` (the cut model computes
            something else).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[CutError], tuple[str, str]]:
        return type(self), (self.reason, without_cause(self))


class BatchStructureError(VersionDependentError, RoundPipeError, RuntimeError):
    """A batch takes another path through the model than the example that the model was split with."""


class MissingEmbeddingError(BatchStructureError):
    """A phase computes with an embedding that only phase 0 has."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model computes with {name} after its layers, which it did not do with the example that it was "
            "split with. Wrap it with an example like this batch:\n    wrap_model_to_roundpipe(model, example=batch)"
        )
        self.name = name

    def __reduce__(self) -> tuple[type[MissingEmbeddingError], tuple[str]]:
        return type(self), (self.name,)


class CutRefusedWarning(RoundPipeWarning):
    """A model runs in fewer pieces than it has layers."""


def changed_results(layer: str) -> str:
    """Return the message for a batch for which layers return tensors that they do not return for the example."""
    return (
        f"Layers before {layer} return tensors for this batch where they returned None with the example that the "
        "model was split with, or the reverse. Wrap it with an example like this batch:\n"
        "    wrap_model_to_roundpipe(model, example=batch)"
    )


def moved_away(device: str) -> ConfigError:
    """Return the error for moving the parameters of a pipeline."""
    return ConfigError(
        f"The parameters of a pipeline stay on the host, and to({device!r}) would move them. Leave it out, and "
        f"choose the devices of the layers here:\n    wrap_model_to_roundpipe(model, devices=[{device!r}])"
    )


def rows_are_mixed(title: str) -> SplitError:
    """Return the error for layers that mix the rows of a batch of which each process has only its own."""
    return SplitError(
        f"{title} computes different values for a whole batch than for its parts, and each process has its own rows "
        "only. Train in one process, where such a batch runs in one microbatch:\n    wrap_model_to_roundpipe(model)"
    )


def other_loss() -> LossError:
    """Return the error for a function of a model's loss, which has other weights, in one of several processes."""
    return LossError(
        "loss_fn was not found to return a multiple of the loss that the model computed, for labels among its "
        "arguments: it returns something else, or this process has one row only. Each process has its own rows, so it "
        "cannot be computed of all rows. Give labels to the loss function only, which is then checked by itself:\n"
        "    forward_backward(input_kwargs=without_labels, label=labels, loss_fn=loss_fn)"
    )
