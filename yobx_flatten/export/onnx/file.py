"""Write a program to an ONNX file in a hidden folder, and move the file to its path after a successful check."""

from __future__ import annotations

import copy
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument

from ...core.files.document import data_files_of
from ...core.files.scratch import data_path, move_in, publish_files
from ...errors import FlattenError, InvalidArgumentError
from ...errors.failures import without_records
from ...huggingface.cache_names import CACHE, PRESENT
from ...huggingface.layer_weights import Reader
from ...runners.ports import FIRST
from ...trace.onnx_repairs import ir
from ..flat_program import decompose_untranslated, flat_program
from ..traced import Traced
from .rewrite.attention import fuse_attention, put_tokens_first
from .rewrite.graph import join_projections, keep_last_scores, optimize_graph, repair_graph, sizes_of, text_of_size
from .rewrite.group_query_attention import share_cache
from .weights import read_lazily, write_weights

LARGE = 2**28
"""Weights of at least this many bytes in total are written to a second file next to the ONNX file."""


# The ONNX exporter logs for four operators of torchvision that torchvision is not installed, also for models that do
# not use these operators. This package reports a failed conversion of the opset instead of a logged traceback.
_NOISE = {
    "torch.onnx._internal.exporter._registration": "torchvision is not installed",
    "torch.onnx._internal.exporter._compat": "Setting ONNX exporter to use operator set version",
    "onnxscript.version_converter": "",
}


def convert(
    traced: Traced,
    axes: Mapping[tuple[str, int], str],
    *,
    opset: int | None,
    fuse: bool = False,
    share: bool = False,
    by_torch: bool = False,
    readers: Mapping[str, Reader] | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
    rooms: Mapping[str, str] | None = None,
) -> torch.onnx.ONNXProgram:
    """Convert a program to ONNX, inside a ``register_flattening_functions`` block."""
    # axes: names that the caller gave to axes, by input and axis
    # fuse: whether attention becomes one operator with the cache as its input, which needs opset 23
    # share: whether attention becomes onnxruntime's operator, which updates the cache in place
    # by_torch: whether torch decomposes the whole program, instead of only the operators without a translation
    # readers: functions that read the weights without data in the program, by name of the weight
    # rooms: matrices of adapters that become optional inputs, see `adapters.rooms_in`
    with without_records(_NOISE), warnings.catch_warnings():
        # torch 2.13 uses its own deprecated class LeafSpec when it copies a TreeSpec
        warnings.filterwarnings("ignore", r".isinstance\(treespec, LeafSpec\). is deprecated", FutureWarning)
        converted = torch.onnx.export(
            traced.program if by_torch else _decomposed_where_needed(traced.program),
            opset_version=opset,
            dynamo=True,
            verbose=False,
            optimize=False,
            custom_translation_table=dict(translations or {}),
        )
    assert converted is not None  # only the TorchScript exporter returns None
    found = converted.model.opset_imports.get("")
    if opset is not None and found != opset:
        raise InvalidArgumentError(
            f"opset_version={opset}: torch's exporter cannot write this version for this model, and wrote "
            f"{found}. Pass opset_version={found}, or None to let the exporter choose. No file was kept."
        )
    read_lazily(converted.model, readers or {})
    graph = converted.model.graph
    own = len(graph.inputs)
    open_rooms(converted.model, rooms or {})
    with without_records({"onnx_ir.passes.common.initializer_deduplication": "Skipped deduplication of initializer"}):
        optimize_graph(converted.model)
    # after the passes, since one pass splits a value that is both an input and an output
    for values, names in ((graph.inputs[:own], traced.input_names), (graph.outputs, traced.output_names)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    repair_graph(converted.model)
    if fuse:
        fuse_attention(converted.model)
    if share:
        share_cache(converted.model)
        join_projections(converted.model)
    if fuse:
        put_tokens_first(converted.model)
    keep_last_scores(converted.model)
    placeholders = [node.meta.get("val") for node in traced.program.graph.find_nodes(op="placeholder")]
    dims: list[Any] = [dim for value in placeholders if isinstance(value, torch.Tensor) for dim in value.shape]
    sizes = {str(dim): dim.node.hint for dim in dims if isinstance(dim, torch.SymInt) and dim.node.has_hint()}
    name_axes(converted.model, axes, sizes)
    return converted


def _decomposed_where_needed(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose ``run_decompositions``, which ``torch.onnx.export`` calls, decomposes nodes one by one."""
    given = (spec.arg for spec in program.graph_signature.output_specs)
    if any(arg.value is not None for arg in given if isinstance(arg, ConstantArgument)):
        program = flat_program(program)  # the exporter refuses numbers and texts among the outputs
    kind = type(program)

    class Shortened(kind):  # type: ignore[valid-type, misc] # a class that is known at run time
        def run_decompositions(self, decomp_table: dict[Any, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            found = None if decomp_table is None or args or kwargs else decompose_untranslated(self, decomp_table)
            return super().run_decompositions(decomp_table, *args, **kwargs) if found is None else found

    shortened = copy.copy(program)
    shortened.__class__ = Shortened
    return shortened


class UnprovenFile:
    """An ONNX file whose outputs are not checked yet, in a hidden folder next to its final path."""

    def __init__(self, target: pathlib.Path, folder: pathlib.Path) -> None:
        self.target, self.folder = target, folder
        self.path = folder / target.name  # the file refers to its weights by their final name

    def save(self, model: ir.Model) -> int:
        """Write an ``onnx_ir.Model``; return the number of bytes written, including a separate file of weights."""
        # protobuf copies the weights in the first file; weights in the second file are written one by one
        weights = model.graph.initializers.values()
        if sum(value.const_value.nbytes for value in weights if value.const_value is not None) < LARGE:
            ir.external_data.load_to_model(model)  # if the model was loaded from two files
        else:
            write_weights(model, data_path(self.path, self.target))
        ir.save(model, self.path)
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def replace_by(self, model: ir.Model) -> int:
        """Replace the file by a model, which may read its weights from the old file; return the new size in bytes."""
        old = [file for file in self.folder.iterdir() if file.is_file()]
        other = UnprovenFile(self.target, self.folder / "replacement")
        other.folder.mkdir()
        size = other.save(model)
        for file in old:
            file.unlink()
        move_in(other.folder, self.folder)
        other.folder.rmdir()
        return size

    def publish(self) -> None:
        publish_files(self.folder, self.target, data_files_of(self.target) - data_files_of(self.path))

    def keep(self, folder: pathlib.Path) -> pathlib.Path:
        move_in(self.folder, folder)
        return folder / self.path.name


_SUM = re.compile(r"(\w+) \+ (past_\w+)")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_CACHE = re.compile(rf"{CACHE}\.(\d+)\.(?:(decoder|encoder)\.)?(key|value)")
_ENCODER = ("encoder_hidden_states", "encoder_outputs.", "encoder_attention_mask", "decoder_input_ids")


def name_axes(model: ir.Model, chosen: Mapping[tuple[str, int], str], sizes: Mapping[str, int]) -> None:
    """Rename the dynamic axes of an ONNX graph to the names that optimum uses."""
    # chosen: names that the caller gave to axes, by input and axis
    # sizes: the size of each symbol in the example, if it is known
    graph = model.graph
    inputs, outputs = (
        {one.name: [text_of_size(dim) for dim in one.shape] for one in values if one.name and one.shape is not None}
        for values in (graph.inputs, graph.outputs)
    )
    parts = _parts(inputs, outputs)
    # a name for an axis of the tokens also applies to the same axis of the mask
    own = {parts[place]: name for place, name in chosen.items() if place in parts}
    names: dict[str, str] = {}
    for place, name in (*chosen.items(), *((place, own.get(part, part)) for place, part in parts.items())):
        shape = inputs.get(place[0], [])
        symbol = shape[place[1]] if place[1] < len(shape) else None
        if not isinstance(symbol, str) or not _SYMBOL.fullmatch(symbol) or symbol in names:
            continue
        shared = [other for other, known in names.items() if known == name]
        if all(sizes.get(other) == sizes.get(symbol) for other in shared):
            names[symbol] = name
    if not names:
        return
    whole: dict[str, str] = {}  # by sum of axis names, such as "past + new": the name of the mask's length
    lengths = {value.name: value.shape for value in graph.inputs if value.shape is not None}
    for mask, tokens in (("attention_mask", "input_ids"), ("decoder_attention_mask", "decoder_input_ids")):
        for read in (tokens, tokens.replace("input_ids", "inputs_embeds")):
            if read not in lengths or mask not in lengths or len(lengths[mask]) != 2:
                continue
            total, new = (names.get(str(text_of_size(lengths[name][1]))) for name in (mask, read))
            for past in set(names.values()):
                if total and new and past.startswith("past_") and past.endswith("sequence_length"):
                    whole[f"{past} + {new}"] = total
    computed = (value for node in graph.all_nodes() for value in node.outputs)
    for value in {id(value): value for value in (*graph.inputs, *graph.outputs, *computed)}.values():
        if value.shape is not None:
            spelled = [_format(dim, names, whole) for dim in value.shape]
            if spelled != [text_of_size(dim) for dim in value.shape]:
                value.shape = ir.Shape(spelled)


def _parts(inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]]) -> dict[tuple[str, int], str]:
    """Return the name of each input axis of a Hugging Face model, such as ``batch_size``, by input and axis."""
    has_encoder = any(name.startswith(_ENCODER) for name in inputs) or any(".encoder." in name for name in inputs)
    cached = any(_CACHE.fullmatch(name) for name in inputs)
    own, past = ("decoder_sequence_length", "past_decoder_") if has_encoder else ("sequence_length", "past_")
    total = ("total_decoder_sequence_length" if has_encoder else "total_sequence_length") if cached else own
    read = {"decoder_input_ids": own, "decoder_inputs_embeds": own, "decoder_attention_mask": total}
    if "decoder_input_ids" in inputs or "decoder_inputs_embeds" in inputs:
        read |= dict.fromkeys(("input_ids", "inputs_embeds", "attention_mask"), "encoder_sequence_length")
        parts_of_cache = [match for match in map(_CACHE.fullmatch, inputs) if match]
        if "input_ids" in inputs and cached and all(match[2] is None for match in parts_of_cache):
            # a cache without encoder and decoder parts holds tokens of `input_ids`, and the mask covers the cache and
            # the new tokens (DiffusionGemma)
            past, read["attention_mask"] = "past_encoder_", "total_encoder_sequence_length"
    else:
        read |= {"input_ids": own, "inputs_embeds": own, "position_ids": own, "token_type_ids": own}
        read["attention_mask"] = total
    of_encoder = "encoder_hidden_states", "encoder_outputs.last_hidden_state", "encoder_attention_mask"
    read |= dict.fromkeys(of_encoder, "encoder_sequence_length")
    heard = {"input_values": "audio_length", "input_features": "frames"}
    parts: dict[tuple[str, int], str] = {}
    for name, shape in inputs.items():
        if name in read and len(shape) in (2, 3):
            parts |= {(name, 0): "batch_size", (name, 1): read[name]}
            if len(shape) == 3:
                parts[name, 2] = "hidden_size"
        if name in heard:
            parts |= {(name, axis): heard[name] if axis else "batch_size" for axis in range(len(shape))}
        found = _CACHE.fullmatch(name)
        if found and len(shape) == 4:
            layer, side, part = found.groups()
            parts[name, 0] = "batch_size"
            if side == "encoder":
                parts[name, 2] = "encoder_sequence_length_out"
                continue
            grown = outputs.get(f"{PRESENT}.{layer}.{side + '.' if side else ''}{part}")
            slides = grown is not None and "Min(" in str(grown[2])
            parts[name, 2] = past + ("window_length" if slides else "sequence_length")
    if len(inputs.get("pixel_values", ())) == 4:  # after the texts, since texts and images may share a symbol
        axes = "images" if "input_ids" in inputs else "batch_size", "channels", "height", "width"
        parts |= {("pixel_values", axis): part for axis, part in enumerate(axes)}
        both = {inputs[name][0] for name in ("input_ids", "pixel_values") if isinstance(inputs.get(name, [0])[0], str)}
        # a score for each pair, as in CLIP
        if len(both) == 2 and any(both <= set(shape) for shape in outputs.values()):
            parts |= dict.fromkeys([place for place, part in parts.items() if part == "batch_size"], "texts")
    # sliding windows of different symbolic sizes get numbers
    windows = {place: inputs[place[0]][place[1]] for place, part in parts.items() if part.endswith("window_length")}
    numbers = {symbol: number for number, symbol in enumerate(dict.fromkeys(windows.values()), 1)}
    for place, symbol in windows.items():
        parts[place] += f"_{numbers[symbol]}" if numbers[symbol] > 1 else ""
    return parts


def _format(dim: int | ir.SymbolicDim, names: Mapping[str, str], whole: Mapping[str, str]) -> int | str | None:
    text = text_of_size(dim)
    if not isinstance(text, str):
        return text
    text = _SYMBOL.sub(lambda found: names.get(found[0], found[0]), text)
    # torch orders a sum by its symbols, whose numbers follow the names of the arguments
    text = _SUM.sub(r"\2 + \1", text)
    return whole.get(text, text)


def open_rooms(model: ir.Model, rooms: Mapping[str, str]) -> None:
    """Make the LoRA matrices of an ONNX graph optional inputs; without an adapter, the LoRA rank is 0."""
    # rooms: name of the input by name of the matrix
    graph = model.graph
    for name, given in rooms.items():
        value = graph.initializers.get(name)
        if value is None or value.const_value is None:  # the matrix belongs to another file of the model
            continue
        rank = f"{given.rpartition('.')[0]}.rank"
        rows, columns = sizes_of(value.const_value)
        is_first = given.endswith(FIRST)
        empty = numpy.zeros((rows, 0) if is_first else (0, columns), value.const_value.dtype.numpy())
        graph.initializers.pop(name)
        value.name, value.const_value = given, ir.tensor(empty, name=given)
        value.shape = ir.Shape([rows, rank] if is_first else [rank, columns])
        graph.register_initializer(value)
        graph.inputs.append(value)
        # the shapes of LoRA products have the rank, because onnxruntime shares memory by declared shapes
        for node, place in value.uses() if is_first else ():
            product = node.outputs[0]
            if node.op_type != "MatMul" or place != 1 or product.shape is None:
                raise FlattenError(
                    f"The {node.op_type} node {node.name} cannot read the LoRA matrix {value.name} as an input of the "
                    "ONNX file: the matrix must be the second input of a MatMul node whose output shape is known."
                )
            product.shape = ir.Shape([*product.shape[:-1], rank])
