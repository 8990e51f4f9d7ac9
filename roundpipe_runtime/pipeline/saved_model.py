"""Save and load a pipeline: its state dict, and the progress that a state dict does not hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..engine.progress import PipelineProgress
from ..errors import RoundPipeWarning, warn
from .engine_handle import EngineHandle


class SavedModel(EngineHandle):
    """A pipeline whose state is saved and loaded."""

    def progress(self) -> PipelineProgress:
        """Return the training state that the state dict does not hold, after the last step.

        Returns:
            The number of runs, the optimizer's copies of parameters, gradients, and the number of groups; the tensors
            are not copied.
        """
        return dataclasses.replace(self._rp_engine.progress(), replicas=self.replicas)

    def load_progress(self, progress: PipelineProgress) -> None:
        """Load what :meth:`progress` returned, after the parameters; gradients that are there now are forgotten.

        Args:
            progress: progress of a pipeline whose parameters have the same names. Copies of the optimizer are left
                out where this pipeline has none. The number of groups is kept, unless this pipeline was given one.
        """
        self._rp_engine.load_progress(progress)
        self._rp_keep_replicas(progress.replicas or 1)

    def _rp_keep_replicas(self, replicas: int) -> None:
        """Cut batches into as many groups as before, for the same sums on another number of ranks."""
        if replicas == self.replicas or replicas == 1:
            return
        if self._rp_options.replicas is None and self.mesh is not None and replicas >= self.ranks.size:
            self._rp_engine.groups.replicas = replicas
            return
        warn(
            f"The training that is loaded cut its batches into {replicas} groups, and {self.name} cuts them into "
            f"{self.replicas}: sums are taken in another order. For the same numbers:\n"
            f"    RoundPipe(..., replicas={replicas})",
            RoundPipeWarning,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, with its own names, after the last step.

        Args:
            *args: positional arguments of the model's ``state_dict``.
            **kwargs: keyword arguments of the model's ``state_dict``.

        Returns:
            The state dict.
        """
        self._rp_engine.synchronize()
        return self._rp_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict into the model; the optimizer's copies are updated.

        Args:
            state_dict: parameters and buffers by name.
            strict: whether the names must be exactly those of the model.
            assign: whether the tensors replace the parameters instead of being copied into them.

        Returns:
            The missing and the unexpected keys, as ``nn.Module.load_state_dict`` returns them.

        Raises:
            RuntimeError: names or shapes do not fit.
        """
        self._rp_engine.synchronize()
        result = self._rp_model.load_state_dict(state_dict, strict, assign)
        self._rp_engine.store.publish()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # torch calls this in place of `load_state_dict` where another module holds the pipeline. A step that ended
        # later would overwrite what is loaded.
        self._rp_engine.synchronize()
        super()._load_from_state_dict(*args, **kwargs)
