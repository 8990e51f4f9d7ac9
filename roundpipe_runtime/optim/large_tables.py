"""Choose the tables of large vocabularies that are not copied to a device whole.

::

    embedding   copies the rows that occur in a microbatch, and their gradients back
    head        copies slices of the vocabulary one after the other, and their gradients back

Copying only rows changes no bit of a result, so large embeddings always send rows. Slices are summed in another order
than a whole product, so slices are used only if a table does not fit, or if the user requests them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from ..device.transfer import sent_dtype, sent_nbytes
from ..errors import ConfigError
from .parameters import LayerContents, ParameterSlot, Table, scan

LargeTables: TypeAlias = Literal["auto", "whole", "slices"]

# A table of at least this many bytes is large. Copying a smaller table takes about as long as finding its rows.
LARGE = 16 * 2**20

# Bytes of a slice: half of the largest layer, within these bounds.
_SMALLEST_SLICE, _LARGEST_SLICE = 2**20, 2**28

# The number of rows of a slice is a multiple of this number, because kernels are faster then.
_ROWS = 64

# Attribute of a layer that computes logits: the weight from which it computes them.
_HEAD = "_rp_head_weight"

# Attribute of a layer: its compiled code, which does not accept placeholders for parameters.
_TO_COMPILE = "_rp_to_compile"


def check_large_tables(value: Any) -> None:
    """Check that a value is valid for the option ``large_tables``."""
    if value not in ("auto", "whole", "slices"):
        raise ConfigError(f'large_tables must be "auto", "whole" or "slices", found {value!r}.')


@dataclasses.dataclass(frozen=True, slots=True)
class TableRule:
    """Decides which large parameters of a model, called tables, are copied to devices in parts instead of whole."""

    by_rows: bool = False  # whether embeddings send rows
    by_slices: bool = False  # whether products with tables are computed by slices
    slice_nbytes: int = _SMALLEST_SLICE
    is_compiled: bool = False  # whether torch compiles layers

    def mark(self, contents: Sequence[LayerContents]) -> list[LayerContents]:
        """Return the layers with their tables: the large parameters that are copied in parts."""
        if not self.by_rows:
            return list(contents)
        return [dataclasses.replace(layer, tables=self._tables(layer)) for layer in contents]

    def _tables(self, layer: LayerContents) -> Mapping[int, Table]:
        if self.is_compiled and getattr(layer.module, _TO_COMPILE, layer.module) is not None:
            return {}
        large = [slot for slot in layer.slots if sent_nbytes(slot.parameter) >= LARGE and _is_plain(slot.parameter)]
        head = getattr(layer.module, _HEAD, None)
        found = {}
        for slot in large:
            is_head = slot.parameter is head
            if self.by_slices if is_head else _looks_up(slot):
                rows = self._slice_rows(slot.parameter) if self.by_slices else None
                found[id(slot.parameter)] = Table(rows, is_head)
        # a parameter used twice in a layer is a table only if both uses are
        others = {id(slot.parameter) for slot in large if slot.parameter is not head and not _looks_up(slot)}
        return {key: table for key, table in found.items() if key not in others}

    def _slice_rows(self, parameter: torch.Tensor) -> int:
        of_row = max(1, parameter.shape[1] * sent_dtype(parameter).itemsize)
        return max(_ROWS, self.slice_nbytes // of_row // _ROWS * _ROWS)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a dense matrix on the host, and not a tensor subclass."""
    is_matrix = parameter.dim() == 2 and parameter.is_floating_point() and parameter.layout == torch.strided
    return type(parameter) is nn.Parameter and is_matrix and parameter.device.type in ("cpu", "meta")


def _looks_up(slot: ParameterSlot) -> bool:
    """Return whether a parameter is the table of an embedding that only looks up rows."""
    owner = slot.owner
    if not isinstance(owner, nn.Embedding) or slot.name != "weight":
        return False
    return owner.max_norm is None and not owner.scale_grad_by_freq and not owner.sparse


def rule_for(
    layers: Sequence[nn.Module],
    option: LargeTables,
    stage_nbytes: float | None,
    gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
    *,
    is_compiled: bool = False,
) -> TableRule:
    """Return the rule that decides which large parameters of these layers are copied in parts."""
    # stage_nbytes: bytes of parameters and gradients that a stage may have; `None` for no limit
    # gradient_dtype: function that returns the dtype in which gradients of a parameter are summed. Default: its own.
    if option == "whole":
        return TableRule()
    contents = scan(layers)
    sliced = TableRule(by_rows=True, by_slices=True, is_compiled=is_compiled)
    marked = sliced.mark(contents)
    # layers without tables have the same size for all options, so options do not change the size of a slice
    largest = max((layer.nbytes() for layer in marked if not layer.tables), default=0)
    nbytes = min(max(largest // 2, _SMALLEST_SLICE), _LARGEST_SLICE)
    sliced = dataclasses.replace(sliced, slice_nbytes=nbytes)
    by_rows = dataclasses.replace(sliced, by_slices=False)
    if option == "slices":
        return sliced
    if stage_nbytes is None:
        return by_rows
    pairs = zip(by_rows.mark(contents), sliced.mark(contents), strict=True)
    heads = [layer for layer, other in pairs if any(table.is_head for table in other.tables.values())]
    is_too_large = any(sum(needed_bytes(layer, gradient_dtype)) > stage_nbytes for layer in heads)
    return sliced if is_too_large else by_rows


def needed_bytes(
    layer: LayerContents, gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype
) -> tuple[int, int]:
    """Return the bytes that plans count for a layer on a device, and for the gradients of the layer."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    summed = [p for p in trained if id(p) not in layer.tables and gradient_dtype(p) != sent_dtype(p)]
    sums = sum(p.numel() * gradient_dtype(p).itemsize for p in summed)
    return layer.nbytes(), sum(map(layer.nbytes_of, trained)) + sums
