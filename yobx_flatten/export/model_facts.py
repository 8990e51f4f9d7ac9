"""Collect sizes and dtypes of a module's weights once per export; measure used and available memory."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator

import torch

from ..huggingface.layer_weights import largest_layer


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    name: str  # name of the class
    weight_bytes: int  # of parameters and buffers; tied weights count once
    layer_bytes: int  # bytes of the largest layer if weights are read when a layer is called; 0 if all are in memory
    types: tuple[str, ...]  # of parameters and buffers, such as `"float32"`
    kernel_types: tuple[str, ...]  # of floating-point parameters, which a runtime needs kernels for
    matrix_types: tuple[str, ...]  # of parameters that can be quantized
    projected: int  # number of weights in linear layers
    projected_bytes: int  # bytes of the weights of linear layers that are not also embedding tables

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModelFacts:
        projections = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Linear)}
        tables = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
        matrices = (weight for weight in module.parameters() if weight.dim() == 2 and weight.is_floating_point())
        stored = [weight for weight in module.parameters() if id(weight) in projections]
        alone = [weight for weight in stored if id(weight) not in tables]
        return cls(
            name=type(module).__qualname__,
            weight_bytes=weight_bytes(module),
            layer_bytes=largest_layer(module),
            types=_types((*module.parameters(), *module.buffers())),
            kernel_types=_types(weight for weight in module.parameters() if weight.is_floating_point()),
            # all matrices that a product may use, so all that are not only embedding tables
            matrix_types=_types(one for one in matrices if id(one) not in tables or id(one) in projections),
            projected=sum(weight.numel() for weight in stored),
            projected_bytes=sum(weight.numel() * weight.element_size() for weight in alone),
        )


def _types(tensors: Iterator[torch.Tensor] | tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    return tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def weight_bytes(module: torch.nn.Module) -> int:
    """Return the size of all parameters and buffers in bytes; tied weights count once."""
    from ..core.private_names.of_torch import FakeTensor

    found = {}
    for tensor in (*module.parameters(), *module.buffers()):
        place, size = id(tensor), tensor.numel() * tensor.element_size()
        if not (isinstance(tensor, FakeTensor) or tensor.is_meta):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # some tensor subclasses have no storage
                storage = tensor.untyped_storage()
                place, size = storage.data_ptr() or place, storage.nbytes()
        found[place] = size
    return sum(found.values())


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def memory_available() -> int:
    """Return the available memory in bytes, within the memory limit of a container."""
    import psutil

    available = int(psutil.virtual_memory().available)
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        most, now = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
        held = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return available
    return min(available, most - now + int(held.get("file", 0)))  # Linux frees the page cache of files if needed
