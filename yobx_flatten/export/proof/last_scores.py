"""Check that a file asked for the scores of the last token returns those that it returns of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.compare import largest_difference
from ...errors import ReplayError
from ...private_names.of_torch import pytree
from ...runners.onnx_runner import OnnxRunner
from .case import Case, clone

_FAR = 1e-3
"""Of the largest score: a product of one row is summed in another order than one of many, nothing more."""


def check_last_scores(runner: OnnxRunner, names: Sequence[str], cases: Sequence[Case]) -> None:
    """Run the first call of several tokens both ways, where a file has the input for it."""
    # names: names of the inputs' leaves, in order
    if not runner.has_kept_scores:
        return
    for case in cases:
        leaves = pytree.tree_leaves((case.args, dict(clone(case.kwargs))))
        given = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in runner.ports}
        read = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), None)
        if read is None or read.shape[1] < 2 or (runner.shared and runner.refuses(given)):
            continue
        past = [slot.port.name for slot in runner.slots]
        feeds = {name: value for name, value in given.items() if name not in past}

        caches = [runner.cache({name: given[name] for name in past}) for _ in range(2)]
        every = runner.step(feeds, caches[0])[0]["logits"]
        last = runner.step(feeds, caches[1], last_scores=True)[0]["logits"]
        wrong = largest_difference(every[:, -1:], last) if last.shape[1] == 1 else float("inf")
        if not wrong <= _FAR * max(1.0, float(every.nan_to_num().abs().max())):
            raise ReplayError(
                f"{runner.name} returns other scores of the last token where only those are asked for: {wrong:.1e}."
            )
        return
