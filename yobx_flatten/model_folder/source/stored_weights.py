"""Load a model, and refuse missing, unexpected or mismatched weights unless the caller allows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, Literal, get_args

import torch

from ...errors import InvalidArgumentError

UnmatchedWeights = Literal["refuse", "unused", "random"]
"""What is done where the weights of a folder are not those of the model's class. ``"refuse"`` raises, with their names;
``"unused"`` leaves out those that the class does not have; ``"random"`` also draws those that the folder does
not have."""

_NAMED = 5  # of many weights, so many are named


def check_unmatched(choice: str) -> None:
    """Raise where there is no such choice."""
    if choice not in get_args(UnmatchedWeights):
        choices = ", ".join(map(repr, get_args(UnmatchedWeights)))
        raise InvalidArgumentError(f"unmatched_weights must be one of {choices}, found {choice!r}.")


@dataclasses.dataclass(frozen=True)
class KeyDifferences:
    """Where the weights of a folder and those of a class differ."""

    missing: tuple[str, ...] = ()  # names of weights that the folder lacks
    unused: tuple[str, ...] = ()  # names of weights that the class does not have
    # names of weights that have another shape in the folder, with that shape and the class's
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @classmethod
    def of_loading(cls, found: Any) -> KeyDifferences:
        """Read what ``from_pretrained(..., output_loading_info=True)`` states, in any version of transformers."""
        shapes = sorted((name, tuple(stored), tuple(wanted)) for name, stored, wanted in found["mismatched_keys"])
        reshaped = {name for name, _, _ in shapes}
        missing = sorted(name for name in found["missing_keys"] if name not in reshaped)
        return cls(tuple(missing), tuple(sorted(found["unexpected_keys"])), tuple(shapes))

    def check(
        self, name: str, kind: str, choice: UnmatchedWeights, failure: type[Exception], *, option: str = ""
    ) -> None:
        """Raise where they differ in a way that was not asked for."""
        # option: how the choice is typed, as `"--unmatched-weights {}"`; that of Python and of the command line where
        # it is empty
        typed = option or 'unmatched_weights="{0}" (--unmatched-weights {0})'
        own = f"Name a folder with the weights of a {kind}, or state its class in config.json (architectures)."
        on_purpose = f"To use random weights on purpose: {typed.format('random')}"
        if self.missing and choice != "random":
            raise failure(f"{name} lacks {_weights(self.missing)} of {kind}, which would be random. {own} {on_purpose}")
        if self.reshaped and choice != "random":
            shown = [f"{key} has shape {stored}, and {kind} takes {wanted}" for key, stored, wanted in self.reshaped]
            raise failure(f"{name}: {_some(shown, '; ')}. It would be random. {own} {on_purpose}")
        if self.unused and choice == "refuse":
            raise failure(
                f"{name} holds {_weights(self.unused)}, which {kind} does not have: heads of other tasks, as in "
                f"many published folders, or weights of another class. {own} To leave them out on purpose:\n"
                f"    {typed.format('unused')}"
            )

    def remarks(self) -> tuple[str, ...]:
        """Return notes for a report, empty where there are no differences."""
        random, made = [*self.missing, *(name for name, _, _ in self.reshaped)], []
        if random:
            made.append(f"random, since the folder does not hold them: {_some(random)}.")
        if self.unused:
            made.append(f"left out, since the class does not have them: {_some(self.unused)}.")
        return tuple(made)


def load_stored(
    kind: Any,
    folder: Any,
    name: str,
    *,
    choice: UnmatchedWeights,
    failure: type[Exception],
    option: str = "",
    seed: int = 0,
    **options: Any,
) -> tuple[Any, KeyDifferences]:
    """Load a model from a folder."""
    # choice: what is done where the weights are not those of the class
    # options: further arguments of `from_pretrained`
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        # with sizes that differ it also lists them, and does not only raise
        loaded, found = kind.from_pretrained(folder, **options, ignore_mismatched_sizes=True, output_loading_info=True)
    differences = KeyDifferences.of_loading(found)
    differences.check(name, type(loaded).__qualname__, choice, failure, option=option)
    return loaded, differences


def _weights(names: Collection[str]) -> str:
    return f"{'the weight' if len(names) == 1 else f'{len(names)} weights,'} {_some(names)}"


def _some(names: Iterable[str], between: str = ", ") -> str:
    shown = list(names)
    left = len(shown) - _NAMED
    return between.join(shown[:_NAMED]) + (f" and {left} more" if left > 0 else "")
