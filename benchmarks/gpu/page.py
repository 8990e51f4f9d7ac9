"""The tables of a day: for the terminal, and as the page docs/gpu.md with the lines of README and install page."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.records import Records
from benchmarks.gpu.rows import ROWS, Row
from yobx_flatten.errors.failures import format_bytes, table

__all__ = ["DATA", "Day", "row_lines", "store", "write_page"]

_ROOT = Path(__file__).parents[2]
DATA = _ROOT / "docs" / "data" / "gpu.json"
_BEGIN, _END = "<!-- begin of the state on GPUs -->", "<!-- end of the state on GPUs -->"

# Everything that was recorded: kind, key, result.
Day = Mapping[str, Mapping[str, Mapping[str, Any]]]

_COLUMNS = ("program", "tokens/s (each step)", "TFLOPS", "step (plan)", "card (plan)", "host (plan)",
            "link up, down (plan)", "optimizer (plan)", "first losses")  # fmt: skip


def store(folder: Path) -> None:
    """Put the records of a day where the page reads them."""
    records = Records(folder)
    day = {kind: records.of(kind) for kind in ("profile", "plan", "row", "test")}
    DATA.write_text(json.dumps(day, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# -- one row -----------------------------------------------------------------------------------------------------------


def row_lines(name: str, day: Day, *, markdown: bool = False) -> list[str]:
    """A table of the programs that ran on a row, with what was planned next to what was measured."""
    plan = day["plan"].get(name, {})
    found = {one["program"]: one for one in day["row"].values() if one["row"] == name}
    rows = [_COLUMNS, *(_cells(program, one, plan) for program, one in found.items())]
    if markdown:
        return _markdown(rows)
    return table(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *others = rows
    lines = [*head], ["---"] + ["---:"] * (len(head) - 1)
    filled = ([*cells, *[""] * (len(head) - len(cells))] for cells in others)
    return [f"| {' | '.join(cells)} |" for cells in (*lines, *filled)]


def _cells(program: str, one: Mapping[str, Any], plan: Mapping[str, Any]) -> list[str]:
    if "tokens per second" not in one:
        return [program, str(one["error"])]
    tokens, named = one["tokens"], plan if program in plan.get("seconds", {}) else {}
    steps = " ".join(f"{tokens / seconds:,.0f}" for seconds in one["seconds"])
    return [
        program,
        f"{one['tokens per second']:,.0f} ({steps})",
        f"{one['TFLOPS']:.3g}",
        _with_plan(_seconds, tokens / one["tokens per second"], named.get("seconds", {}).get(program)),
        _with_plan(format_bytes, one["device peak"], named.get("device peak")),
        _with_plan(format_bytes, max(one["host taken"], one["host resident"]), named.get("host")),
        _with_plan(_both, one.get("link bytes"), named.get("link bytes")),
        _with_plan(_seconds, one.get("optimizer seconds that show"),
                   named.get("optimizer seconds that show", {}).get(program)),
        ", ".join(f"{loss:.3f}" for loss in one["losses"]) + (f" ({one['error']})" if "error" in one else ""),
    ]  # fmt: skip


def _with_plan(words: Callable[[Any], str], found: Any, planned: Any) -> str:
    text = "-" if found is None else words(found)
    return text if planned is None else f"{text} ({words(planned)})"


def _seconds(found: float) -> str:
    return f"{found:.2f} s" if found >= 0.1 else f"{1e3 * found:.2f} ms"


def _both(found: Mapping[str, float]) -> str:
    return f"{format_bytes(found['up'])}, {format_bytes(found['down'])}"


# -- the page ----------------------------------------------------------------------------------------------------------

_HEAD = """# On a GPU

<!-- written by python benchmarks/gpu_day.py --page -->

{state}

In a checkout of this repository, `python benchmarks/gpu_day.py --out DIR` measures trainings on a GPU. `gpu_day.py`
needs no pip and no network, ends within nine minutes, and continues where it stopped when you run the same line again.
To run some parts only, add their names: `profile` measures the machine, `tests` runs `pytest -m gpu`, and `1.7B`, `8B`,
`lora` and `long` are trainings, compared with other libraries that offload to CPU memory. If you name several parts,
the first two programs of each row of the table below run before all other programs. If libraries are missing,
`python benchmarks/gpu_day.py --wheels DIR` downloads their wheels on a machine with a network (less than 40 MB); on the
GPU machine, pass the same option to use the wheels. `--page --out DIR` writes this page.

## How the rows are measured

Each program is a separate process. All programs train the same random weights of a Llama in bfloat16 on the same
tokens: two warm-up steps, then three timed steps, or fewer if 60 seconds have passed. All programs use PyTorch's
attention and the fused AdamW, without gradient clipping.

- *TFLOPS* counts 6 operations per weight and token, or 4 if most weights are frozen.
- *card* is the peak of allocated GPU memory.
- *host* is the peak memory of the process, or the drop in free memory (which includes pinned memory) if that is larger.
- *optimizer* is the step time minus the step time without the optimizer.
- *link* is the number of bytes copied to and from the GPU, which the profiler counts in one more step.
- `roundpipe plan` computed the plan for the measured machine before the measurement.

| row | master weights and moments | tokens of a step | [microbatches](guide/words.md#pipelines) | programs |
| --- | --- | ---: | ---: | --- |
{rows}
"""


def write_page() -> None:
    """Write the page, and the line that README and the install page have of it, from what is stored."""
    day: Day = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    (_ROOT / "docs" / "gpu.md").write_text(page(day), encoding="utf-8")
    for path, link in ((_ROOT / "README.md", "docs/gpu.md"), (_ROOT / "docs" / "guide" / "install.md", "../gpu.md")):
        text = path.read_text(encoding="utf-8")
        shown = "[All rows]({})." if _is_gpu(day) else "The programs for the first run on a GPU [are ready]({})."
        lines = f"{_BEGIN}\n**Status:** {state(day)} {shown.format(link)}\n{_END}"
        path.write_text(re.sub(f"{_BEGIN}.*?{_END}", lambda _, new=lines: new, text, flags=re.DOTALL), encoding="utf-8")


def state(day: Day) -> str:
    """What has run on a GPU, in a sentence or two; the rows of other devices do not count."""
    if not _is_gpu(day):
        return "`roundpipe_runtime` is tested on simulated devices on the CPU, and **has not run on a GPU yet**."
    profile = next(iter(day["profile"].values()))
    sentences = [f"It ran on {profile['machine'].partition(';')[0]}."]
    if tests := day.get("test"):
        counts = collections.Counter(test["outcome"] for test in tests.values())
        sentences.append(f"Tests for devices: {_counted(counts)}.")
    best = [
        f"{one['row'].partition(', ')[0]} {one['tokens per second']:,.0f}"
        for one in _fastest(day.get("row", {}).values())
    ]
    if best:
        sentences.append(f"Tokens a second: {'; '.join(best)}.")
    return " ".join(sentences)


def _is_gpu(day: Day) -> bool:
    return any("CUDA" in one["versions"] and one["device"] == "cuda" for one in day.get("profile", {}).values())


def _counted(counts: Mapping[str, int]) -> str:
    outcomes = ("passed", "failed", "skipped", "unfinished")
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in outcomes if counts.get(outcome))


def _fastest(found: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each row the fastest of our programs."""
    best: dict[str, Mapping[str, Any]] = {}
    for one in found:
        if one["program"].startswith("this runtime") and "error" not in one:
            before = best.get(one["row"])
            if before is None or before["tokens per second"] < one["tokens per second"]:
                best[one["row"]] = one
    return list(best.values())


def page(day: Day) -> str:
    """The page of what is stored."""
    rows = "\n".join(_described(row) for row in ROWS)
    parts = [_HEAD.format(state=state(day), rows=rows)]
    if _is_gpu(day):
        parts += [*_machine(day), *_tests(day)]
        for name in dict.fromkeys(one["row"] for one in day["row"].values()):
            parts += [f"## {name}\n", "\n".join(row_lines(name, day, markdown=True)) + "\n", *_plan_fits(name, day)]
    return "\n".join(parts)


def _described(row: Row) -> str:
    states = f"{row.states}, of adapters" if row.adapters else row.states
    return f"| {row.name} | {states} | {row.tokens:,} | {row.microbatches} | {'; '.join(row.programs)} |"


def _machine(day: Day) -> list[str]:
    profile = next(iter(day["profile"].values()))
    lines = [profile["machine"], f"driver, card, link and clocks: {profile['driver']}"]
    if rates := profile.get("rates"):
        lines += [
            f"link: {format_bytes(rates['up'])}/s up, {format_bytes(rates['down'])}/s down, "
            f"{format_bytes(rates['both'])}/s both at once; from and to memory that is not pinned "
            f"{format_bytes(rates['pageable_up'])}/s and {format_bytes(rates['pageable_down'])}/s",
            f"products of matrices in bfloat16: {rates['flops'] / 1e12:.0f} TFLOP/s; {rates['overlap']:.0%} of a copy "
            "is hidden next to them",
        ]
    if adam := profile.get("Adam bytes per second"):
        speeds = (f"{format_bytes(rate)}/s with {threads}" for threads, rate in adam.items())
        lines.append(f"AdamW in float32 on the host: {', '.join(speeds)}")
    if "error" in profile:
        lines.append(f"it ended early: {profile['error']}")
    lines.append(", ".join(f"{name} {version}" for name, version in profile["versions"].items()))
    return ["## The machine\n", "\n".join(f"- {line}" for line in lines) + "\n"]


def _tests(day: Day) -> list[str]:
    tests = day.get("test", {})
    counts = collections.Counter(test["outcome"] for test in tests.values())
    other = [f"- {name}, {one['outcome']}: {_first_line(one)}" for name, one in tests.items() if "reason" in one]
    if not tests:
        return []
    return ["## Tests\n", f"`pytest -m gpu`: {_counted(counts)}.\n", *(["\n".join(other) + "\n"] if other else [])]


def _first_line(test: Mapping[str, Any]) -> str:
    return str(test["reason"]).strip().splitlines()[-1][:200]


def _plan_fits(name: str, day: Day) -> list[str]:
    plan = day["plan"].get(name, {})
    if "fits" not in plan:
        return [f"There is no plan: {plan['error']}.\n"] if plan else []
    words = {True: "fits", False: "does not fit", None: "unknown"}
    fits = plan["fits"]
    return [
        f"By the plan the card {words[fits['device']]} and the host {words[fits['host']]}; {plan['bottleneck']} is "
        "busy longest.\n"
    ]
