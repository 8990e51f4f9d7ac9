"""A cell of the table of exporters: make the model, let the exporter write it, verify the files, and judge.

.. code-block:: text

    checkpoint ──> exporter (a separate process, with its libraries) ──> files ──> verify_file next to float32
                                                                                     └─ wrong: also next to float64
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .cases import SkipColumnError
from .oracle_exporters import EXAMPLE, EXPORTERS, export, load
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "PLACES", "RANKS", "TYPES", "judged", "make_checkpoint", "run_type"]

TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "mixtral"),
    *("bert", "roberta", "distilbert", "deberta-v2", "vit", "swin", "wav2vec2", "whisper", "t5", "bart"),
)
"""Ten decoders, with and without a window, and what people export most often of encoders, pictures, sound and both."""

PLACES = {"optimum-onnx": "ORACLE_PYTHON", "mobius-onnx": "ORACLE_LIBRARIES"}
"""Variables that hold a Python with the libraries of an exporter, or a folder with them."""

SECONDS = 900
"""Of the processor, for an export or for a verification."""

RANKS = ("right", "right at some sizes only", "refused", "not written", "does not run", "not judged", "wrong values")
"""Verdicts, best first: an exporter that refuses a model is better than one that writes a wrong file."""


def make_checkpoint(name: str, folder: pathlib.Path) -> None:
    """Write a small model with random weights, a tokenizer, and inputs with what the model returns for them.

    Args:
        name: the type.
        folder: gets them.
    """
    import tokenizers
    import transformers

    from yobx_flatten.model_folder.source.configuration import class_for, small_config

    config = small_config(name)
    if name == "whisper":
        config.max_source_positions = 1500  # exporters write it for 30 seconds of sound
        config.encoder_attention_heads = config.decoder_attention_heads  # as every Whisper has them
    if name == "phi3":
        config.original_max_position_embeddings = config.max_position_embeddings  # another type of positions without
    torch.manual_seed(0)
    model = class_for(config)(config).eval()
    model.save_pretrained(folder)
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({f"<{number}>": number for number in range(259)}, []))
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<0>").save_pretrained(folder)
    torch.manual_seed(1)
    mask = torch.ones(2, 7, dtype=torch.int64)
    text = {"input_ids": torch.randint(4, 259, (2, 7)), "attention_mask": mask}
    inputs = {
        "input_ids": text,
        "pixel_values": {"pixel_values": torch.randn(2, 3, 32, 32)},
        "input_values": {"input_values": torch.randn(2, 4000)},
        "input_features": {"input_features": torch.randn(2, 16, 3000)},
    }[model.main_input_name]
    if model.config.is_encoder_decoder:
        inputs = {**inputs, "decoder_input_ids": torch.randint(4, 259, (2, 5))}
    with torch.no_grad():
        first = model(**inputs, return_dict=False)[0]
    torch.save({"inputs": inputs, "first": first}, folder / EXAMPLE)


def judged(found: Any) -> tuple[str, str]:
    """Return the verdict on a file and why.

    Args:
        found: a `VerifiedFile`.
    """
    report = found.report
    if report is None:
        return "not judged", found.why_not
    failed = report.failed()
    wrong = [case for case in failed if case.error is None or re.match(r"step \d+, output", case.error)]
    fixed = [text for text in report.remarks if text.startswith("the file fixes")]
    if (
        wrong and len(failed) == len(report.cases) and all(case.error for case in failed)
    ):  # such as an encoder without its head
        return "not judged", f"{found.call}: it returns other outputs than the model: {wrong[0].error}"
    if wrong:
        kind = "all cases" if len(failed) == len(report.cases) else ", ".join(case.case for case in wrong)
        return "wrong values", f"{found.call}: {kind}"
    if failed:
        runs = "right at some sizes only" if len(failed) < len(report.cases) else "does not run"
        return runs, f"{found.call}: {', '.join(case.case for case in failed)}: {failed[0].error}"
    # one token a call is what such a decoder is documented as
    if not all(re.search(r"axis 1 of \w*(input|position)_ids at 1$", text) for text in fixed):
        return "right at some sizes only", "; ".join(fixed)
    return "right", "; ".join(fixed)


def _cell(name: str, exporter: str, place: pathlib.Path) -> dict[str, Any]:
    """Export and verify; return the verdict, and what was measured."""
    from yobx_flatten.verify import verify_file

    place = place / exporter.replace(" ", "-")
    for directory in ("model", "out"):
        (place / directory).mkdir(parents=True)
    make_checkpoint(name, place / "model")
    done = _exported(exporter, place)
    result: dict[str, Any] = {"versions": done["versions"], "verdict": done["state"], "why": done["why"]}
    if done["state"] == "written":
        model = load(place / "model")
        for kind in dict.fromkeys((model, model.base_model)):  # an exporter may leave the head out
            report = verify_file(place / "out", kind, explain=False)
            verdicts = {file: judged(one) for file, one in report.files.items()}
            worst = max(verdicts, key=lambda file: RANKS.index(verdicts[file][0]))
            if kind is model or verdicts[worst][0] != "not judged":
                result["verdict"], result["why"] = verdicts[worst]
                result["files"] = {file: verdict for file, (verdict, _) in verdicts.items()}
                result["without_head"] = kind is not model
            if result["verdict"] != "not judged":
                break
        if exporter == "onnxruntime-genai" and result["verdict"] != "right":
            with contextlib.suppress(RuntimeError):  # it wants an end of text within the vocabulary, say
                result["own_runtime"] = _own_runtime(place / "out", model)
            if result["verdict"] == "does not run" and result.get("own_runtime", 1.0) < 1e-4:
                result["verdict"] = "right at some sizes only"  # with the caches that its runtime makes
        result["cases"] = sum(len(one.report.cases) for one in report.files.values() if one.report is not None)
        if result["verdict"] == "wrong values":
            double = load(place / "model").double()
            again = verify_file(place / "out", double.base_model if result["without_head"] else double, explain=False)
            result["file"] = worst
            result["apart"] = _apart(report.files[worst], again.files[worst])
            if not _agree(result["apart"]):
                result["verdict"], result["why"] = "not judged", "float32 and float64 of the model do not agree enough"
    if result["verdict"] in ("other model", "not asked"):
        raise SkipColumnError(result["why"])
    return {"ok": result["verdict"] == "right", **result}


@torch.no_grad()
def _own_runtime(folder: pathlib.Path, model: Any) -> float:
    """How far scores in genai's runtime are from the model's: one row, prompts below and past a window, five steps."""
    import onnxruntime_genai

    opened, off = onnxruntime_genai.Model(str(folder)), 0.0
    for length in (3, 12, 20):
        options = onnxruntime_genai.GeneratorParams(opened)
        options.set_search_options(max_length=64, do_sample=False)
        generator = onnxruntime_genai.Generator(opened, options)
        generator.append_tokens(torch.randint(4, 259, (1, length)).int().numpy())
        for _ in range(5):
            read = torch.tensor(generator.get_sequence(0)).long()[None]
            scores = torch.from_numpy(generator.get_logits()).float()[:, -1]
            off = max(off, float((scores - model(input_ids=read).logits[:, -1]).abs().max()))
            generator.generate_next_token()
    return off


def _apart(single: Any, double: Any) -> dict[str, float]:
    """How far a file is from eager float32 and from eager float64, and how far these are from each other."""
    shown = [case for case in single.report.failed() if case.error is None]
    costs = single.report.yardstick.costs if single.report.yardstick is not None else {}
    worst = max(shown, key=lambda case: case.max_difference, default=None)
    if worst is None:  # outputs of other sizes
        return {}
    same = next(case for case in double.report.cases if case.case == worst.case)
    held = {"float32": worst.max_difference, "float64": same.max_difference}
    return {**held, "between": max(costs.values(), default=float("nan"))}


def _agree(apart: dict[str, float]) -> bool:
    """Whether two computations agree that a file is wrong: each is ten times further from it than from the other."""
    return not apart or min(apart["float32"], apart["float64"]) > 10 * apart["between"]


def _exported(exporter: str, place: pathlib.Path) -> dict[str, Any]:
    """Let an exporter write, in a separate process."""
    folder, out, answer = place / "model", place / "out", place / "exported.json"
    if exporter == "optimum-onnx":
        command = [os.environ[PLACES[exporter]], str(pathlib.Path(__file__).with_name("oracle_exporters.py"))]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [*command, exporter, str(folder), str(out)],
            capture_output=True,
            text=True,
            check=False,
            env=clean,
            preexec_fn=_limit,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if lines:
            return dict(json.loads(lines[-1]))
        return {"versions": {}, "state": "not written", "why": f"exit code {done.returncode}"}
    process = multiprocessing.get_context("fork").Process(target=_export_into, args=(exporter, folder, out, answer))
    process.start()
    process.join()
    if answer.exists():
        return dict(json.loads(answer.read_text("utf-8")))
    ended = f"its process ended with {process.exitcode}"
    why = f"it needs more than {SECONDS} CPU seconds" if process.exitcode in (-9, -24) else ended
    return {"versions": {}, "state": "not written", "why": why}


def _export_into(exporter: str, folder: pathlib.Path, out: pathlib.Path, answer: pathlib.Path) -> None:
    _limit()
    if exporter in PLACES:
        sys.path.insert(0, os.environ[PLACES[exporter]])
    answer.write_text(json.dumps(export(exporter, folder, out)), encoding="utf-8")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def _column(exporter: str) -> Callable[[tuple[str, pathlib.Path]], dict[str, Any]]:
    return lambda cell: _cell(cell[0], exporter, cell[1])


COLUMNS: dict[str, Callable[[tuple[str, pathlib.Path]], dict[str, Any]]] = {name: _column(name) for name in EXPORTERS}


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run cells of one type in this process; see `worker.run_type`."""
    be_quiet()
    run_columns((name, folder), columns, known, events, (COLUMNS, {}))
