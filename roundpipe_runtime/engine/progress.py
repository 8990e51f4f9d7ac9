"""The training state of a pipeline that its state dict does not hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class PipelineProgress:
    """How far a pipeline has come, in addition to its parameters and buffers.

    Attributes:
        runs: Number of completed runs, from which the seeds of random layers follow.
        masters: Master weights: copies of parameters in the dtype of the optimizer, by the name of the parameter.
            Default: none.
        gradients: Gradients of an optimizer step that is still to come, by the name of the parameter. Default: none.
        replicas: Number of groups that batches were cut into. Default: not known.
    """

    runs: int
    masters: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    replicas: int | None = None
