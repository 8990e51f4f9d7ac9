"""Write the model card of a trained model: its base model, data, losses and versions."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence

from yobx_flatten.errors.dependencies import require
from yobx_flatten.files.scratch import whole_file, write_text

from .errors import FineTuneError
from .models import ModelSource
from .records import EvalRecord, StepRecord

CARD = "README.md"
_LIBRARIES = ("yobx-flatten", "torch", "transformers", "peft", "accelerate")
# Lines of the table of losses.
_LINES = 12


def model_card(
    source: ModelSource,
    records: Sequence[StepRecord | EvalRecord],
    *,
    data: str,
    options: Mapping[str, object],
    is_adapter: bool = False,
) -> str:
    """Return a model card.

    Args:
        source: source of the model.
        records: records of the training.
        data: what was read, in words.
        options: options of the training by name; those that are ``None`` are left out.
        is_adapter: whether only adapters were saved.

    Returns:
        Markdown, with the metadata that hubs read.
    """
    base = pathlib.Path(source.name).name  # a path of this machine is of no use elsewhere
    steps = [record for record in records if isinstance(record, StepRecord)]
    held_out = {record.step: record.eval_loss for record in records if isinstance(record, EvalRecord)}
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"base_model: {base}"] if source.has_weights else []
    lines += ["tags:", "- roundpipe", *(["- lora"] if is_adapter else []), "---", ""]
    kind = "Adapters of" if is_adapter else "Trained from" if source.has_weights else "Trained from random weights of"
    lines += [f"# {kind} {base}", "", f"Trained with `roundpipe train`, {len(steps)} steps.", ""]
    lines += ["## Data", "", data, "", "## Losses", ""]
    if steps:
        losses = [record.loss for record in steps]
        lines += [f"`{sparkline(losses)}` {losses[0]:.4f} to {losses[-1]:.4f}", ""]
        lines += ["| step | loss | held out |", "|---|---|---|"]
        stride = -(-len(steps) // _LINES)
        shown = [record for record in steps if record.step % stride == 0 or record is steps[-1]]
        lines += [f"| {one.step} | {one.loss:.4f} | {_number(held_out.get(one.step))} |" for one in shown]
        lines.append("")
    lines += ["## Options", "", *_listed(options), "", "## Versions", ""]
    return "\n".join([*lines, *_listed({"python": platform.python_version(), **_versions()}), ""])


def _number(found: float | None) -> str:
    return "" if found is None else f"{found:.4f}"


def _listed(values: Mapping[str, object]) -> list[str]:
    return [f"- {name}: {value}" for name, value in values.items() if value is not None]


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def replace_card(folder: pathlib.Path, text: str) -> None:
    """Write the card of a saved model anew; it is the earlier or the new one at any moment.

    Args:
        folder: folder of the model.
        text: card.
    """
    write_text(folder.absolute() / CARD, text)


# The losses of a training as a picture: a line of block characters, or an image file.


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return values as block characters, from the smallest to the largest; more than fit are averaged.

    Args:
        values: values in order.
        width: largest number of characters.

    Returns:
        One character for each value, or for the mean of several; empty without values.

    >>> sparkline([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    count = min(width, len(values))
    cuts = [len(values) * place // count for place in range(count + 1)] if count else []
    means = [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(cuts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(steps * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def check_curve(path: str | os.PathLike[str]) -> None:
    """Check before a training that its losses can be drawn.

    Args:
        path: path of the image.

    Raises:
        FineTuneError: the suffix of the path is not that of an image.
        MissingDependencyError: matplotlib is not installed.
    """
    if pathlib.Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise FineTuneError(f"{path} does not end in .png, .svg or .pdf. Write one of them: --plot losses.svg")
    require("matplotlib", purpose="--plot")


def save_curve(records: Sequence[StepRecord | EvalRecord], path: str | os.PathLike[str]) -> None:
    """Draw the losses of steps and evaluations into an image file.

    Args:
        records: records of a training, as :func:`run` shows them.
        path: path of the image; its suffix determines the format: ``.png``, ``.svg``, ``.pdf``.

    Raises:
        FineTuneError: the suffix of the path is not that of an image.
        MissingDependencyError: matplotlib is not installed.
    """
    check_curve(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if isinstance(record, StepRecord)]
    held_out = [record for record in records if isinstance(record, EvalRecord)]
    figure = Figure(figsize=(8, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([one.step for one in steps], [one.loss for one in steps], color="#3b75af", label="training")
    if held_out:
        axes.plot(
            [one.step for one in held_out], [one.eval_loss for one in held_out], "o-", color="#c44e52", label="held out"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    with whole_file(path) as file:
        canvas.print_figure(file)
