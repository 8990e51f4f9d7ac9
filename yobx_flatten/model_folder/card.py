"""Write the card of a quantised folder: how its answers differ from the model's."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from ..export.proof.quality import Quality
from .verify_tokens import TokenCount

_CARD = "README.md"


def write_card(
    folder: pathlib.Path, name: str, text: str, qualities: Mapping[str, Quality], tokens: Mapping[str, TokenCount]
) -> None:
    """Write ``README.md``; a file of that name is left as it is."""
    # qualities: how far each file is from the model, by its name
    if (folder / _CARD).exists():
        return
    rows = []
    for file, quality in qualities.items():
        rows.append((f"size of {file}", f"{_bytes(folder, file) / 1e6:.1f} MB, {quality.weights}"))
        ratio, divergence = quality.perplexity_ratio, quality.text_divergence
        if ratio is not None and quality.text_tokens:
            rows.append((f"perplexity on {quality.text_tokens} tokens of {text}", f"{ratio:.4f} of the model's"))
        divergence = quality.divergence if divergence is None else divergence
        if divergence is not None:
            rows.append(("Kullback-Leibler divergence of its scores", f"{divergence:.4f} nats"))
        if ratio is None:
            rows.append(("difference of its outputs", f"{quality.relative_difference:.1%} of their size"))
    for case, count in tokens.items():
        if count.agreed is not None:
            rows.append((f"the same greedy token, {case}", f"{count.agreed:.1%} after the model's own text"))
    lines = [f"# {name}, quantised", "", "Exported with yobx-flatten, and measured next to the model:", ""]
    lines += ["| | |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows), ""]
    lines += ["`yobx-flatten verify FOLDER` measures it again, without the model.", ""]
    (folder / _CARD).write_text("\n".join(lines), encoding="utf-8")


def _bytes(folder: pathlib.Path, file: str) -> int:
    return sum(path.stat().st_size for path in (folder / file, folder / f"{file}.data") if path.exists())
