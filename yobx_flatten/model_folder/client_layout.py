"""Move the files of an exported folder to the paths that transformers.js expects."""

# flat                    transformers.js
# model.onnx              onnx/model.onnx, model_fp16.onnx, model_int8.onnx, model_q4.onnx, model_q4f16.onnx
# model.onnx.data         onnx/model.onnx_data
# decoder_model.onnx      onnx/decoder_model.onnx, and onnx/decoder_model_merged.onnx of both decoder files
# chat_template.jinja     also in tokenizer_config.json
#                         transformers.js_config in config.json: the type, and which files have data next to them

from __future__ import annotations

import collections
import hashlib
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..core.compare import compare
from ..core.files.document import read_document, read_onnx, read_text
from ..errors import DamagedFileError, InvalidArgumentError, ModelSourceError, ReplayError
from ..generate.settings import SUBFOLDER
from ..huggingface.cache_names import CACHE, PRESENT
from ..runners.onnx_runner import OnnxRunner
from ..runners.onnx_session import open_session
from ..runners.ports import is_present
from .pieces.tasks import SPEAKS
from .source.configuration import change_json, write_json

if TYPE_CHECKING:
    import onnx_ir as ir

Layout = Literal["flat", "transformers.js", "genai"]
# sentence-transformers, optimum and (for decoders) onnxruntime-genai open a flat folder
LAYOUTS: tuple[Layout, ...] = ("flat", "transformers.js", "genai")

# by type of the quantized weights and of the other weights: the dtype name of transformers.js, and the suffix of files
_TYPES = {
    (None, "float32"): ("fp32", ""),
    (None, "float16"): ("fp16", "_fp16"),
    ("int8", "float32"): ("int8", "_int8"),
    ("int4", "float32"): ("q4", "_q4"),
    ("int4", "float16"): ("q4f16", "_q4f16"),
}


def check_layout(layout: str, form: str, task: str, bits: str | None, dtype: str) -> None:
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; found {layout!r}.")
    if layout == "flat":
        return
    if form != "onnx":
        raise InvalidArgumentError(f'layout="{layout}" is for ONNX files. Remove the arguments target= and to=.')
    if layout == "genai":  # see `plan.check_genai`
        return
    if task in SPEAKS:
        raise InvalidArgumentError(
            f"transformers.js expects one file for a speech decoder, but folders for {task} have two. Leave "
            f'layout="{layout}" out.'
        )
    # "keep" is checked as "int4"; `apply_layout` counts whether most bytes are int8 or int4
    if ("int4" if bits == "keep" else bits, dtype) not in _TYPES:
        raise InvalidArgumentError(
            f"transformers.js has no dtype name for {bits or dtype} weights of a {dtype} model. The dtype names of "
            f"transformers.js are {', '.join(name for name, _ in _TYPES.values())}."
        )


def apply_layout(folder: pathlib.Path, names: Sequence[str], bits: str | None, dtype: str) -> list[str]:
    if bits == "keep":  # the type of most of the quantized weights
        sizes: collections.Counter[int] = collections.Counter()
        for graph in (read_onnx(folder / name, failure=DamagedFileError).graph for name in names):
            stored = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
            for node in graph.node:
                for attribute in (one for one in node.attribute if one.name == "bits"):
                    sizes[attribute.i] += max(stored.get(name, 0) for name in node.input)
        bits = "int8" if sizes[8] > sizes[4] else "int4"
    kind, end = _TYPES[bits, dtype]
    (folder / SUBFOLDER).mkdir()
    made, data = [], {}
    for name in names:
        target = folder / SUBFOLDER / f"{pathlib.PurePosixPath(name).stem}{end}.onnx"
        if (folder / f"{name}.data").is_file():
            model = read_onnx(folder / name, failure=DamagedFileError)
            for entry in (entry for tensor in _tensors(model.graph) for entry in tensor.external_data):
                if entry.key == "location":
                    entry.value = f"{target.name}_data"
            (folder / name).write_bytes(model.SerializeToString())
            (folder / f"{name}.data").rename(f"{target}_data")
            data[target.name] = 1
        (folder / name).rename(target)
        made.append(f"{SUBFOLDER}/{target.name}")
    first, later, merged = (
        folder / SUBFOLDER / f"{stem}{end}.onnx" for stem in ("decoder_model", "decoder_with_past_model", MERGED)
    )
    if later.is_file():
        if merge_decoders(first, later, merged):
            data = {name: 1 for name in data if name not in (first.name, later.name)} | {merged.name: 1}
        made.append(f"{SUBFOLDER}/{merged.name}")
    stated: dict[str, Any] = {"dtype": kind} | ({"use_external_data_format": data} if data else {})
    change_json(folder / "config.json", {"transformers.js_config": stated})
    template = folder / "chat_template.jinja"
    if template.is_file() and (folder / "tokenizer_config.json").is_file():
        change_json(folder / "tokenizer_config.json", {"chat_template": read_text(template, failure=ModelSourceError)})
    genai = folder / "genai_config.json"
    if genai.is_file():
        contents = read_document(genai, dict[str, Any], failure=ModelSourceError)
        contents["model"]["decoder"]["filename"] = made[0]
        write_json(genai, contents)
    return made


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for below in (attribute.g, *attribute.graphs):
                yield from _tensors(below)


MERGED = "decoder_model_merged"  # the file that joins the decoder for the prompt and the decoder for later tokens


def merge_decoders(first: pathlib.Path, later: pathlib.Path, target: pathlib.Path) -> bool:
    """Merge two decoder files into a third with the same weights; return whether weights are in a data file."""
    import onnx_ir as ir

    models = ir.load(first), ir.load(later)
    values: dict[str, ir.Value] = {}  # the weights of both graphs; equal weights are shared
    known: dict[tuple[object, ...], str] = {}  # names by type, shape and digest
    renamed: list[dict[str, str]] = []  # for each graph, the new names of its weights by old names
    for graph in (model.graph for model in models):
        renamed.append({})
        for name, value in [*graph.initializers.items()]:
            const = value.const_value
            assert const is not None
            key = (const.dtype, tuple(const.shape), hashlib.blake2b(const.tobytes()).digest())
            if key not in known:
                known[key] = name if name not in values else f"{name}.{len(values)}"
                values[known[key]] = ir.Value(name=known[key], shape=value.shape, type=value.type, const_value=const)
            renamed[-1][name] = known[key]
            value.replace_all_uses_with(values[known[key]], replace_graph_outputs=True)
            graph.initializers.pop(name)
    weights = [*values.values()]
    merged = _merged(*models, weights)
    has_data = any(isinstance(value.const_value, ir.ExternalTensor) for value in weights)
    ir.save(merged, target, external_data=f"{target.name}_data" if has_data else None)
    if has_data:  # all three files read the external data of the third
        stored = {one.name: one for one in read_onnx(target, failure=DamagedFileError).graph.initializer}
        for path, names in zip((first, later), renamed, strict=True):
            model = read_onnx(path, failure=DamagedFileError)
            for tensor in model.graph.initializer:
                name = tensor.name
                tensor.CopyFrom(stored[names[name]])
                tensor.name = name
            path.write_bytes(model.SerializeToString())
            path.with_name(f"{path.name}_data").unlink(missing_ok=True)  # a small file has no data file
    _check(first, later, target)
    return has_data


def _merged(first_model: ir.Model, later_model: ir.Model, weights: Sequence[ir.Value]) -> ir.Model:
    import onnx_ir as ir

    first, later = first_model.graph, later_model.graph
    outputs = [value.name for value in first.outputs]
    inputs: dict[str, ir.Value] = {}
    for graph in (first, later):
        for value in [*graph.inputs]:
            assert value.name is not None
            if value.name not in inputs:
                inputs[value.name] = ir.Value(name=value.name, shape=_free(value), type=value.type)
            value.replace_all_uses_with(inputs[value.name], replace_graph_outputs=True)
        graph.inputs.clear()
    made = {value.name: value for value in later.outputs}
    # the second file does not return the encoder's keys and values, which do not change
    for name in outputs:
        if name not in made:
            assert name is not None
            kept = ir.node("Identity", [inputs[name.replace(PRESENT, CACHE, 1)]])
            later.append(kept)
            made[name] = kept.outputs[0]
    results = [ir.Value(name=value.name, shape=_free(value), type=value.type) for value in first.outputs]
    branches = ("first", first, first.outputs[:]), ("later", later, [made[name] for name in outputs])
    for branch, graph, found in branches:
        graph.outputs.clear()
        graph.outputs.extend(found)
        graph.name = branch
        for node in graph.all_nodes():
            for value in node.outputs:  # names in a branch must differ from names in the main graph
                value.name = f"{branch}.{value.name}"
    past = next(value for name, value in inputs.items() if name.startswith(f"{CACHE}."))
    length = ir.node("Shape", [past], {"start": 2, "end": 3}, name="length of the past")
    zero = ir.node("Constant", [], {"value_ints": [0]})
    empty = ir.node("Equal", [length.outputs[0], zero.outputs[0]])
    axes = ir.node("Constant", [], {"value_ints": [0]})
    is_empty = ir.node("Squeeze", [empty.outputs[0], axes.outputs[0]])
    graphs = {"then_branch": ir.AttrGraph("then_branch", first), "else_branch": ir.AttrGraph("else_branch", later)}
    chosen = ir.Node("", "If", [is_empty.outputs[0]], attributes=[*graphs.values()], outputs=results)
    graph = ir.Graph(
        [*inputs.values()],
        results,
        nodes=[length, zero, empty, axes, is_empty, chosen],
        initializers=weights,
        opset_imports={**first.opset_imports, **later.opset_imports},
        name="decoder",
    )
    functions = [*first_model.functions.values(), *later_model.functions.values()]
    return ir.Model(graph, ir_version=first_model.ir_version, functions=functions)


def _free(value: ir.Value) -> ir.Shape | None:
    """Return a value's shape with new axis names, because the merged graphs have different names for the same axis."""
    import onnx_ir as ir

    if value.shape is None:
        return None
    sizes = enumerate(value.shape)
    return ir.Shape([dim if isinstance(dim, int) and dim > 1 else f"{value.name}_{axis}" for axis, dim in sizes])


def _check(first: pathlib.Path, later: pathlib.Path, target: pathlib.Path) -> None:
    begin, go_on, merged = (
        OnnxRunner(open_session(path, caller="export_folder"), path.name) for path in (first, later, target)
    )
    given, drawn = {}, torch.Generator().manual_seed(0)
    for name, shape, dtype in begin.ports.values():
        sizes = [2 if axis == 0 else size or 4 for axis, size in enumerate(shape)]
        if dtype == torch.int64:
            low, high = (1, 2) if "mask" in name else (4, 8)
            given[name] = torch.randint(low, high, sizes, generator=drawn)
        else:
            given[name] = torch.randn(sizes, generator=drawn).to(dtype)
    made = begin.run(given)
    past = {name.replace(PRESENT, CACHE, 1): value for name, value in made.items() if is_present(name)}
    empty = {name: value[:, :, :0] for name, value in past.items()}
    following = {**given, "input_ids": given["input_ids"][:, :1], **past}
    for expected, inputs in ((made, {**given, **empty}), (go_on.run(following), following)):
        found = merged.run(inputs)
        for name, value in expected.items():
            # within tolerances, because onnxruntime fuses operators differently inside a branch
            compared = compare(value, found[name], "rows")
            if not compared:
                raise ReplayError(
                    f"{target.name} differs from the two files that it joins: {name} differs by "
                    f"{compared.difference:.1e}."
                )
