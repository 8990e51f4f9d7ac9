"""The losses of a training as a picture: a line of block characters, or an image file."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Sequence

from yobx_flatten.errors.dependencies import require
from yobx_flatten.files.scratch import whole_file

from .errors import FineTuneError
from .records import EvalRecord, StepRecord

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
