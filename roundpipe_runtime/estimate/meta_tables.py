"""Stand in for large tables while layers are measured on ``meta``, and count the bytes of the parts that travel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from ..device.events import NOW, Event
from ..engine.parameters.host_sum import HostSum
from ..engine.parameters.host_table import HostTable, TableAccess
from ..optim.parameters import LayerContents


class Parts:
    """The bytes of parts of tables that were copied, and what copies them: nothing is."""

    torch_device = torch.device("meta")

    def __init__(self) -> None:
        self.up = self.down = 0

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a part that a device gets; its memory is counted with the parameters of the layer."""
        self.up += tensor.nbytes
        return tensor

    def copy_out(self, tensor: torch.Tensor, *, last: bool, parameter: bool = False) -> tuple[torch.Tensor, Event]:
        """Count the gradient of a part."""
        self.down += tensor.nbytes
        return tensor, NOW

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Do nothing: there is nothing to wait for."""
        return contextlib.nullcontext()

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: nothing was copied."""


class _NoSum(HostSum):
    """A sum without memory."""

    def add(self, place: torch.Tensor | slice, gradient: torch.Tensor, arrived: Event, *, waiting: int) -> None:
        """Forget a part."""


@contextlib.contextmanager
def standing_tables(contents: LayerContents) -> Iterator[Parts]:
    """Let tables of a layer be stood for in the block; yield the bytes of the parts that are copied."""
    parts, places = Parts(), []
    made: dict[int, nn.Parameter] = {}
    for slot in contents.slots:
        parameter = slot.parameter
        if (table := contents.tables.get(id(parameter))) is None:
            continue
        if id(parameter) not in made:
            access = TableAccess(
                parts, parameter, table, requires_grad=parameter.requires_grad, new_sum=lambda: _NoSum(torch.empty(0))
            )
            stands = HostTable(access, requires_grad=parameter.requires_grad)
            made[id(parameter)] = cast(nn.Parameter, stands)
        places.append((slot.owner._parameters, slot.name, parameter))
    try:
        for held, name, parameter in places:
            held[name] = made[id(parameter)]
        yield parts
    finally:
        for held, name, parameter in places:
            held[name] = parameter
