"""Measure again how far the quantised file of a folder is from the model, on its stored cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ReplayError
from ..export.proof.padding import Padding
from ..export.proof.quality import SCORES, Distance, Quality, text_losses
from ..runners.runner import Runner
from ..storage.cases import StoredCase

__all__ = ["measure_again"]


def measure_again(stored: Quality, cases: Iterable[StoredCase], runner: Runner) -> Quality:
    """Return the quality of a file."""
    # stored: what was measured when it was exported
    distance = Distance()
    for case in cases:
        outputs = runner.run({name: case.inputs[name] for name in runner.ports})
        missing = [name for name in case.outputs if name not in outputs and name not in ("losses", "greedy")]
        if missing:
            raise ReplayError(f"{runner.name} has no output {missing[0]}.")
        if "losses" in case.outputs:
            distance.add_text(case.outputs, text_losses(outputs[SCORES], case.inputs["input_ids"]))
            continue
        padding = Padding()
        padding.next_call(case.inputs)
        expected = {name: value for name, value in case.outputs.items() if isinstance(value, torch.Tensor)}
        sides: list[dict[str, Any]] = [
            {name: padding.blank(name, side[name]) for name in expected} for side in (expected, outputs)
        ]
        distance.add(*sides)
    return distance.quality(stored.weights, stored.block_size, stored.allowed)
