"""What became of a model: which layers, which pieces, how exact, and what was tried in vain."""

from __future__ import annotations

import dataclasses

__all__ = ["CutReport", "Equivalence"]


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """How far the cut model is from the plain one on the example; all errors are relative, by norm.

    Attributes:
        outputs: the worst of the tensors that the model returns, the loss among them.
        gradients: the worst of all parameters.
        worst: the parameter with that error.
        parameters: how many parameters got a gradient from the plain model.
    """

    outputs: float
    gradients: float
    worst: str
    parameters: int


@dataclasses.dataclass(frozen=True)
class CutReport:
    """The result of a cut in words and numbers.

    Attributes:
        model: class of the model.
        lists: the lists of modules whose elements are the layers.
        pieces: the pieces of the pipeline, in order.
        bytes: of the parameters of each piece.
        equivalence: ``None``, if it was not checked.
        refused: what was tried before: the reason and the message of each.
    """

    model: str
    lists: tuple[str, ...]
    pieces: tuple[str, ...]
    bytes: tuple[int, ...]
    equivalence: Equivalence | None
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the model stayed in one piece."""
        return not self.lists

    @property
    def phases(self) -> int:
        """How often the model's own code runs: 2 is before the layers and behind them."""
        return sum(piece.startswith("phase ") for piece in self.pieces)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.pieces)} pieces"]
        if self.lists:
            calls = len(self.pieces) - self.phases
            lines[0] += f", {calls} calls of layers in {', '.join(self.lists)}, {self.phases} phases"
        largest = max(self.bytes, default=0)
        lines.append(f"largest piece: {largest / 1e6:.3g} MB of {sum(self.bytes) / 1e6:.3g} MB")
        if self.equivalence is not None:
            found = self.equivalence
            lines.append(
                f"on the example: outputs differ by {found.outputs:.1e}, the gradients of {found.parameters} "
                f"parameters by {found.gradients:.1e}"
            )
        lines += [f"not cut otherwise, {reason}: {message}" for reason, message in self.refused]
        return "\n".join(lines)
