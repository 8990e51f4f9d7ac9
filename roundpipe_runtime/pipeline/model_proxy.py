"""A wrapper with the parameters, buffers, names, hooks and attributes of the wrapped module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

from torch import nn

from ..errors import ConfigError

CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# The wrapper shares these dictionaries with the wrapped model: parameters, modules, hooks.
_SHARED = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


class ModelProxy(nn.Module):
    """Base of wrappers around a module. Attributes that begin with ``_rp_`` belong to the wrapper.

    All other attributes are read from the wrapped model, written to it and deleted from it.
    """

    _rp_model: nn.Module
    _rp_original: nn.Module | None

    def _rp_stand_for(self, model: nn.Module, original: nn.Module | None) -> None:
        # original: model from which `model` was made, and which has the attributes; `None` if it is `model` itself
        own = self.__dict__
        for shared in _SHARED:
            own[shared] = model.__dict__[shared]
        own.pop("_is_full_backward_hook", None)  # so that it is read from the model, as all other attributes are
        own["training"] = model.training
        own["_rp_model"], own["_rp_original"] = model, original

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        self._rp_model.train(mode)
        self.__dict__["training"] = self._rp_model.training
        return self

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_rp_model" not in own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        for model in (own["_rp_original"], own["_rp_model"]):
            if model is not None and hasattr(model, name):
                return getattr(model, name)
        kind = type(own["_rp_original"] or own["_rp_model"]).__name__
        raise AttributeError(f"neither 'RoundPipe' nor the wrapped {kind!r} has an attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_rp_model" not in self.__dict__:
            super().__setattr__(name, value)
        elif name.startswith("_rp_") or name == "training" or name in _SHARED:
            self.__dict__[name] = value
        else:
            setattr(self._rp_original or self._rp_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._rp_original or self._rp_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._rp_original or self._rp_model)})

    def __len__(self) -> int:
        return len(self._rp_model)  # type: ignore[arg-type] # raises TypeError if the model has no length

    def __getitem__(self, index: Any) -> Any:
        return self._rp_model[index]  # type: ignore[index] # raises TypeError if the model has no items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rp_model)  # type: ignore[call-overload,no-any-return] # as above

    def __bool__(self) -> bool:
        return True


def wrapped_model(module: nn.Module) -> nn.Module:
    """Return the model in a pipeline; other modules are returned unchanged.

    >>> layer = nn.Linear(1, 1)
    >>> wrapped_model(layer) is layer
    True
    """
    return module._rp_model if isinstance(module, ModelProxy) else module


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a model as one module; layers in a list become an ``nn.Sequential``."""
    if isinstance(model, ModelProxy):
        raise ConfigError("The model is a RoundPipe already: do not wrap the model again.")
    found = f"the class {model.__qualname__}" if isinstance(model, type) else type(model).__qualname__
    if type(model) is nn.Sequential or isinstance(model, (nn.ModuleList, list, tuple)):
        layers = list(model)
        others = [type(layer).__qualname__ for layer in layers if not isinstance(layer, nn.Module)]
        found += f" with {others[0]}" if others else " of 0"
        if layers and not others:
            return model if type(model) is nn.Sequential else nn.Sequential(*layers)
    elif isinstance(model, nn.Module):
        return model
    raise ConfigError(
        f"RoundPipe wraps an nn.Module or a list of nn.Modules, found {found}. Give RoundPipe layers:\n"
        "    RoundPipe(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))"
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the children of a plain ``nn.Sequential``, otherwise the model itself."""
    kind = type(model)
    is_plain = "forward" not in vars(model) and (kind.__call__, getattr(kind, "forward", None)) == _SEQUENTIAL
    return list(model) if isinstance(model, nn.Sequential) and is_plain and len(model) else [model]


_SEQUENTIAL = nn.Sequential.__call__, nn.Sequential.forward
