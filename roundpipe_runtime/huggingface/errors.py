"""Why a model could not be cut, or a batch not be run by a cut that was made of another one."""

from __future__ import annotations

from ..errors import RoundPipeError, RoundPipeWarning

__all__ = ["BatchStructureError", "CutError", "CutRefusedWarning"]


class CutError(RoundPipeError, ValueError):
    """A model cannot be cut into layers.

    Attributes:
        reason: one of ``"layers"`` (none found), ``"example"`` (the model does not run on the example), ``"copy"``,
            ``"structure"`` (what passes between layers cannot travel), ``"values"`` (the cut model computes something
            else).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[CutError], tuple[str, str]]:
        return type(self), (self.reason, str(self))


class BatchStructureError(RoundPipeError, RuntimeError):
    """A batch takes another way through the model than the example that it was cut with."""


class CutRefusedWarning(RoundPipeWarning):
    """A model runs in fewer pieces than it has layers."""
