"""Count how many of the model's greedy tokens the files of a folder choose."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..generate.beams import BeamSettings
from ..generate.generator import Generator
from ..generate.sampling import Sampling
from ..storage.cases import StoredCase


@dataclasses.dataclass(frozen=True)
class TokenCount:
    """How the tokens of a loop compare with those of the model."""

    tokens: int  # number of new tokens of the model, up to the end of each row
    # how many of them differ when the files generate on their own: after a first one the rest of its row continues
    # another text
    different: int
    # how many of these follow a tie: two scores of the model that are closer than the rounding of its type
    excused: int
    # share of the tokens that the files choose after the model's own text; `None` where the weights are those of the
    # model
    agreed: float | None = None
    allowed: float | None = None  # smallest such share; `None` where no token may differ

    @property
    def ok(self) -> bool:
        """Whether the files generate what the model does, or as much of it as rounded weights have to."""
        if self.agreed is None or self.allowed is None:
            return self.different == self.excused
        return self.agreed >= self.allowed

    def __str__(self) -> str:
        if not self.different:
            shown = "0 tokens differ"
        else:
            shown = f"{self.different} of {self.tokens} tokens differ"
        if self.excused:
            shown += f", {self.excused} of them excused: after a tie of two scores within float rounding"
        if self.agreed is not None and self.allowed is not None:
            shown += f"; {self.agreed:.1%} agree after the model's own text, at least {self.allowed:.0%} have to"
        return shown


def count_tokens(generator: Generator, case: StoredCase, tolerance: float, share: float | None = None) -> TokenCount:
    """Let files generate, and compare with what the model did."""
    # share: share of the tokens that have to agree after the model's own text; `None`, the default, where the weights
    # are those of the model, and all have to
    expected: torch.Tensor = case.outputs["sequences"]
    margins: torch.Tensor | None = case.outputs.get("margins")  # a folder of an earlier version has none
    read = _read(generator, case)
    how: dict[str, Any] = {"max_new_tokens": case.outputs["new_tokens"]}
    how |= {"sampling": Sampling(), **dataclasses.asdict(BeamSettings())}  # whatever the folder's default is
    found = generator.generate(**case.inputs, **how)
    differs, first = _apart(found, expected, read)
    # each of the two scores may be off by the tolerance
    ties = torch.zeros_like(read) if margins is None else margins <= 2 * tolerance
    excused = differs & (first & ties).any(1, keepdim=True)
    counts = int(read.sum()), int(differs.sum()), int(excused.sum())
    if share is None:
        return TokenCount(*counts)
    free = read if margins is None else read & margins.isfinite()  # where a rule forces a token nothing is chosen
    new = expected.shape[1] - _start(case)
    chosen = _forced(generator, case, {**how, "max_new_tokens": new})
    agreed = (chosen == expected) | ties
    total = int(free.sum())
    return TokenCount(*counts, float(agreed[free].sum()) / total if total else 1.0, share)


def _read(generator: Generator, case: StoredCase) -> torch.Tensor:
    """Where the new tokens of the model are, without what fills a row that has ended."""
    expected: torch.Tensor = case.outputs["sequences"]
    start = _start(case)
    ends = torch.isin(expected, torch.tensor(generator.settings.eos_token_ids, dtype=torch.int64))
    ends[:, :start] = False
    read = (ends.cumsum(1) - ends.long()) == 0
    read[:, :start] = False
    return read


def _start(case: StoredCase) -> int:
    """How many tokens each row begins with; a decoder after an encoder has its own."""
    expected, prompt = case.outputs["sequences"], case.inputs.get("input_ids")
    length = 0 if prompt is None else prompt.shape[1]
    begins = prompt is not None and length < expected.shape[1] and torch.equal(expected[:, :length], prompt)
    return length if begins else 1


def _apart(found: torch.Tensor, expected: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens differ or one is missing, and which of these are the first of their rows."""
    same = torch.zeros_like(read)
    if len(found) == len(expected):
        length = min(found.shape[1], expected.shape[1])
        same[:, :length] = found[:, :length] == expected[:, :length]
    differs = ~same & read
    return differs, differs & (differs.cumsum(1) == 1)


def _forced(generator: Generator, case: StoredCase, how: dict[str, Any]) -> torch.Tensor:
    """The token that the files would choose at each place, while the model's own text is what they read."""
    expected: torch.Tensor = case.outputs["sequences"]
    chosen = expected.clone()

    def follow(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = tokens.shape[1]
        chosen[:, place] = scores.argmax(-1)
        return torch.full_like(scores, -torch.inf).scatter(1, expected[:, place, None], 0.0)

    before = generator.settings
    generator.settings = dataclasses.replace(before, processors=(*before.processors, follow))
    try:
        generator.generate(**case.inputs, **how)
    finally:
        generator.settings = before
    return chosen
