"""One recorded call: its inputs, its outputs, and how many tokens its cache had seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import RecordError
from ..recipe.static_codec import dump_static
from .callee import Callee
from .snapshot import Fact, Snapshot


class Call:
    """One recorded call. Inputs and outputs are returned as new copies: changing them does not change the record.

    Attributes:
        index: number of the call, in the order in which the calls began.
        kind: one of ``"prefill"`` (the cache is empty, or made by the call), ``"decode"`` (the cache holds tokens) and
            ``"forward"`` (there is no cache).
        past: number of tokens the cache had seen before the call, ``None`` without a cache.
        new: number of tokens the cache saw in the call.
        error: class and text of what the call raised; empty for a call that returned.
    """

    def __init__(
        self,
        callee: Callee,
        index: int,
        kind: str,
        past: int | None,
        new: int | None,
        parts: Mapping[str, Snapshot],
        error: str = "",
    ) -> None:
        self.index, self.kind, self.past, self.new, self.error = index, kind, past, new, error
        self._callee, self._parts = callee, dict(parts)

    @property
    def inputs(self) -> dict[str, Any]:
        """All arguments by parameter name."""
        return self._parts["inputs"].restore()  # type: ignore[no-any-return] # a dict, as it was

    @property
    def outputs(self) -> Any:
        """What the call returned.

        Raises:
            RecordError: when outputs were not recorded, or the call raised.
        """
        if self.error:
            raise RecordError(f"call {self.index} returned nothing. It raised {self.error}")
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
        """Path, dtype and shape of each leaf of ``"inputs"`` or ``"outputs"``, without reading a tensor.

        Args:
            part: one of ``"inputs"``, the default, and ``"outputs"``.

        Returns:
            One entry per leaf; none when the part was not recorded.
        """
        return self._parts[part].facts if part in self._parts else ()

    @property
    def snapshot(self) -> Snapshot:
        """The inputs as they are kept."""
        return self._parts["inputs"]

    def __repr__(self) -> str:
        tokens = "" if self.past is None else f", past {self.past}" + ("" if self.error else f", new {self.new}")
        raised = f", raised {self.error.partition(':')[0]}" if self.error else ""
        return f"<call {self.index} of {self._callee.label}, {self.kind}{tokens}{raised}>"


@dataclasses.dataclass(frozen=True)
class About:
    """Facts of a call that are stored next to its parts; see :class:`Call`."""

    index: int  # the number of the call
    kind: str
    past: int | None  # tokens that were in the cache before it; `None` without a cache
    new: int | None  # tokens that it read; `None` where it reads none
    label: str  # name of what was called
    names: Any  # its parameters and their kinds, as static data are stored
    error: str = ""  # class and text of what it raised; empty where it returned, and in older files


def about_call(call: Call) -> About:
    """What is stored of a call in addition to its parts."""
    names = [(parameter.name, int(parameter.kind)) for parameter in call._callee.signature.parameters.values()]
    return About(call.index, call.kind, call.past, call.new, call._callee.label, dump_static(names), call.error)
