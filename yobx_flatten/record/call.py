"""One recorded call: what went in, what came out, and how many tokens its cache had seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RecordError
from ..recipe.static_codec import dump_static
from .callee import Callee
from .snapshot import Fact, Snapshot

__all__ = ["Call", "about_call"]


class Call:
    """One recorded call. Whatever is read off it is a new copy: nothing that is done to it changes the record.

    Attributes:
        index: its number, in the order in which the calls began.
        kind: ``"prefill"``: the cache is empty, or made by the call; ``"decode"``: the cache holds tokens;
            ``"forward"``: there is no cache.
        past: number of tokens the cache had seen before the call, ``None`` without a cache.
        new: number of tokens it saw in the call.
    """

    def __init__(
        self, callee: Callee, index: int, kind: str, past: int | None, new: int | None, parts: Mapping[str, Snapshot]
    ) -> None:
        self.index, self.kind, self.past, self.new = index, kind, past, new
        self._callee, self._parts = callee, dict(parts)

    @property
    def inputs(self) -> dict[str, Any]:
        """All arguments by parameter name."""
        return self._parts["inputs"].restore()  # type: ignore[no-any-return] # a dict, as it was

    @property
    def outputs(self) -> Any:
        """What the call returned.

        Raises:
            RecordError: when outputs were not recorded.
        """
        if "outputs" not in self._parts:
            raise RecordError("outputs were not recorded:\n    record_calls(model, outputs=True)")
        return self._parts["outputs"].restore()

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments that can only be passed by position."""
        return self._callee.split(self.inputs)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """All other arguments."""
        return self._callee.split(self.inputs)[1]

    def facts(self, part: str = "inputs") -> tuple[Fact, ...]:
        """What is known of each leaf of ``"inputs"`` or ``"outputs"``: path, dtype, shape; no tensor is read."""
        return self._parts[part].facts if part in self._parts else ()

    @property
    def snapshot(self) -> Snapshot:
        """The inputs as they are kept."""
        return self._parts["inputs"]

    def __repr__(self) -> str:
        tokens = "" if self.past is None else f", past {self.past}, new {self.new}"
        return f"<call {self.index} of {self._callee.label}, {self.kind}{tokens}>"


def about_call(call: Call) -> dict[str, Any]:
    """What is stored of a call beside its parts."""
    names = [(parameter.name, int(parameter.kind)) for parameter in call._callee.signature.parameters.values()]
    return {
        "index": call.index,
        "kind": call.kind,
        "past": call.past,
        "new": call.new,
        "label": call._callee.label,
        "names": dump_static(names),
    }
