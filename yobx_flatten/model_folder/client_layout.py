"""Move files of a folder to the paths that transformers.js expects; write the configuration of onnxruntime-genai."""

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch

from ..core.compare import compare
from ..core.files.document import read_document, read_onnx, read_text
from ..errors import DamagedFileError, InvalidArgumentError, ModelSourceError, ReplayError
from ..export.proof.report import ExportReport
from ..generate.settings import SUBFOLDER
from ..huggingface.cache_names import CACHE, PRESENT
from ..registry.recipe.aliases import TransformersModel
from ..runners.onnx_runner import OnnxRunner
from ..runners.onnx_session import open_session
from ..runners.ports import is_present
from .export_piece import FolderOptions, Layout
from .pieces.genai import ALLOWED, EMBEDDING
from .pieces.tasks import SPEAKS
from .pieces.vision_language import image_token_of
from .source.configuration import change_json, write_json

if TYPE_CHECKING:
    import onnx_ir as ir

# by type of the quantized weights and of the other weights: the dtype name of transformers.js, and the suffix of files
_TYPES = {
    (None, "float32"): ("fp32", ""),
    (None, "float16"): ("fp16", "_fp16"),
    ("int8", "float32"): ("int8", "_int8"),
    ("int4", "float32"): ("q4", "_q4"),
    ("int4", "float16"): ("q4f16", "_q4f16"),
}


def check_layout(layout: str, form: str, task: str, bits: str | None, dtype: str) -> None:
    if layout not in get_args(Layout):
        raise InvalidArgumentError(f"layout must be one of {', '.join(map(repr, get_args(Layout)))}; found {layout!r}.")
    if layout == "flat":
        return
    if form != "onnx":
        raise InvalidArgumentError(f'layout="{layout}" is for ONNX files only. Leave target= and to= out.')
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
    """Merge two decoder files into a third file; return whether the weights are in a separate data file."""
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
    """Return the shape of a value with new axis names, because the merged graphs name the same axis differently."""
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
                    f"{target.name} and the two decoder files that were merged into it return different values: output "
                    f"{name} differs by {compared.difference:.1e}."
                )


# Configuration files of onnxruntime-genai, `genai_config.json` and `audio_processor_config.json`:
#
#     decoder       model                              the file of every layout
#     Whisper       encoder, decoder                   layout="genai": a different split, see `pieces/genai`
#     LLaVA         vision_encoder, embedding,         layout="genai": one additional file, see `pieces/genai`
#                   decoder_model_merged


def write_genai_files(
    folder: pathlib.Path,
    model: TransformersModel,
    task: str,
    reports: Mapping[str, ExportReport],
    shared: Collection[str],
    options: FolderOptions,
) -> None:
    """Write the configuration of onnxruntime-genai if it can run the files; else refuse ``layout="genai"``."""
    is_asked, contents = options.layout == "genai", None
    if task == "text-generation":
        contents = decoder_config(model, reports["model.onnx"].input_names, shared=shared)
    elif is_asked and task == "automatic-speech-recognition":
        contents = sound_config(model, reports["decoder.onnx"].output_names)
        # the values of Whisper's own processor: windows of 25 ms every 10 ms, of sound at 16 kHz
        mel = {"chunk_size": 30, "hop_length": 160, "n_fft": 400, "n_mel": model.config.num_mel_bins}
        steps = [
            {"name": "audio_decoder", "type": "AudioDecoder"},
            {"name": "STFT", "type": "STFTNorm", "attrs": {"n_fft": 400, "frame_length": 400, "hop_length": 160}},
            {"name": "log_mel_spectrogram", "type": "LogMelSpectrum", "attrs": mel},
        ]
        sequence = [{"operation": step} for step in steps]
        write_json(folder / "audio_processor_config.json", {"feature_extraction": {"sequence": sequence}})
    elif is_asked:
        text, inputs = model.config.get_text_config(decoder=True), reports["decoder_model_merged.onnx"].input_names
        contents = decoder_config(model, inputs, shared=shared, config=text)
        if contents is not None:
            vision = {"inputs": {"pixel_values": "pixel_values"}, "outputs": {"image_features": "image_features"}}
            both = {"input_ids": "input_ids", "image_features": "image_features"}
            embedding = {"inputs": both, "outputs": {"inputs_embeds": "inputs_embeds"}}
            contents["model"]["decoder"]["filename"] = "decoder_model_merged.onnx"
            # the library runs the same loop for all of its types with a picture file, an embedding file and a decoder
            contents["model"] |= {
                "type": "gemma3",
                "image_token_id": image_token_of(model),
                "vision": {"filename": "vision_encoder.onnx", **vision},
                "embedding": {"filename": f"{EMBEDDING}.onnx", **embedding},
            }
    if contents is not None:
        write_json(folder / "genai_config.json", contents)
    elif is_asked:
        way = "" if options.optimize else ', or pass optimize="onnxruntime", which keeps keys of all tokens'
        raise InvalidArgumentError(
            f"onnxruntime-genai 0.18 does not run this {type(model).__qualname__}: the library only supports caches "
            f'with keys and values of all tokens. Leave layout="genai" out{way}.'
        )


def _contents(
    model: TransformersModel, kind: str, vocabulary: int, room: int, files: Mapping[str, Any], *, one_memory: bool
) -> dict[str, Any]:
    # files: the entry of each file; one_memory: whether the library updates the cache in place
    config, generation = model.config.get_text_config(decoder=True), model.generation_config
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    first_end = ends[0] if isinstance(ends, list) else ends
    pad = first_end if config.pad_token_id is None else config.pad_token_id
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": ends, "pad_token_id": pad}
    tokens = {name: token for name, token in tokens.items() if token is not None}
    search = {"do_sample": False, "num_beams": 1, "max_length": room, "past_present_share_buffer": one_memory}
    return {
        "model": {"type": kind, **tokens, "context_length": room, "vocab_size": vocabulary, **files},
        "search": {**search, "temperature": 1.0, "top_k": 1, "top_p": 1.0},
    }


def _cache_names(what: str, front: str, side: str = "") -> dict[str, str]:
    return {f"{what}_{part}_names": f"{front}.%d.{side}{part}" for part in ("key", "value")}


def _session(file: str) -> dict[str, Any]:
    return {"session_options": {"log_id": "onnxruntime-genai", "provider_options": []}, "filename": file}


def decoder_config(
    model: TransformersModel, inputs: Sequence[str], *, shared: Collection[str] = (), config: Any = None
) -> dict[str, Any] | None:
    # config: the configuration of the decoder; by default the configuration of the model
    # shared: inputs that may share their memory with an output; the library updates the cache in place if all cache
    # inputs are shared
    # returns: `None` for a model that onnxruntime-genai 0.18 cannot run: its cache has only keys and values, and one
    # key for each token, which a sliding-window layer does not keep
    config = model.config if config is None else config
    fed = {f"{CACHE}.{index}.{part}" for index in range(config.num_hidden_layers) for part in ("key", "value")}
    plain = [name for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids") if name in inputs]
    one_memory = fed == set(shared)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    slides = bool(getattr(config, "sliding_window", None)) and "sliding_attention" in kinds
    if set(inputs) != fed | set(plain) or (slides and not one_memory):
        return None
    room, heads = getattr(config, "max_position_embeddings", None) or 2048, config.num_attention_heads
    decoder = {
        **_session("model.onnx"),
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "inputs": {**{name: name for name in plain}, **_cache_names("past", CACHE)},
        "outputs": {"logits": "logits", **_cache_names("present", PRESENT)},
    }
    # "decoder" is the general type: the library has no own types for most decoders
    return _contents(model, "decoder", config.vocab_size, room, {"decoder": decoder}, one_memory=one_memory)


def sound_config(model: TransformersModel, outputs: Sequence[str]) -> dict[str, Any]:
    # the encoder file returns keys and values for each layer and head of the decoder
    config, heads, layers = model.config, model.config.decoder_attention_heads, model.config.decoder_layers

    def side(file: str) -> dict[str, Any]:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers}
        return {**_session(file), "head_size": config.d_model // heads, "hidden_size": config.d_model, **sizes}

    caches = {**_cache_names("past", CACHE, "decoder."), **_cache_names("cross_past", CACHE, "encoder.")}
    present = _cache_names("cross_present", PRESENT, "encoder.")
    encoder = {
        **side("encoder.onnx"),
        "inputs": {"audio_features": "input_features"},
        "outputs": {"encoder_hidden_states": "last_hidden_state", **present},
    }
    logits = {"logits": ALLOWED if ALLOWED in outputs else "logits"}
    decoder = {
        **side("decoder.onnx"),
        "inputs": {"input_ids": "input_ids", **caches},
        "outputs": {**logits, **_cache_names("present", PRESENT, "decoder.")},
    }
    files, room = {"encoder": encoder, "decoder": decoder}, config.max_target_positions
    return _contents(model, "whisper", config.vocab_size, room, files, one_memory=False)
