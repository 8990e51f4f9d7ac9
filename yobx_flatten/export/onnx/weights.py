"""Read weights of an ONNX graph while the file is written; find and store weights that are integers times scales."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy
import numpy.typing as npt
import torch

from ...errors import FlattenError
from ...errors.failures import STEP, format_bytes
from ...huggingface.layer_weights import Reader
from ...trace.onnx_repairs import ir
from .rewrite.graph import Nodes, attribute, sizes_of

logger = logging.getLogger("yobx_flatten")

_IN_MODEL = 256
"""Weights of fewer bytes are stored in the ONNX file itself, not in the data file next to it."""

_PAGE = 4096


def read_lazily(model: ir.Model, readers: Mapping[str, Reader]) -> None:
    """Replace weights without data in an ONNX graph by lazy tensors, read from disk when the graph is saved."""
    from ...core.private_names.of_torch import is_fake

    made: dict[int, ir.LazyTensor] = {}  # by reader, so that tied weights are stored once
    for name, value in model.graph.initializers.items():
        held = value.const_value
        if held is None or not is_fake(getattr(held, "raw", None)):
            continue
        if name not in readers:
            raise FlattenError(f"The weight {name} has values neither in memory nor on disk. Load the model first.")
        reader = readers[name]
        if id(reader) not in made:
            made[id(reader)] = ir.LazyTensor(
                functools.partial(_read, reader), dtype=held.dtype, shape=ir.Shape(sizes_of(held)), name=name
            )
        value.const_value = made[id(reader)]
    # transpose each weight when it is read, since constant folding would transpose all weights in memory
    graph = model.graph
    for node in list(graph):
        weight, result = node.inputs[0] if node.op_type == "Transpose" else None, node.outputs[0]
        if weight is None or not weight.is_initializer() or len(list(weight.uses())) != 1 or weight.is_graph_output():
            continue
        tensor, label = weight.const_value, result.name
        if tensor is None or result.is_graph_output():
            continue
        order = list(attribute(node, "perm", range(len(tensor.shape))[::-1]))
        read, shape = functools.partial(_transposed, tensor, order), ir.Shape([tensor.shape[axis] for axis in order])
        lazy = ir.LazyTensor(read, dtype=tensor.dtype, shape=shape, name=label)
        transposed = ir.Value(name=label, type=ir.TensorType(tensor.dtype), shape=shape, const_value=lazy)
        result.replace_all_uses_with(transposed)
        graph.remove(node, safe=True)
        graph.initializers.pop(str(weight.name))
        graph.register_initializer(transposed)


def _read(reader: Reader) -> ir.TensorProtocol:
    return ir.tensor_adapters.TorchTensor(reader().detach())


def _transposed(tensor: ir.TensorProtocol, order: list[int]) -> ir.TensorProtocol:
    read = tensor.raw() if isinstance(tensor, ir.LazyTensor) else tensor
    if isinstance(read.raw, torch.Tensor):  # torch is five times as fast as numpy
        return ir.tensor_adapters.TorchTensor(read.raw.detach().permute(order).contiguous())
    return ir.tensor(read.numpy().transpose(order), dtype=tensor.dtype)


def write_weights(model: ir.Model, path: pathlib.Path) -> None:
    """Write the weights of a model one by one to a separate file, and make the model refer to the separate file."""
    held = [(value, tensor) for value in model.graph.initializers.values() if (tensor := value.const_value) is not None]
    held = [(value, tensor) for value, tensor in held if tensor.nbytes > _IN_MODEL and tensor.dtype.name != "STRING"]
    total, done = sum(tensor.nbytes for _, tensor in held), 0
    shown = f"writing {format_bytes(total)} of weights"
    places: dict[int, tuple[int, int]] = {}
    with path.open("wb") as file:
        for _, tensor in held:
            logger.info(shown, extra={**STEP, "done": done, "total": total})
            if id(tensor) not in places:
                if tensor.nbytes >= _PAGE:  # large weights begin at a page boundary, so that they can be mapped
                    file.seek(-file.tell() % _PAGE, 1)
                offset = file.tell()
                tensor.tofile(file) if hasattr(tensor, "tofile") else file.write(tensor.tobytes())
                places[id(tensor)] = offset, file.tell() - offset
                unmap(tensor)
            done += tensor.nbytes
    for value, tensor in held:
        offset, length = places[id(tensor)]
        shape, name = ir.Shape(sizes_of(tensor)), str(value.name)
        value.const_value = ir.ExternalTensor(
            path.name, offset, length, tensor.dtype, shape=shape, name=name, base_dir=path.parent
        )


def unmap(tensor: ir.TensorProtocol) -> None:
    if hasattr(tensor, "release"):
        with contextlib.suppress(BufferError):  # an array still refers to the pages
            tensor.release()


Floats: TypeAlias = npt.NDArray[numpy.floating]
Bytes: TypeAlias = npt.NDArray[numpy.uint8]

_BLOCKS = (256, 128, 64, 32, 16)
"""Block sizes that onnxruntime's operators support: how many weights share a scale."""

_SAMPLE = 8
"""Number of blocks that are tested first: a matrix that is not made of integers and scales fails on each of them."""

_CHUNK = 2**12
"""Number of blocks whose scales are computed at once, so that the values stay in the CPU cache."""


# Find the integers and scales that the weights of a matrix were computed from, for example the weights of a GGUF file.
#
#     a block of weights        -0.3  0.1  0.0  0.2 ...
#     largest / 8, / 7, ...      scale 0.1: all weights are multiples of it  ──>  -3  1  0  2, scale 0.1
#     range / 15, / 14, ...      or multiples above the lowest weight        ──>  scale and lowest weight
#
# The format of the checkpoint is not used: integers and scales are accepted only if they reproduce every weight.


@dataclasses.dataclass(frozen=True)
class WeightGrid:
    """A matrix quantized in blocks along its rows: ``(numbers - zeros) * scales`` or ``numbers * scales + lowest``."""

    bits: int
    numbers: Bytes  # of shape (rows, blocks, weights of a block), each below `2**bits`
    scales: Floats  # of shape (rows, blocks); float16 if that is exact, else float32
    zeros: Bytes | None = None  # zero points of shape (rows, blocks); `None` if all are `2**bits / 2`
    lowest: Floats | None = None  # weight of the integer 0, in shape and dtype of the scales; `None` with zero points

    @property
    def middle(self) -> int:
        """The integer that represents a weight of 0 if the blocks have no zero points."""
        return int(2 ** (self.bits - 1))

    def packed(self) -> Bytes:
        """Return the integers in onnxruntime's layout: two 4-bit integers per byte, the first in the lower half."""
        return pairs(self.numbers) if self.bits == 4 else self.numbers

    def weights(self) -> Floats:
        scales = self.scales[..., None].astype(numpy.float32)
        if self.lowest is not None:
            found = self.numbers * scales + self.lowest[..., None].astype(numpy.float32)
        else:
            zeros = self.middle if self.zeros is None else self.zeros[..., None].astype(numpy.int16)
            found = (self.numbers.astype(numpy.int16) - zeros).astype(numpy.float32) * scales
        return found.reshape(len(self.numbers), -1)


def find_grid(matrix: Floats) -> WeightGrid | None:
    """Return 4-bit or 8-bit integers with scales that reproduce a matrix up to rounding; ``None`` if impossible.

    >>> steps = numpy.arange(-8, 8, dtype=numpy.float32).reshape(1, 16)
    >>> grid = find_grid(steps * numpy.float32(0.5))
    >>> grid.bits, grid.scales.item(), (grid.numbers - 8.0).flatten().tolist() == steps.flatten().tolist()
    (4, 0.5, True)
    """
    # matrix: float32 or float16 of shape (rows, columns); blocks are parts of a row
    rows, columns = matrix.shape
    if not rows or columns % _BLOCKS[-1]:
        return None
    with numpy.errstate(over="ignore"):
        short = matrix.astype(numpy.float16)
    if (short == matrix).all():  # the weights were computed in half precision
        matrix = short
    # fast rejection: a matrix that fits any form in any block size fits this form in the smallest blocks
    if _fit(_sample(matrix, _BLOCKS[-1]), 8, "lowest") is None:
        return None
    sizes = [size for size in _BLOCKS if columns % size == 0]
    for bits, size, form in itertools.product((4, 8), sizes, get_args(_Form)):
        found = None if _fit(_sample(matrix, size), bits, form) is None else _whole(matrix, size, bits, form)
        if found is not None:
            apart = numpy.abs(found.weights() - matrix).reshape(-1, size).max(1)
            if (apart <= _allowed(matrix.reshape(-1, size))).all():
                return found
    return None


def pairs(numbers: Bytes) -> Bytes:
    found: Bytes = numbers[..., 0::2] | (numbers[..., 1::2] << numpy.uint8(4))
    return found


_Parts: TypeAlias = tuple[Floats, Floats, Floats | None, Floats | None]
"""The integers, scales, zero points and lowest weights of quantized blocks."""

_Form: TypeAlias = Literal["symmetric", "zero", "lowest"]
"""Integers without a zero point, such as -8 to 7; with one; or multiples of the scale above the lowest weight."""


def _sample(matrix: Floats, size: int) -> Floats:
    blocks: Floats = matrix.reshape(-1, size)
    sample: Floats = blocks[numpy.linspace(0, len(blocks) - 1, _SAMPLE).astype(int)]
    return sample


def _whole(matrix: Floats, size: int, bits: int, form: _Form) -> WeightGrid | None:
    """Return the integers and scales of a matrix whose weights are integers times a scale per block, else ``None``."""
    blocks, made = matrix.reshape(-1, size), []
    for start in range(0, len(blocks), _CHUNK):
        parts = _fit(blocks[start : start + _CHUNK], bits, form)
        if parts is None:
            return None
        made.append((parts[0].astype(numpy.uint8), *parts[1:]))
    joined: list[Any] = [
        None if chunks[0] is None else numpy.concatenate(chunks).reshape(len(matrix), -1)
        for chunks in zip(*made, strict=True)
    ]
    numbers, scales, zeros, lowest = joined
    # scales and lowest weights become float16 if the conversion is exact, else float32
    with numpy.errstate(over="ignore"):
        half, low = scales.astype(numpy.float16), None if lowest is None else lowest.astype(numpy.float16)
    # the precision of a computed scale is limited by the precision of the weights
    if (numpy.abs(half - scales) > 2.0**-20 * scales).any():
        half = scales.astype(numpy.float32)
    if lowest is not None and not (half.dtype == numpy.float16 and (low == lowest).all()):
        half, low = half.astype(numpy.float32), lowest.astype(numpy.float32)
    zeros = None if zeros is None else zeros.astype(numpy.uint8)
    return WeightGrid(bits, numbers.reshape(len(matrix), -1, size), half, zeros, low)


def _allowed(blocks: Floats) -> Floats:
    """Return, for each block of weights, the largest float rounding error of ``integer * scale + offset``."""
    last = 2.0**-10 if blocks.dtype == numpy.float16 else 2.0**-21
    largest: Floats = numpy.abs(blocks).max(1).astype(numpy.float64)
    return last * largest


def _fit(blocks: Floats, bits: int, form: _Form) -> _Parts | None:
    """Return the integers and the scale that represent each block; ``None`` if a block cannot be represented."""
    half, most = 2 ** (bits - 1), 2**bits - 1
    if form == "symmetric":
        # first the usual ranges: the largest integer is 127 in most 8-bit formats, and -8 in most 4-bit formats
        counts = sorted(range(1, half + 1), key=lambda count: (count != half - (bits == 8), -count))
        found = _search(blocks, numpy.abs(blocks).max(1), counts, within=(-half, half - 1))
        return None if found is None else (found[0] + half, found[1], None, None)
    if form == "lowest":
        low = blocks.min(1).astype(numpy.float64)
        found = _search(blocks, blocks.max(1) - low, range(most, 0, -1), within=(0, most), start=low)
        return None if found is None else (*found, None, low)
    extent = numpy.maximum(blocks.max(1), 0) - numpy.minimum(blocks.min(1), 0)
    found = _search(blocks, extent, range(most, 0, -1), within=(-most, most))
    if found is None:
        return None
    zeros = -numpy.minimum(found[0].min(1), 0)
    return found[0] + zeros[:, None], found[1], zeros, None


def _search(
    blocks: Floats, extent: Floats, counts: Iterable[int], *, within: tuple[int, int], start: Floats | None = None
) -> tuple[Floats, Floats] | None:
    """Find a scale for each block such that all weights of the block are multiples of the scale."""
    above = blocks.astype(numpy.float64)
    if start is not None:
        above -= start[:, None]
    extent, allowed = extent.astype(numpy.float64), _allowed(blocks)
    numbers = numpy.zeros_like(above)
    rest = numpy.flatnonzero(extent > 0)  # a block of equal weights has no scale
    for count in counts:
        if not len(rest):
            break
        step = extent[rest] / count
        ratio = above[rest] / step[:, None]
        whole = numpy.rint(ratio)
        # twice the rounding error, since the extent was also rounded
        fits = numpy.abs(ratio - whole).max(1) * step <= 2 * allowed[rest]
        fits &= (whole.min(1) >= within[0]) & (whole.max(1) <= within[1])
        numbers[rest[fits]] = whole[fits]
        rest = rest[~fits]
    if len(rest):
        return None
    square = (numbers * numbers).sum(1)
    return numbers, (numbers * above).sum(1) / numpy.where(square == 0, 1, square)  # least squares


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    bits: int
    block_size: int  # number of weights that share a scale
    rows: int  # number of inputs
    columns: int  # number of outputs
    parts: Sequence[Any]  # graph values: integers, scales, and zero points unless all of them are `2**bits / 2`
    nbytes: int  # size in the file
    offsets: Any = None  # a number to add to the weights of each block, float32 of shape (columns, blocks)
    is_half: bool = False  # whether its inputs are float16

    @property
    def blocks(self) -> int:  # in a column of the matrix
        return -(-self.rows // self.block_size)


def new_value(graph: ir.Graph, name: str, tensor: Any) -> Any:
    value = ir.Value(name=name, const_value=tensor)
    value.shape, value.type = tensor.shape, ir.TensorType(tensor.dtype)
    graph.register_initializer(value)
    return value


def replace_product(node: Any, product: ir.Value, made: Nodes) -> None:
    """Replace a ``MatMul`` or ``Gemm`` by the nodes of a quantized product, and add the bias of the ``Gemm``."""
    output, before = node.outputs[0], node.inputs[1].producer()
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        made.add("Add", made[-1].outputs[0], node.inputs[2], name=f"{node.name}_bias")
    found = made[-1].outputs[0]
    if found is not product:
        product.type, product.name = output.type, f"{output.name}_product"
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [output], [found])
    if before is not None and not before.outputs[0].uses():
        before.graph.remove(before, safe=True)


def is_in_main_graph(value: Any, graph: ir.Graph) -> bool:
    """Return whether a value is computed outside of loops and branches, so that it can be a graph output."""
    return value.producer() is not None and value.producer().graph is graph


def products_of(model: Any, block_size: int) -> list[tuple[Any, tuple[Any, bool]]]:
    """Return the matrix products to quantize, with the weight of each product and whether the weight is transposed."""
    found = []
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx") or node.op_type not in ("MatMul", "Gemm"):
            continue
        value, transposed = node.inputs[1], False
        if node.op_type == "Gemm":
            factors = {attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)}
            if factors != {1.0} or attribute(node, "transA", 0):
                continue
            transposed = bool(attribute(node, "transB", 0))
        before = value.producer()
        if before is not None and before.op_type == "Transpose" and list(attribute(before, "perm", [1, 0])) == [1, 0]:
            value, transposed = before.inputs[0], not transposed
        tensor = value.const_value
        if not value.is_initializer() or tensor is None or len(tensor.shape) != 2:
            continue
        # quantizing less than one block, such as a gate or a classification head, saves nothing
        if min(tensor.shape) >= block_size and tensor.dtype.name in ("FLOAT", "FLOAT16"):
            found.append((node, (value, transposed)))
    return found


def take_rows(node: Any, stored: StoredMatrix) -> None:
    """Replace a ``Gather`` of embedding rows by ``GatherBlockQuantized``, which reads a quantized matrix."""
    sizes = {"bits": stored.bits, "block_size": stored.block_size, "gather_axis": 0, "quantize_axis": 1}
    made, rows = Nodes(), node.inputs[1]
    shape = made.add("Constant", value_ints=[stored.columns, -1])
    first, *parts = (made.add("Reshape", part, shape) for part in stored.parts)
    found = made.add("GatherBlockQuantized", first, rows, *parts, domain="com.microsoft", name=node.name, **sizes)
    if stored.offsets is not None:
        kept = [0] * len(rows.shape)
        cut = made.reshape(found, *kept, stored.blocks, stored.block_size)
        offsets = made.add("Gather", stored.offsets, rows, axis=0)
        each = made.add("Unsqueeze", offsets, made.add("Constant", value_ints=[-1]))
        found = made.reshape(plus(made, cut, each, stored), *kept, stored.rows)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], made, [node.outputs[0]], [found])


def plus(made: Nodes, value: ir.Value, offset: ir.Value, stored: StoredMatrix) -> ir.Value:
    """Add float32 offsets to a value; if the value is float16, the offsets are cast to float16."""
    if stored.is_half:
        offset = made.add("Cast", offset, to=ir.DataType.FLOAT16.value)
    return made.add("Add", value, offset)


_ROWS = 16
"""Number of rows of a matrix that are read to find out whether its weights are integers times scales."""


def holds_integers(module: torch.nn.Module) -> bool:
    """Return whether some weights of a module are integers times a scale, as in a quantized checkpoint."""
    floats = torch.float32, torch.float16
    matrices = (weight for weight in module.parameters() if weight.dim() == 2 and weight.dtype in floats)
    return any(find_grid(numpy.ascontiguousarray(one[:_ROWS].detach().numpy())) is not None for one in matrices)


def read_columns(tensor: Any, transposed: bool) -> Floats:
    """Read a weight matrix in the shape (outputs, inputs); the caller passes the tensor to :func:`unmap` later."""
    array: Floats = tensor.numpy()
    return array if transposed else numpy.ascontiguousarray(array.T)


class Grids:
    """Caches the integers and scales of weights, so that each matrix is analyzed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], WeightGrid | None] = {}

    def find(self, value: Any, *, transposed: bool) -> WeightGrid | None:
        key = value.name, transposed
        if key not in self._known:
            self._known[key] = find_grid(read_columns(value.const_value, transposed))
            unmap(value.const_value)
        return self._known[key]

    def is_exact(self, value: Any, bits: int, *, transposed: bool) -> bool:
        grid = self.find(value, transposed=transposed)
        return grid is not None and grid.bits <= bits


def keep_integers(graph: ir.Graph, value: Any, grid: WeightGrid, *, transposed: bool) -> StoredMatrix:
    name, dtype = f"{value.name}{'' if transposed else '_T'}", value.const_value.dtype

    def stored(suffix: str, array: npt.NDArray[Any]) -> Any:
        return new_value(graph, f"{name}_{suffix}", ir.tensor(array))

    # scales in the dtype of the inputs: with scales that the graph casts, MatMulNBits returns zeros if onnxruntime's
    # graph optimization is turned off
    parts = [stored(f"Q{grid.bits}", grid.packed()), stored("scales", grid.scales.astype(dtype.numpy()))]
    if grid.zeros is not None:
        zeros = grid.zeros
        if grid.bits == 4:
            zeros = pairs(numpy.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))
        parts.append(stored("zero_points", zeros))
    held, offsets = list(parts), None
    if grid.lowest is not None:
        held.append(stored("lowest", grid.lowest))
        # weights `(number - middle) * scale` need the offset `lowest + middle * scale`, in float32
        first, made = graph[0], Nodes()
        lowest, scales = (cast_value(graph, one, ir.DataType.FLOAT) for one in (held[-1], held[1]))
        middle = made.add("Constant", value=ir.tensor(float(grid.middle), dtype=ir.DataType.FLOAT))
        offsets = made.add("Add", lowest, made.add("Mul", scales, middle))
        graph.insert_before(first, made)
    nbytes = sum(one.const_value.nbytes for one in held)
    columns, blocks, size = grid.numbers.shape
    return StoredMatrix(grid.bits, size, blocks * size, columns, parts, nbytes, offsets, dtype.name == "FLOAT16")


def cast_value(graph: ir.Graph, value: Any, dtype: ir.DataType) -> Any:
    """Return a constant of the graph, cast to another dtype."""
    if value.const_value.dtype == dtype:
        return value
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    graph.insert_before(graph[0], cast)
    cast.outputs[0].dtype, cast.outputs[0].shape = dtype, value.shape
    return cast.outputs[0]


@dataclasses.dataclass(frozen=True)
class InputSplit:
    """The rule by which large values in the input of a quantized matrix product are separated from small values."""

    limit: float = math.inf  # largest absolute value of the small part; infinite if the input is not split
    channels: tuple[int, ...] = ()  # channels that are large for all tokens, and are multiplied in float


InputSplits: TypeAlias = Mapping[str, InputSplit]
"""By the name of an activation in the ONNX graph: how the activation is split in two parts."""
