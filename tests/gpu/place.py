"""Where the tests for devices run: the first accelerator, or with ``GPU_TESTS_DEVICE=cpu`` a virtual device."""

import copy
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from roundpipe_runtime import Device, RoundPipe, RoundPipeRunConfig, parse_devices
from roundpipe_runtime.device.accelerator import DeviceSpec
from tests.runtime.small import allocated

__all__ = ["MODES", "Mode", "Place", "Plain", "on_a_device"]

Mode = Literal[False, True, "exact"]
MODES: list[Mode] = [False, "exact", True]

_ON_CPU = os.environ.get("GPU_TESTS_DEVICE", "") == "cpu"

on_a_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.accelerator.is_available() and not _ON_CPU,
        reason="there is no accelerator: GPU_TESTS_DEVICE=cpu runs it on a virtual device",
    ),
]


@dataclasses.dataclass
class Place:
    """A device, as the pipeline takes it and as the plain model does."""

    devices: DeviceSpec
    torch_device: torch.device

    @classmethod
    def here(cls) -> "Place":
        if _ON_CPU:
            return cls("virtual:1", torch.device("cpu"))
        found = torch.accelerator.current_accelerator()
        assert found is not None
        device = torch.device(found.type, 0)
        return cls([device], device)

    @functools.cached_property
    def device(self) -> Device:
        return parse_devices(self.devices)[0]

    def needs_accelerator(self, what: str) -> None:
        if self.torch_device.type == "cpu":
            pytest.skip(f"a virtual device has no {what}")

    def needs_cuda(self, what: str) -> None:
        if self.torch_device.type != "cuda":
            pytest.skip(f"{what} needs CUDA")

    def moved(self, model: nn.Module) -> nn.Module:
        there = copy.deepcopy(model)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return there.to(self.torch_device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def wrap(self, model: nn.Module, **options: Any) -> RoundPipe:
        """A pipeline on the device; two microbatches whose losses are means, unless a configuration is given."""
        config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
        return RoundPipe(model, **{"devices": self.devices, "model_run_config": config, **options})

    def allocated(self, pipe: RoundPipe) -> int:
        gc.collect()
        return allocated(pipe.devices[0])


class Plain:
    """The model on the device, microbatch by microbatch, with the optimizer on the host: what a pipeline must give.

    The optimizer of a device may round otherwise than that of the host, which a pipeline uses.
    """

    def __init__(self, model: nn.Module, place: Place, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = copy.deepcopy(model)
        self._there = place.moved(model)
        self._optimizer = optimizer(self.model.parameters())
        self._read = self._weights()

    def step(
        self, parts: Sequence[Any], loss_of: Callable[[nn.Module, Any], torch.Tensor], mode: Mode
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and gradients of a step; in an asynchronous one, those of the weights before the step that runs."""
        now = self._weights()
        with torch.no_grad():
            for weight, source in zip(self._there.parameters(), self._read if mode is True else now, strict=True):
                weight.copy_(source)
        self._read = now
        total = 0.0
        for part in parts:
            loss = loss_of(self._there, part) / len(parts)
            loss.backward()
            total = total + loss.detach()
        for weight, source in zip(self.model.parameters(), self._there.parameters(), strict=True):
            weight.grad = None if source.grad is None else source.grad.cpu()
            source.grad = None
        gradients = {name: weight.grad.clone() for name, weight in self.model.named_parameters()}
        self._optimizer.step()
        return total.cpu(), gradients

    def _weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.model.parameters()]
