"""Convert a program to ONNX and to OpenVINO files, and quantize weights for OpenVINO and ExecuTorch."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import logging
import pathlib
import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import FlattenError, InvalidArgumentError
from ...errors.failures import first_line, raised_as
from ...runners.openvino_runner import BEAMS, FLOAT32, import_openvino, last_line, read_model
from ...runners.signature import KEY
from ..example import Example
from ..flat_program import quietly, signature_of
from ..onnx.attempts import ATTENTION_OPSET
from ..onnx.file import UnprovenFile, convert
from ..onnx.weights import find_grid
from ..proof.report import ExportReport
from ..quantization import Quantization, nothing_kept, remark_of_kept
from ..traced import Traced


def write_openvino(traced: Traced, example: Example, path: pathlib.Path, *, in_place: bool = False) -> list[str]:
    """Write a program as OpenVINO files; return the names of the cache inputs that OpenVINO keeps as state."""
    # the program is converted from ONNX: OpenVINO 2026.4 cannot convert `sym_min`, which sliding layers use. With
    # attention in one operator, OpenVINO finds the cache.
    opset, kept = ATTENTION_OPSET if in_place else None, {}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx-") as folder:
        file = UnprovenFile(pathlib.Path("model.onnx"), pathlib.Path(folder))
        file.save(convert(traced, example.axis_names, opset=opset, fuse=in_place).model)
        model = read_model(file.path)
        if in_place:
            kept = keep_in_state(model, traced.presents)
            if not kept:
                raise FlattenError("no layer appends new tokens to the cache: all layers have a sliding window.")
            with_added_masks(model)
        model.set_rt_info(signature_of(traced, ("openvino", "onnx")).to_json(), [KEY])
        import_openvino().save_model(model, str(path), compress_to_fp16=False)
    copied = copied_states(path) if in_place else []
    if copied:
        raise FlattenError(f"in each call, OpenVINO would copy {len(copied)} of the {len(kept)} KV cache tensors.")
    return list(kept)


def with_added_masks(model: Any) -> None:
    """Replace the boolean mask of each attention in an OpenVINO model by an additive mask, in place."""
    import numpy
    import openvino
    from openvino import opset13 as operators

    added: dict[Any, Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ScaledDotProductAttention" or node.get_input_size() < 4:
            continue
        mask, kind = node.input(3).get_source_output(), node.output(0).get_element_type()
        if mask.get_element_type() != openvino.Type.boolean:
            continue
        if mask not in added:
            none, lowest = (operators.constant(numpy.array(value, kind.to_dtype())) for value in (0, -numpy.inf))
            added[mask] = operators.select(mask, none, lowest).output(0)
        node.input(3).replace_source_output(added[mask])
    model.validate_nodes_and_infer_types()


def keep_in_state(model: Any, presents: Mapping[str, str]) -> dict[str, str]:
    """Move growing KV cache inputs of an OpenVINO model to its state, in place; return names of inputs and outputs."""
    # presents: for each cache input, the output that becomes this input of the next call
    openvino: Any = import_openvino()
    import numpy
    from openvino import opset13 as operators
    from openvino._offline_transformations import apply_make_stateful_transformation

    results = {name: result for result in model.outputs for name in result.names}
    inputs = {name: port for port in model.inputs for name in port.names}
    kept = {name: present for name, present in presents.items() if _grows(inputs[name], results[present])}
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
    if not kept or tokens is None:
        return {}
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Tile":
            _repeat_by_product(node, operators, numpy)
    beams = operators.parameter([-1], dtype=numpy.int32, name=BEAMS)
    beams.output(0).set_names({BEAMS})
    model.add_parameters([beams])
    for name in kept:
        readers = inputs[name].get_target_inputs()
        rows = operators.gather(inputs[name].node, beams, operators.constant(numpy.int64(0)))
        for reader in readers:
            reader.replace_source_output(rows.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, kept)
    # the initial state has the batch size of the tokens, and no positions
    batch = operators.gather(
        operators.shape_of(tokens, output_type="i64"), operators.constant([0]), operators.constant(0)
    )
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = list(node.output(0).get_partial_shape())[1:]
            sizes = [operators.constant(numpy.array([size.get_length() if size.is_static else 0])) for size in shape]
            zero = openvino.op.Constant(node.output(0).get_element_type(), openvino.Shape([]), [0])
            node.set_arguments([operators.broadcast(zero, operators.concat([batch, *sizes], 0))])
    model.validate_nodes_and_infer_types()
    # without this option, programs that open the file themselves would store keys and values in 8 bits
    model.set_rt_info(FLOAT32["KV_CACHE_PRECISION"], ["runtime_options", "KV_CACHE_PRECISION"])
    return kept


def copied_states(path: pathlib.Path) -> list[str]:
    """Return the names of cache tensors that OpenVINO copies in each call instead of updating them in place."""
    openvino = import_openvino()
    with raised_as(lambda error: FlattenError(f"OpenVINO cannot compile the model: {last_line(error)}")):
        compiled = openvino.Core().compile_model(read_model(path), "CPU", dict(FLOAT32))
    found = []
    for node in compiled.get_runtime_model().get_ops():
        if _kind(node) == "MemoryInput":
            readers = {_kind(reader.get_node()) for reader in node.output(0).get_target_inputs()}
            if readers - {"ShapeOf"} != {"ScaledDotProductAttention"}:
                found.append(node.get_friendly_name())
    return found


def _kind(node: Any) -> str:
    information = node.get_rt_info()
    return information["layerType"].astype(str) if "layerType" in information else ""


def _grows(port: Any, result: Any) -> bool:
    """Return whether an output concatenates a cache input and new tokens along axis 2."""
    made = result.get_node().input(0).get_source_output().get_node()
    if made.get_type_name() != "Concat" or made.get_input_size() != 2 or len(port.get_partial_shape()) != 4:
        return False
    axis = made.get_attributes()["axis"]
    return axis in (2, -2) and made.input(0).get_source_output().get_node() == port.get_node()


def _repeat_by_product(tile: Any, operators: Any, numpy: Any) -> None:
    """Replace a ``Tile`` node that repeats keys or values by a multiplication with a tensor of ones."""
    shared, repeats = (tile.input(index).get_source_output() for index in range(2))
    shape = shared.get_partial_shape()
    if repeats.get_node().get_type_name() != "Constant" or shape.rank.is_dynamic or len(shape) != 5:
        return
    ones = numpy.ones(repeats.get_node().data.tolist(), shared.get_element_type().to_dtype())
    if ones.ndim != 5 or any(size not in (1, ones.size) for size in ones.shape) or ones.shape[2] != ones.size:
        return
    if shape[2].is_dynamic or shape[2].get_length() != 1:  # a product can only repeat an axis of size 1
        return
    product = operators.multiply(shared, operators.constant(ones))
    readers = [reader.get_node() for reader in tile.output(0).get_target_inputs()]
    for reader in tile.output(0).get_target_inputs():
        reader.replace_source_output(product.output(0))
    for reader in readers:
        sizes = reader.output(0).get_partial_shape()
        if reader.get_type_name() != "Reshape" or len(sizes) != 4 or shape[1].is_dynamic or shape[4].is_dynamic:
            continue
        heads, size = shape[1].get_length() * ones.size, shape[4].get_length()
        if sizes[1] != heads or sizes[3] != size:
            continue
        # a constant shape, since a computed shape would be another reader of the cache
        target = operators.constant(numpy.array([0, heads, -1, size]))
        joined = operators.reshape(product, target, True)
        for after in reader.output(0).get_target_inputs():
            after.replace_source_output(joined.output(0))


def keep_in_openvino(path: pathlib.Path, report: ExportReport) -> None:
    """Store each matrix of an OpenVINO file as integers and scales, if these reproduce the matrix."""
    import numpy

    openvino = import_openvino()
    from openvino import opset13 as operators

    made, kept = [read_model(path)], Counter[int]()
    for node in made[0].get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != openvino.Type.f32 or len(node.shape) != 2:
            continue
        readers = [target.get_node() for target in node.output(0).get_target_inputs()]
        kinds = {(reader.get_type_name(), reader.get_attributes().get("transpose_b", True)) for reader in readers}
        turned = kinds == {("MatMul", False)}  # the matrix has one column for each output
        if not turned and not kinds <= {("MatMul", True), ("Gather", True)}:
            continue
        grid = find_grid(numpy.ascontiguousarray(node.data.T) if turned else node.data)
        if grid is None or grid.lowest is not None:
            continue
        # nodes `(integers - zeros) * scales`, which OpenVINO fuses with a matrix product
        packed, kind = grid.packed(), getattr(openvino.Type, f"{'i' if grid.zeros is None else 'u'}{grid.bits}")
        if grid.zeros is None:  # converts unsigned integers around the middle to signed integers
            packed = packed ^ numpy.uint8(0x88 if grid.bits == 4 else 0x80)
        tensor = openvino.Tensor(kind, openvino.Shape(grid.numbers.shape))  # memory that the constant keeps alive
        tensor.data.reshape(-1)[:] = packed.reshape(-1)
        numbers = operators.convert(openvino.op.Constant(tensor), "f32")
        if grid.zeros is not None:
            numbers = operators.subtract(numbers, operators.constant(grid.zeros[..., None].astype(numpy.float32)))
        scaled = operators.multiply(numbers, operators.constant(grid.scales[..., None].astype(numpy.float32)))
        stored = operators.reshape(scaled, operators.constant(numpy.array([len(grid.numbers), -1])), False)
        for target, reader in zip(node.output(0).get_target_inputs(), readers, strict=True):
            if not turned:
                target.replace_source_output(stored.output(0))
                continue
            sides = reader.input(0).get_source_output(), stored, reader.get_attributes()["transpose_a"], True
            product = operators.matmul(*sides, name=reader.get_friendly_name())
            product.output(0).set_names(reader.output(0).get_names())
            for after in reader.output(0).get_target_inputs():
                after.replace_source_output(product.output(0))
        kept[grid.bits] += node.data.size
    if not kept:
        raise nothing_kept(report.module)
    made[0].validate_nodes_and_infer_types()
    # without this option, OpenVINO would quantize activations to 8 bits
    made[0].set_rt_info("0", ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    replace_openvino(path, made)
    report.remark(remark_of_kept(kept))


# Quantize weights with the tools of a runtime: NNCF for OpenVINO, torchao for ExecuTorch.
#
#     OpenVINO      file in float ──> nncf.compress_weights ──> file      int4 in blocks, embeddings and the last
#                                                                         projection in int8; activations stay in float
#     ExecuTorch    module ──> torchao.quantize_ ──> trace ──> file       XNNPACK: activations are rounded to 8 bits
#                                                                         token by token; embeddings stay in float


def blocks_of(quantization: Quantization) -> int:
    """Return how many weights share one scale; 0 if all weights of an output channel share one scale."""
    return quantization.block_size if quantization.bits == 4 or quantization.weights == "keep" else 0


def quantize(path: pathlib.Path, quantization: Quantization, report: ExportReport) -> None:
    if quantization.weights == "keep":
        keep_in_openvino(path, report)
        return
    four = quantization.bits == 4

    def refused(error: BaseException) -> FlattenError:
        return FlattenError(
            f"NNCF cannot compress {path.name} ({type(error).__name__}: {first_line(error)}). Take another block "
            'size or 8 bits:\n    quantize="int8"'
        )

    # NNCF sends no telemetry and prints nothing
    made_loggers, nncf = logging.getLoggerClass(), import_openvino("nncf")
    console: Any = importlib.import_module("rich").get_console()
    before, console.quiet = console.quiet, True
    try:
        mode = nncf.CompressWeightsMode.INT4_ASYM if four else nncf.CompressWeightsMode.INT8_ASYM
        blocks = {"group_size": quantization.block_size} if four else {}
        with quietly("nncf"), raised_as(refused):  # errors of NNCF have no common class
            made = [nncf.compress_weights(read_model(path), mode=mode, **blocks)]
    finally:
        console.quiet = before
        logging.setLoggerClass(made_loggers)  # here, since NNCF imports parts of itself in the block
    replace_openvino(path, made)
    others = ", those of embeddings and of the last projection in int8" if four else ", embeddings among them"
    report.remark(f"NNCF stored the weights in {quantization.weights}{others}.")


def replace_openvino(path: pathlib.Path, made: list[Any]) -> None:
    """Replace the files of an OpenVINO model; the model in memory is freed first, because it reads the old files."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compressed-") as folder:
        import_openvino().save_model(made[0], str(pathlib.Path(folder) / path.name), compress_to_fp16=False)
        made.clear()
        for file in sorted(pathlib.Path(folder).iterdir()):
            file.replace(path.parent / file.name)


def quantized_example(example: Example, quantization: Quantization, report: ExportReport) -> Example:
    """Return an :class:`Example` with a copy of the module whose linear layers are quantized for XNNPACK."""
    block = blocks_of(quantization)
    module = copy.deepcopy(example.module)

    def fits(part: torch.nn.Module, name: str = "") -> bool:
        return isinstance(part, torch.nn.Linear) and (not block or part.in_features % block == 0)

    linears = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
    count = sum(map(fits, linears))
    if not count:
        raise InvalidArgumentError(
            f"quantize={quantization.weights!r}: {type(module).__qualname__} has no torch.nn.Linear whose number of "
            f'inputs is a multiple of {block or 1}. Leave quantize out, or take 8 bits:\n    quantize="int8"'
        )
    granularity: Any = importlib.import_module("torchao.quantization.granularity")
    api: Any = importlib.import_module("torchao.quantization.quant_api")
    config = api.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, quantization.weights),
        weight_granularity=granularity.PerGroup(block) if block else granularity.PerAxis(0),
    )

    def refused(error: BaseException) -> FlattenError:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return FlattenError(f"torchao cannot quantize {type(module).__qualname__} ({reason}).")

    with raised_as(refused):  # errors of torchao have no common class
        api.quantize_(module, config, filter_fn=fits)
    report.remark(
        f"torchao stored the weights of {count} of {len(linears)} projections in {quantization.weights}, for kernels "
        "of XNNPACK; activations are rounded to 8 bits, embeddings stay as they are."
    )
    return dataclasses.replace(example, module=module)
