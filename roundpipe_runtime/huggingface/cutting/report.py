"""The report of a cut: its layers and pieces, its errors against the model, and the cuts that were refused."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Differences between the split model and the original on the example; all errors are relative, by norm.

    Attributes:
        outputs: largest error of the tensors that the model returns, including the loss.
        gradients: largest error of the gradients of all parameters.
        worst: parameter with that error.
        parameters: number of parameters that got a gradient from the reference model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import cut
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> found = cut(LlamaForCausalLM(config)).report.equivalence
    >>> found.outputs < 1e-5, found.gradients < 1e-5, found.parameters
    (True, True, 21)
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
        lists: lists of modules whose elements are the layers.
        pieces: pieces of the pipeline, in order.
        bytes: bytes of the parameters of each piece.
        equivalence: differences from the model; ``None`` if they were not checked.
        refused: reason and message of each cut that was tried before.
        losses: how the loss of each kind of call is computed, as it was checked at the first one. Default: no call yet.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import cut
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> report = cut(LlamaForCausalLM(config), check=False).report
    >>> report.model, report.lists, report.equivalence
    ('LlamaForCausalLM', ('model.layers',), None)
    """

    model: str
    lists: tuple[str, ...]
    pieces: tuple[str, ...]
    bytes: tuple[int, ...]
    equivalence: Equivalence | None
    refused: tuple[tuple[str, str], ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the model stayed in one piece."""
        return not self.lists

    @property
    def phases(self) -> int:
        """The number of phases in which the model's own code runs: 2 means before and after the layers."""
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
        lines += [f"loss in {one}" for one in self.losses]
        lines += [f"not cut otherwise, {reason}: {message}" for reason, message in self.refused]
        return "\n".join(lines)
