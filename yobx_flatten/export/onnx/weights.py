"""Read the weights of a graph one by one while the file is written."""

from __future__ import annotations

import contextlib
import functools
import logging
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...errors import FlattenError
from ...errors.log import STEP
from ...errors.messages import format_bytes
from ...huggingface.layer_weights import Reader
from .rewrite.repair import attribute, sizes_of

if TYPE_CHECKING:
    import onnx_ir as ir

logger = logging.getLogger("yobx_flatten")

_IN_MODEL = 256
"""Bytes below which a weight stays in the model's own file."""

_PAGE = 4096


def read_lazily(model: ir.Model, readers: Mapping[str, Reader]) -> None:
    """Let the weights of a converted graph be read when they are written. The graph's own ones have no data."""
    # model: an `onnx_ir.Model`, fresh from the exporter; it is changed in place
    # readers: a reader for each name of an initializer without data
    import onnx_ir as ir

    from ...private_names.of_torch import is_fake

    made: dict[int, ir.LazyTensor] = {}  # what is tied stays tied
    for name, value in model.graph.initializers.items():
        held = value.const_value
        if held is None or not is_fake(getattr(held, "raw", None)):
            continue
        if name not in readers:
            raise FlattenError(f"{name} has no data, and there is no file to read it from.")
        reader = readers[name]
        if id(reader) not in made:
            made[id(reader)] = ir.LazyTensor(
                functools.partial(_read, reader), dtype=held.dtype, shape=ir.Shape(sizes_of(held)), name=name
            )
        value.const_value = made[id(reader)]
    _transpose_lazily(model.graph)


def _read(reader: Reader) -> ir.TensorProtocol:
    import onnx_ir as ir

    return ir.tensor_adapters.TorchTensor(reader().detach())


def _transpose_lazily(graph: ir.Graph) -> None:
    """Transpose weights when they are read. The passes over the graph would do it at once, in memory."""
    import onnx_ir as ir

    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Transpose" else None
        if value is None or not value.is_initializer() or len(list(value.uses())) != 1 or value.is_graph_output():
            continue
        tensor, result = value.const_value, node.outputs[0]
        if tensor is None or result.is_graph_output():
            continue
        order = list(attribute(node, "perm", range(len(tensor.shape))[::-1]))
        name, shape = result.name, ir.Shape([tensor.shape[axis] for axis in order])
        lazy = ir.LazyTensor(functools.partial(_transposed, tensor, order), dtype=tensor.dtype, shape=shape, name=name)
        made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=lazy)
        result.replace_all_uses_with(made)
        graph.remove(node, safe=True)
        graph.initializers.pop(str(value.name))
        graph.register_initializer(made)


def _transposed(tensor: ir.TensorProtocol, order: list[int]) -> ir.TensorProtocol:
    import onnx_ir as ir

    read = tensor.raw() if isinstance(tensor, ir.LazyTensor) else tensor
    if isinstance(read.raw, torch.Tensor):  # five times faster than numpy
        return ir.tensor_adapters.TorchTensor(read.raw.detach().permute(order).contiguous())
    return ir.tensor(read.numpy().transpose(order), dtype=tensor.dtype)


def write_weights(model: ir.Model, path: pathlib.Path) -> None:
    """Write the weights of a model to their own file, one after the other; each is in memory once.

    Large ones begin at a page, so that they can be mapped. Progress is logged with bytes ``done`` and ``total``.
    """
    # model: an `onnx_ir.Model`, whose weights are those of the file afterwards
    import onnx_ir as ir

    held = [(value, tensor) for value in model.graph.initializers.values() if (tensor := value.const_value) is not None]
    held = [(value, tensor) for value, tensor in held if tensor.nbytes > _IN_MODEL and tensor.dtype.name != "STRING"]
    total, done = sum(tensor.nbytes for _, tensor in held), 0
    shown = f"writing {format_bytes(total)} of weights"
    places: dict[int, tuple[int, int]] = {}
    with path.open("wb") as file:
        for _, tensor in held:
            logger.info(shown, extra={**STEP, "done": done, "total": total})
            if id(tensor) not in places:
                if tensor.nbytes >= _PAGE:
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
    """Release the read pages of a tensor that is mapped from a file."""
    if hasattr(tensor, "release"):
        with contextlib.suppress(BufferError):  # something else still reads it
            tensor.release()
