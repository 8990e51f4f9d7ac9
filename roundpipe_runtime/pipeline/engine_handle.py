"""What a pipeline has: its engine, devices, processes and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..device.protocol import Device
from ..engine.driver import Engine
from ..engine.parameters.kept import ParameterTraffic
from ..schedule.costs import LayerCost
from .model_proxy import ModelProxy
from .options import PipelineOptions

if TYPE_CHECKING:
    from ..distributed.ranks.ranks import Ranks
    from ..distributed.replicas.rank_groups import RankGroups


class EngineHandle(ModelProxy):
    """A model with the engine that runs it."""

    _rp_engine: Engine
    _rp_groups: RankGroups | None = None
    _rp_options: PipelineOptions

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self._rp_options.title

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        return self._rp_model

    @property
    def devices(self) -> list[Device]:
        """The devices, which other pipelines may share: ``RoundPipe(other, devices=model.devices)``."""
        return list(self._rp_engine.devices)

    @property
    def host(self) -> str:
        """The place of all that the host has of the training: ``"memory"``, or ``"disk:DIR"``."""
        return self._rp_options.host

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the processes that train the model; ``None`` for one process alone."""
        return self._rp_options.mesh

    @property
    def replicas(self) -> int:
        """The number of groups that a batch is cut into, whatever the number of ranks."""
        return self._rp_engine.groups.replicas

    @property
    def ranks(self) -> Ranks:
        """The processes that train the model; this one alone without a mesh."""
        from ..distributed.ranks.ranks import Ranks

        return Ranks() if self._rp_groups is None else self._rp_groups.ranks

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self._rp_engine.devices)

    @property
    def model_memory_limit(self) -> float | None:
        """Memory limit in GB for parameters and gradients on the smallest device, where it is known."""
        return self._rp_engine.planner.memory_limit()

    def layer_costs(self) -> list[LayerCost]:
        """Return the cost of each layer: estimated at first, measured once the pipeline has run."""
        return self._rp_engine.planner.layer_costs()

    @property
    def parameter_traffic(self) -> ParameterTraffic:
        """Bytes of parameters that were copied to devices since the pipeline was made, and what stays there now."""
        return self._rp_engine.kept.traffic

    def drop_kept_parameters(self) -> None:
        """Release the copies of parameters that stay on devices (``keep_parameters`` of :class:`RoundPipeRunConfig`).

        The next run uploads them again. This is for writes that torch does not count: by ``parameter.data``, or by
        another library through the address.
        """
        with self._rp_engine.lock:
            self._rp_engine.kept.drop()

    def set_original_model(self, original_model: nn.Module) -> None:
        """Read, write and delete attributes on this model, from which the wrapped one was made."""
        self._rp_original = original_model

    def close(self) -> None:
        """Wait for a background step and end the threads; the pipeline cannot run afterwards."""
        self._rp_engine.close()

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self.devices)
        return f"RoundPipe on {devices}:\n{self._rp_model!r}"
