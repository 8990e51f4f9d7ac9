"""One recorded call: its inputs, its outputs, and how many tokens its cache had seen."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError, RecordError, describe_class
from ..recipe.static_codec import dump_static
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
        """The outputs of the call.

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
    """Stored facts about a call, in addition to its parts."""
    names = [(parameter.name, int(parameter.kind)) for parameter in call._callee.signature.parameters.values()]
    return About(call.index, call.kind, call.past, call.new, call._callee.label, dump_static(names), call.error)


# The recorded method: its arguments by name, and a module that takes only the varying ones.


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Callee:
    """One method of one object."""

    label: str  # class and method, for messages
    owner: Any  # the object; `None` for calls read from a folder without their model
    method: str  # the name of the method
    signature: inspect.Signature  # the signature of the bound method

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """All arguments by name, in the order of the parameters; ``None`` if the method does not take them."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:  # the call itself will state it
            return None
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named[name] = value
        return named

    def split(self, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, by name where possible."""
        parameters = self.signature.parameters.values()
        starred = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        many = bool(starred is not None and inputs.get(starred))
        args: list[Any] = []
        kwargs = dict(inputs)
        for parameter in parameters:
            if parameter.name not in kwargs:
                continue
            if parameter.name == starred:
                args += kwargs.pop(parameter.name)
            elif parameter.kind not in _BY_NAME or (many and parameter.kind is _BY_NAME[0]):
                args.append(kwargs.pop(parameter.name))
        return tuple(args), kwargs

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """Call the method with arguments by name."""
        args, kwargs = self.split(inputs)
        if self.method == "forward" and isinstance(self.owner, torch.nn.Module):
            return self.owner(*args, **kwargs)  # with its hooks
        return getattr(self.owner, self.method)(*args, **kwargs)


def callee_of(target: object, method: str | None) -> Callee:
    """Find the callable to record."""
    if inspect.ismethod(target) and method is None:
        method = target.__name__
        target = target.__self__
    elif isinstance(target, torch.nn.Module):
        method = method or "forward"
    if method is None or isinstance(target, type):
        raise InvalidArgumentError(
            f"record_calls: expected a module, or a method of an object, found {describe_class(target)}. Calls of a "
            "plain function cannot be recorded.\n"
            "    record_calls(model)\n"
            '    record_calls(model, method="encode")'
        )
    if not callable(getattr(target, method, None)):
        raise InvalidArgumentError(f"record_calls: {type(target).__qualname__} has no method {method!r}.")
    label = f"{type(target).__qualname__}.{method}"
    return Callee(label, target, method, inspect.signature(getattr(target, method)))


class _Recorded(torch.nn.Module):
    """A recorded method as a module whose ``forward`` takes the arguments that vary; the others are part of it."""

    def __init__(self, callee: Callee, names: tuple[str, ...], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self._callee, self._names, self._constants = callee, names, dict(constants)
        if isinstance(callee.owner, torch.nn.Module):
            self.recorded = callee.owner
            self.training = callee.owner.training

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        return self._callee.call({**given, **self._constants})


def module_of(callee: Callee, names: Iterable[str], constants: Mapping[str, Any]) -> torch.nn.Module:
    """Make a module that can be exported.

    torch.export writes no dynamic shapes for what ends in ``**kwargs``, and Hugging Face models take half of their
    arguments there; so ``forward`` of this one names them all.
    """
    # names: parameters that `forward` of the module has
    names = tuple(names)

    def forward(self: _Recorded, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what inspect reads first
    cls = type(type(callee.owner).__name__, (_Recorded,), {"forward": forward})
    module: torch.nn.Module = cls(callee, names, constants)
    return module
