"""Lay out a folder's files where transformers.js looks for them.

.. code-block:: text

    flat                    transformers.js
    model.onnx              onnx/model.onnx, model_fp16.onnx, model_int8.onnx, model_q4.onnx, model_q4f16.onnx
    model.onnx.data         onnx/model.onnx_data
    decoder_model.onnx      onnx/decoder_model.onnx, and onnx/decoder_model_merged.onnx of both decoder files
    chat_template.jinja     also in tokenizer_config.json
                            transformers.js_config in config.json: the type, and which files have data next to them
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ..errors import DamagedFileError, InvalidArgumentError, ModelSourceError
from ..files.document import read_document, read_text
from ..files.onnx_data import read_onnx
from ..generate.layout import SUBFOLDER
from .merged_decoder import MERGED, merge_decoders
from .pieces.spoken import spoken_pieces
from .pieces.tasks import TASKS

Layout = Literal["flat", "transformers.js", "genai"]
LAYOUTS: tuple[Layout, ...] = ("flat", "transformers.js", "genai")
"""A flat folder is opened by sentence-transformers, optimum and, where it is a decoder, onnxruntime-genai."""

# by weights of few bits and type of the others: what transformers.js calls it, and the end of the name
_TYPES = {
    (None, "float32"): ("fp32", ""),
    (None, "float16"): ("fp16", "_fp16"),
    ("int8", "float32"): ("int8", "_int8"),
    ("int4", "float32"): ("q4", "_q4"),
    ("int4", "float16"): ("q4f16", "_q4f16"),
}

# weights that a file keeps as they were stored are named after those that most of its bytes are
_STORED: dict[str | None, str | None] = {"keep": "int4"}


def check_layout(layout: str, form: str, task: str, bits: str | None, dtype: str) -> None:
    """Refuse a layout that its client would not open."""
    # bits: the weights in few bits; `None` without
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; found {layout!r}.")
    if layout == "flat":
        return
    if form != "onnx":
        raise InvalidArgumentError(f'layout="{layout}" is for ONNX files: leave target and to out.')
    if layout == "genai":  # names of files are those of a flat folder; see `genai_files`
        return
    if TASKS[task] is spoken_pieces:
        raise InvalidArgumentError(
            f"transformers.js reads a decoder of speech that is one file, and folders for {task} have two. Leave "
            f'layout="{layout}" out.'
        )
    if (_STORED.get(bits, bits), dtype) not in _TYPES:
        raise InvalidArgumentError(
            f"transformers.js has no name for files of {bits or dtype} with {dtype}. It has "
            f"{', '.join(name for name, _ in _TYPES.values())}."
        )


def apply_layout(folder: pathlib.Path, names: Sequence[str], bits: str | None, dtype: str) -> list[str]:
    """Give the files of a folder the places in which transformers.js looks for them."""
    # bits: the weights in few bits; `None` without
    kind, end = _TYPES[_most_bits([folder / name for name in names]) if bits in _STORED else bits, dtype]
    (folder / SUBFOLDER).mkdir()
    made, data = [], {}
    for name in names:
        target = folder / SUBFOLDER / f"{pathlib.PurePosixPath(name).stem}{end}.onnx"
        if (folder / f"{name}.data").is_file():
            _point_to(folder / name, f"{target.name}_data")
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
    _add(folder / "config.json", {"transformers.js_config": stated})
    template = folder / "chat_template.jinja"
    if template.is_file() and (folder / "tokenizer_config.json").is_file():
        _add(folder / "tokenizer_config.json", {"chat_template": read_text(template, failure=ModelSourceError)})
    genai = folder / "genai_config.json"
    if genai.is_file():
        contents = read_document(genai, dict[str, Any], failure=ModelSourceError)
        contents["model"]["decoder"]["filename"] = made[0]
        genai.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    return made


def _most_bits(paths: Sequence[pathlib.Path]) -> str:
    """The bits of the weights that take most bytes, of files that keep those of a checkpoint."""
    sizes: collections.Counter[int] = collections.Counter()
    for path in paths:
        graph = read_onnx(path, failure=DamagedFileError).graph
        stored = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name == "bits":
                    sizes[attribute.i] += max(stored.get(name, 0) for name in node.input)
    return "int8" if sizes[8] > sizes[4] else "int4"


def _add(path: pathlib.Path, entries: dict[str, Any]) -> None:
    contents = read_document(path, dict[str, Any], failure=ModelSourceError, finite=False)
    path.write_text(json.dumps({**contents, **entries}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _point_to(path: pathlib.Path, data: str) -> None:
    """Let a file find its weights under another name."""
    model = read_onnx(path, failure=DamagedFileError)
    for tensor in _tensors(model.graph):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data
    path.write_bytes(model.SerializeToString())


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield the tensors of a graph, and of those inside it."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for below in (attribute.g, *attribute.graphs):
                yield from _tensors(below)
