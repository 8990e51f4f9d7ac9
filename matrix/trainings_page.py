"""The page of trainings: by task, how many rows are equal, refused or wrong; then each row with its differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .models import split_name
from .page import cleaned, codes, row, rule, stated
from .results import Results, alike, untried, way_of
from .trainings_cases import COLUMNS
from .trainings_kinds import KINDS

__all__ = ["outcome_of", "page_of"]

_PAGE = """# Trainings compared with the reference model

Each table row is one training of a small model with random weights, through a pipeline with two simulated devices. The
*reference model* is the same model, trained on the same data in a PyTorch loop or in the Hugging Face Trainer.
`make trainings` repeats these checks (options: `python -m matrix.trainings --help`). The results come from
`data/{file}`, measured with {versions}. CI (`.ci/run`) repeats one training of each kind of row (such as tasks,
adapters and optimizers), and fails if a result is wrong or an unexpected error is raised.

| column | what is compared |
|---|---|
| 1, 2, 3 | five rows in 1, 2 or 3 [microbatches](guide/words.md#pipelines), evaluation mode: loss and gradients |
| without labels | 3 microbatches of a batch in which all labels of the first two rows are missing |
| other labels | 3 microbatches with labels for regression and for several classes per row (`problem_type`) |
| called | `model(**batch).loss.backward()` with 3 microbatches |
| no example | 3 microbatches through text models that were split without an example batch |
| trained | three steps with 5, 4 and 3 rows in training mode: losses and weights (Trainer options: six steps) |

Each number in a table cell is the largest relative difference between a loss, gradient or weight of the pipeline and of
the reference model. The rows of a batch have different numbers of ignored labels. Trainings run in float64, and a
relative difference may be at most {tolerance:.0e}. Models that do not run in float64 are marked "float32", and their
limit is {single:.0e}. If a gradient is zero apart from rounding errors, its difference is divided by the largest
gradient of the model. Dropout and random masks are off.

- `joined:` means that the losses of the microbatches do not add up to the loss of the batch, so the last layer and the
  loss ran once for the whole batch.
- `1:` means that the batch ran as one microbatch, because the model is not split into layers or draws random numbers
  after its layers.
- **refused** means that `roundpipe_runtime` raised an error or a warning; reasons are listed under "What is refused".
- – means that there is nothing to compare, for example because the model computes no loss; reasons are listed under
  "What is not compared". An empty cell was not run.

Layers such as batch norm would compute their statistics per microbatch, as in gradient accumulation, so models with
such layers are trained with one microbatch.

{summary}
{wrong}
{refused}
{kinds}
## Heads

{heads}
{untried}"""

_KINDS = {
    "own_loss": (
        "Your own loss functions",
        "A `loss_fn` on the logits of BERT, with the matching `loss_reduction`.",
    ),
    "adapter": (
        "PEFT methods",
        "On a Llama with three layers. Parameters that PEFT sets to zero are random here.",
    ),
    "optimizer": ("Optimizers", "The optimizers of `torch.optim`, on a Llama with three layers."),
    "trainer": (
        "Trainer options",
        "`RoundPipeTrainer` and `Trainer`: losses, gradient norms, learning rates, weights.",
    ),
    "trl": (
        "TRL trainers",
        "A class derived from `RoundPipeTrainer` and a TRL trainer is compared with that trainer: all logged numbers "
        "(losses, norms, rewards, entropies) and the weights. TRL packs texts into one row, which is one microbatch.",
    ),
}
_HEADS = {"1 microbatch": "1", "2 microbatches": "2", "3 microbatches": "3", "rows without labels": "without labels"}
_OUTCOMES = (
    "equal",
    "equal, joined loss",
    "equal in one microbatch",
    "refused",
    "wrong",
    "no loss",
    "not built",
    "not compared",
)


def page_of(results: Results, file: str) -> str:
    """Return the page.

    Args:
        results: the results of this matrix.
        file: the name of the file they are from.
    """
    from .trainings_trial import TOLERANCE, TOLERANCE_SINGLE

    versions = stated(results.versions)
    return _PAGE.format(
        file=file,
        versions=versions,
        tolerance=TOLERANCE,
        single=TOLERANCE_SINGLE,
        summary=_summary(results),
        wrong=_wrong(results),
        refused=_reasons(results, "## What is refused", lambda _, result: _is_refusal(result)),
        kinds="\n".join(_kind(results, kind) for kind in KINDS),
        heads=_table(results, [name for name in results.types if split_name(name)[0] not in KINDS]),
        untried=_reasons(results, "## What is not compared", _is_left_out),
    )


def outcome_of(entry: Mapping[str, Any]) -> str:
    """Return the outcome of a row: the worst of its cells.

    >>> outcome_of({"columns": {"built": {"ok": True}, "called": {"ok": True, "loss": 0.0}}})
    'equal'
    >>> outcome_of({"columns": {"built": {"ok": False, "why": "ImportError"}}})
    'not built'
    """
    cells = dict(entry["columns"])
    first = cells.pop("built", {"ok": None})
    if first["ok"] is False:
        return "not built"
    if first["ok"] is None:
        return "no loss"
    if any(result["ok"] is False for result in cells.values()):
        return "wrong"
    if any(map(_is_refusal, cells.values())):
        return "refused"
    if not any(result["ok"] for result in cells.values()):
        return "not compared"
    return ("equal", "equal, joined loss", "equal in one microbatch")[max(map(way_of, cells.values()))]


def _is_refusal(result: Mapping[str, Any]) -> bool:
    return result["ok"] is None and result.get("why", "").startswith("RefusedError")


def _is_left_out(column: str, result: Mapping[str, Any]) -> bool:
    """Whether there is nothing to compare: also a class that cannot be built, which is not a fault of the package."""
    if column == "built":
        return result["ok"] is not True
    return result["ok"] is None and not _is_refusal(result) and not untried(dict(result))


def _summary(results: Results) -> str:
    kinds = {name: split_name(name)[0] for name in results.types}
    shown = [*KINDS, *sorted(set(kinds.values()) - set(KINDS))]
    lines = [row(["", "rows", *_OUTCOMES]), rule(2 + len(_OUTCOMES))]
    total = dict.fromkeys(_OUTCOMES, 0)
    for kind in shown:
        held = [outcome_of(results.types[name]) for name, own in kinds.items() if own == kind]
        for outcome in held:
            total[outcome] += 1
        if held:
            lines.append(row([kind.replace("_", " "), str(len(held)), *(str(held.count(o) or "") for o in _OUTCOMES)]))
    lines.append(row(["all", str(len(kinds)), *(str(total[outcome]) for outcome in _OUTCOMES)]))
    return "\n".join(lines) + "\n"


def _reasons(results: Results, title: str, asked: Callable[[str, Any], bool]) -> str:
    """The cells that are asked for, by reason."""
    held: dict[tuple[str, str], dict[str, None]] = {}
    said: dict[str, str] = {}
    for name, entry in results.types.items():
        by_reason: dict[str, list[str]] = {}
        for column, result in entry["columns"].items():
            if asked(column, result):
                why = said.setdefault(alike(_said(result)), _said(result))  # as the first of its kind states it
                by_reason.setdefault(why, []).append(_HEADS.get(column, column))
        for reason, columns in by_reason.items():
            held.setdefault((reason, ", ".join(columns)), {})[split_name(name)[1]] = None
    if not held:
        return ""
    lines = [f"{title}\n", row(["rows", "where", "why"]), rule(3)]
    lines += [row([codes(names), where, cleaned(why)]) for (why, where), names in sorted(held.items())]
    return "\n".join(lines) + "\n"


def _wrong(results: Results) -> str:
    """The rows with a wrong number, or with an error that is not of the package."""
    lines = []
    for name, entry in results.types.items():
        cells = {column: cell for column, cell in entry["columns"].items() if column != "built" and cell["ok"] is False}
        if cells:
            said = "; ".join(f"{_HEADS.get(column, column)}: {_said(cell)}" for column, cell in cells.items())
            lines.append(row([codes([split_name(name)[1]]), cleaned(said)]))
    return (
        "\n".join(["## What is wrong\n", row(["row", "where, and how far off"]), rule(2), *lines]) + "\n"
        if lines
        else ""
    )


def _said(result: Mapping[str, Any]) -> str:
    why: str = result.get("why", "")
    for word in ("RefusedError: ", "SkipColumnError: ", "DifferenceError: ", "NoLossError: "):
        why = why.removeprefix(word)
    return why


def _kind(results: Results, kind: str) -> str:
    names = [name for name in results.types if split_name(name)[0] == kind]
    title, words = _KINDS[kind]
    return f"## {title}\n\n{words}\n\n{_table(results, names)}" if names else ""


def _table(results: Results, names: list[str]) -> str:
    columns = [
        column
        for column in COLUMNS
        if column != "built" and any(_shown(results.types[name]["columns"].get(column)) != "–" for name in names)
    ]
    lines = [row(["row", *(_HEADS.get(column, column) for column in columns)]), rule(1 + len(columns))]
    for name in sorted(names):
        cells = results.types[name]["columns"]
        if cells.get("built", {}).get("ok"):
            lines.append(row([split_name(name)[1], *(_shown(cells.get(column)) for column in columns)]))
    return "\n".join(lines) + "\n"


def _shown(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    if _is_refusal(result):
        return "**refused**"
    if result["ok"] is None:
        return "–"
    if result["ok"] is False:
        return "✗"
    errors = [value for key, value in result.items() if key != "seconds" and isinstance(value, float)]
    worst = f"{max(errors, default=0.0):.0e}" if any(errors) else "0"
    way = ("", "joined: ", "1: ")[way_of(result)]
    return way + worst + (", float32" if "dtype" in result else "")
