"""Fine-tune a model with trained weights next to plain trainers: ``python -m matrix.real_training --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

from .command import add_options, check_options, run_list
from .page import row, rule
from .real_model import MODEL
from .real_training_cases import COLUMNS, KILLED_AFTER, STEPS, TASKS, run_type
from .results import Results, failures

__all__ = ["STEM", "main", "parse", "section_of"]

STEM = "tuned"
_WAY = "real weights, trained"

_SECTION = """## Fine-tuned by one command

`roundpipe train` on a simulated device with limited memory is compared with the Hugging Face `Trainer` (text) and TRL's
`SFTTrainer` (conversations) without a pipeline. Each of them trains {steps} steps of 4 rows with at most 128 tokens,
from the same weights, in the same order, in float32 with AdamW and one thread. The text consists of Python's help
topics; the conversations ask for the first paragraph of each topic. Adapters are LoRA with rank 8. With
`--quantize-aware int4` and `--quantize keep`, 500 of 500 greedy tokens are equal
([measured](benchmarks.md#training-in-the-integers-that-ship)). Recorded in `data/{file}`, with {versions}.

| column | what is measured |
|---|---|
| device | memory limit of the simulated device; the weights alone take 538 MB |
| losses | loss of the first and of the last step |
| held out | loss on rows that are not trained on, before and after |
| difference | largest relative difference of a loss, or of the held-out loss, from the Trainer's; the limit is 1e-5 |
| step | seconds with the pipeline and with the Trainer; the machine was shared with other work |
| host | peak memory of the process in GB, with the pipeline and with the Trainer |
| killed, resumed | killed after {killed} of {steps} steps and resumed; compared with an uninterrupted training |
| int4 | MB after `export OUT --quantize int4 --optimize onnxruntime`; share of equal greedy tokens in one answer |

{rows} These devices have just enough memory for the embedding table as a whole: 226 MB with its gradients, or 113 MB
when the table is frozen (adapters). One [stage](guide/words.md#pipelines) may take 3/10 of a device, because the next
stage is loaded meanwhile and activations need the rest. So training all weights needs at least 755 MB (weights,
gradients and moments take 2,152 MB without a pipeline), and training adapters needs 378 MB. On a smaller device the
table stays in CPU memory: rows of the table are sent to the embedding, and slices of it to the head
([devices](guide/runtime_devices.md)). The largest layer then sets the minimum: 94.4 MB for all weights, and 49.4 MB for
adapters. On a device of 50 MB, training adapters had losses within 2.7e-06 of the Trainer's. On a device of 95 MB,
training all weights had losses within 1.8e-06, in 3 steps of 2 rows with 32 tokens. With `--large-tables whole` and a
tenth of the weights as memory, `roundpipe train` stops with these errors:

{tenth} These are greedy answers to one prompt: before training, after training with the Trainer ("plain") and with the
pipeline, and by the exported int4 folder:

{answers}
{failures}"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.real_training", description=__doc__, allow_abbrev=False)
    add_options(parser, COLUMNS, timeout=7200.0, stem=STEM, kinds="the list")
    options = parser.parse_args(arguments)
    if not MODEL.exists() and not options.failures:
        parser.error(f"there is no {MODEL}: make real fetches it")
    check_options(parser, options, COLUMNS, f"{STEM}-{importlib.metadata.version('transformers')}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_list(parse(arguments), _WAY, COLUMNS, list(TASKS), run_type, section_of)


def section_of(results: Results, file: str) -> str:
    """Return the section of the page.

    Args:
        results: the results of the trainings.
        file: the name of the file they are from.
    """
    names = [name for name in TASKS if name in results.types]
    lines = [row(["task", *_SHOWN]), rule(1 + len(_SHOWN))]
    answers: list[str] = []
    refused: dict[str, list[str]] = {}
    for name in names:
        held = results.types[name]["columns"]
        passed = {column: result for column, result in held.items() if result["ok"]}
        lines.append(row([name, *(show(passed) for show in _SHOWN.values())]))
        if "a tenth" in passed and not passed["a tenth"]["trains"]:
            refused.setdefault(passed["a tenth"]["said"], []).append(name)
        if "trained" in passed:
            said = _answers(passed)
            answers += [
                f"- {name}, {', '.join(w for w in said if said[w] == one)}: {one}"
                for one in dict.fromkeys(said.values())
            ]
    failed = [
        f"- {column}, {', '.join(found)}: {reason}"
        for column in COLUMNS
        for reason, found in failures(results, [column]).get(column, {}).items()
    ]
    return _SECTION.format(
        steps=STEPS,
        killed=KILLED_AFTER,
        file=file,
        versions=", ".join(f"{library} {version}" for library, version in results.versions.items()),
        rows="\n".join(lines) + "\n",
        tenth="\n".join(f"- {', '.join(found)}: `{said}`" for said, found in refused.items()) + "\n",
        answers="\n".join(answers),
        failures="\n### What fails\n\n" + "\n".join(failed) + "\n" if failed else "",
    )


def _answers(passed: dict[str, dict[str, Any]]) -> dict[str, str]:
    plain, pipeline = passed["trained"]["plain"], passed["trained"]["pipeline"]
    found = {"before": plain["answer_before"], "plain": plain["answer"], "pipeline": pipeline["answer"]}
    if "exported" in passed:
        found["int4"] = passed["exported"]["answer"]
    return {who: " ".join(said.split()) for who, said in found.items()}


def _of(column: str, show: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, dict[str, Any]]], str]:
    """A cell of a column of results, which is empty where that did not pass."""
    return lambda passed: show(passed[column]) if column in passed else ""


def _losses(held: dict[str, Any]) -> str:
    losses = held["pipeline"]["losses"]
    return f"{losses[0]:.4f}, {losses[-1]:.4f}"


def _both(name: str, form: str, scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    return lambda held: ", ".join(format(held[side][name] / scale, form) for side in ("pipeline", "plain"))


_SHOWN: dict[str, Callable[[dict[str, dict[str, Any]]], str]] = {
    "device": _of("trained", lambda held: str(held["memory"]).replace("MB", " MB")),
    "losses": _of("trained", _losses),
    "held out": _of(
        "trained", lambda held: f"{held['plain']['held_out_before']:.4f}, {held['pipeline']['held_out']:.4f}"
    ),
    "difference": _of("trained", lambda held: f"{held['difference']:.1e}"),
    "step": _of("trained", _both("seconds", ".1f")),
    "host": _of("trained", _both("peak_bytes", ".1f", 1e9)),
    "killed, resumed": _of("resumed", lambda held: "bitwise"),
    "int4": _of("exported", lambda held: f"{held['bytes'] / 1e6:.0f}, {held['tokens']:.0%}"),
}


if __name__ == "__main__":
    sys.exit(main())
