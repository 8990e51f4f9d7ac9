"""The recorded method: its arguments by name, and a module that takes only the varying ones."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import InvalidArgumentError, describe_class

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
        """Positional and keyword arguments; everything goes by name that may."""
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
    """Find out what is to be recorded."""
    # method: name of the method; `None` for `forward`, or for a target that is a method
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

    torch.export writes no dynamic shapes for what ends in ``**kwargs``, and models of transformers take half of their
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
