"""``yobx-flatten demo``: export small models of real architectures, and print one line of results for each."""

# Zen of Python --> bytes --> example, cases --+
#                                              +--> export_onnx --> replay --> one row of the table
# configuration --> model, random weights -----+

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import io
import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer

from ..core.files.scratch import check_writable
from ..core.terminal.command_line import UserError, progress, say, say_json, table
from ..errors import ReplayError, require
from ..export.calls import export_onnx
from ..export.proof.eager_runs import Case
from ..export.proof.report import ExportReport
from ..huggingface.cache_names import CACHE, PRESENT, cache_of
from ..huggingface.caches.layers import code_of
from ..huggingface.cases import DecodeSizes, decode_inputs

WINDOW = 8
STEPS = 6

# ByT5's vocabulary: three special tokens, then one per byte.
_TOKENS = {"vocab_size": 259, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_DECODER = {
    **_TOKENS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
_ALTERNATING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_DECODER, **_ALTERNATING, "sliding_window": WINDOW}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_DECODER, "sliding_window": WINDOW}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**_TOKENS, **_T5}),
}
"""By name on the command line: a demo model's configuration class, its model class, and configuration arguments."""

EXAMPLE = DecodeSizes(batch=2, past=5, new=3)
CASES = {
    "below the window": DecodeSizes(batch=3, past=4, new=1, source=12),
    "at the window": DecodeSizes(batch=1, past=WINDOW, new=1, source=9),
    "past the window": DecodeSizes(batch=4, past=2 * WINDOW + 3, new=1, source=30),
    "3 tokens at once": DecodeSizes(batch=3, past=WINDOW - 2, new=3, source=5),
    "a padded row": DecodeSizes(batch=2, past=WINDOW + 2, new=1, padding=3, source=16),
}


@dataclasses.dataclass(frozen=True)
class _Row:
    model: str
    layers: str
    leaves: int
    path: pathlib.Path
    report: ExportReport
    failure: str | None = None

    @property
    def differences(self) -> dict[str, float]:
        cases, runtimes = self.report.cases, ("torch.export", "onnxruntime")
        return {r: max((case.max_difference for case in cases if case.runtime == r), default=0.0) for r in runtimes}


def demo(
    output: Annotated[pathlib.Path, typer.Option(metavar="DIR", help="Folder for the ONNX files.")] = pathlib.Path(
        "yobx_flatten_demo"
    ),
    models: Annotated[str, typer.Option(metavar="NAME,...", help=f"Pick from {', '.join(MODELS)}.")] = ",".join(MODELS),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Export small models to ONNX, run them in onnxruntime, and compare with eager PyTorch.

    The models have random weights. Each ONNX file reads the Zen of Python token by token; each call gets the KV cache
    that the previous call returned. Exit status: 0 files and models compute the same values; 1 they do not.
    """
    names = list(dict.fromkeys(name.strip() for name in models.split(",")))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UserError(f"unknown model {', '.join(map(repr, unknown))}; choose from {', '.join(MODELS)}")
    require("transformers", "onnx", "onnxscript", "onnxruntime", purpose="the demo", extra="transformers,onnx")
    check_writable(output, in_parent=False)
    is_new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        import this  # prints the text
    text = codecs.decode(this.s, "rot13").replace("\n\n", "\n")
    rows: list[_Row] = []
    try:
        with progress("building the first model") as show:
            for name in names:
                show(f"building {name}")
                rows.append(_export(name, text, output))
    except KeyboardInterrupt as error:
        if is_new and not any(output.iterdir()):
            output.rmdir()
        written = [row.path.name for row in rows if row.path.exists()]
        found = "interrupted, nothing was written"
        if written:
            are = "is" if len(written) == 1 else "are"
            found = f"interrupted; {', '.join(written)} in {rows[0].path.parent} {are} complete"
        raise type(error)(found) from None
    if json:
        say_json(
            [
                {
                    "model": row.model,
                    "file": str(row.path),
                    "layers": row.layers.replace("\n", ", "),
                    "leaves": row.leaves,
                    "export_seconds": row.report.export_seconds,
                    "onnx_seconds": row.report.onnx_seconds,
                    "bytes": row.report.onnx_bytes,
                    "max_difference": row.differences,
                    "ok": row.failure is None,
                    "failure": row.failure,
                }
                for row in rows
            ]
        )
    else:
        _show(rows, text, output)
    return int(any(row.failure is not None for row in rows))


def _show(rows: Sequence[_Row], text: str, output: pathlib.Path) -> None:
    say(f"Text: the Zen of Python (python -c 'import this'), {len(text.encode())} bytes, one token per byte.\n")
    cells = []
    for row in rows:
        report, largest = row.report, row.differences.items()
        worst = {runtime: f"{one:.1e}{'' if one <= report.tolerance else ' DIFFERS'}" for runtime, one in largest}
        cells.append(
            {
                "model": row.model,
                "cache layers": row.layers,
                "leaves": str(row.leaves),
                "export s": f"{report.export_seconds:.1f}",
                "ONNX s": f"{report.onnx_seconds or 0:.1f}",
                "ONNX MB": f"{(report.onnx_bytes or 0) / 1e6:.2f}",
                "cases": str(sum(case.runtime == "onnxruntime" for case in report.cases)),
                "max diff. torch": worst["torch.export"],
                "max diff. ONNX": worst["onnxruntime"],
            }
        )
    table(list(cells[0]), [list(row.values()) for row in cells])
    say(f"Files: {', '.join(row.path.name for row in rows)} in {output}")
    say(
        f"Cache layers: D keeps all tokens, W{WINDOW} the last {WINDOW} tokens, cross the encoder's tokens; 2x: two "
        f"such layers.\nDifferences are the largest of all outputs, of {len(CASES) + 1} cases each: "
        f"{', '.join(('the example', *CASES))}"
    )
    for row in rows:
        if row.failure is not None:
            say(f"\n{row.model}: {row.failure}")
    if any(row.failure is not None for row in rows):
        return
    names = rows[0].report.input_names
    cache = [name for name in names if name.startswith(CACHE)]
    say(f'\nLoad:  session = onnxruntime.InferenceSession("{rows[0].path.as_posix()}")')
    others = [name for name in names if not name.startswith(CACHE)]
    feeds = f"{', '.join(others)}, {cache[0]} ... {cache[-1]}"
    say(f"Feed:  session.run(None, feeds) with {feeds}; in the next call, pass the outputs {PRESENT}.* as {CACHE}.*")
    say("Read:  docs/ in the repository; `make docs` builds the site")


def _export(name: str, text: str, output: pathlib.Path) -> _Row:
    import transformers

    config_class, model_class, options = MODELS[name]
    config = getattr(transformers, config_class)(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config).eval()
    kwargs = _inputs(model, EXAMPLE, text)
    cases = [Case(title, (), _inputs(model, sizes, text), STEPS) for title, sizes in CASES.items()]
    path, failure = output / f"{name}.onnx", None
    try:
        report = export_onnx(model, (), kwargs, path, cases=cases).report
    except ReplayError as error:
        if not isinstance(error.report, ExportReport):
            raise
        report, failure = error.report, str(error)
    leaves = sum(leaf.startswith(CACHE) for leaf in report.input_names)
    return _Row(name, _layers(cache_of(kwargs)), leaves, path, report, failure)


def _inputs(model: Any, sizes: DecodeSizes, text: str) -> dict[str, Any]:
    tokens = _tokens(text, sizes.batch, sizes.past + sizes.new)
    if model.config.is_encoder_decoder:
        return decode_inputs(model, sizes, tokens=tokens, source=_tokens(text, sizes.batch, sizes.source))
    # positions are inputs, because a padded row does not start in its first column
    names = ("input_ids", "attention_mask", "position_ids", CACHE)
    return decode_inputs(model, sizes, like=dict.fromkeys(names), tokens=tokens)


def _tokens(text: str, rows: int, length: int) -> torch.Tensor:
    """Return token ids (batch, length), one per byte of a text; row ``i`` starts at line ``i`` of the text."""
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(extra_ids=0)
    lines = text.splitlines(keepends=True)
    beginnings = ("".join(lines[row:]) for row in range(rows))
    return torch.tensor([tokenizer(some, add_special_tokens=False)["input_ids"][:length] for some in beginnings])


def _layers(cache: Any) -> str:
    """Count the layers of a KV cache by type: ``2x W8 + 2x D`` is two layers with a window of 8 and two without."""
    if hasattr(cache, "cross_attention_cache"):
        return f"{_layers(cache.self_attention_cache)}\ncross {_layers(cache.cross_attention_cache)}"
    codes = Counter(code_of(layer) for layer in cache.layers)
    return " + ".join(f"{count}x {code}" for code, count in codes.items())
