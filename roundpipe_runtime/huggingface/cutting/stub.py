"""Copy a model with stubs instead of its layers, and make placeholders for the tensors that layers would return.

A copy shares parameters, buffers and configuration with the model, but has its own module objects. Because the modules
are not shared, a copy can get parameters on one device while the model's layers run on another device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import DisableTorchFunctionSubclass, make_wrapper_subclass
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ...errors import CutError
from ...pipeline.live import tensors_held, with_own_forwards
from ..loss.lazy_logits import QUERIES_OF_FORM
from .capture import collect_on_copy


class Session(Protocol):  # `pieces.PhaseSession`, which this file cannot import: that file imports this one
    def call(self, layer: str, args: tuple[Any, ...], kwargs: Kwargs) -> PyTree: ...

    def embed(self, name: str, run: Callable[[], Any], device: torch.device) -> PyTree: ...


_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class _Running(threading.local):
    session: Session | None = None  # computes the results of stubs


_RUNNING = _Running()


@contextlib.contextmanager
def running(session: Session) -> Iterator[None]:
    before, _RUNNING.session = _RUNNING.session, session
    try:
        yield
    finally:
        _RUNNING.session = before


def _answer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    session, layer = _RUNNING.session, self.__dict__["_rp_name"]
    if session is None:
        raise RuntimeError(f"The layer {layer} can be called only in a forward or backward of the pipeline.")
    return session.call(layer, args, kwargs)


def _embed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    session, name = _RUNNING.session, self.__dict__["_rp_embedding"]
    run = functools.partial(nn.Module.__call__, self, *args, **kwargs)
    ids = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return run() if session is None or ids is None else session.embed(name, run, ids.device)


@functools.cache
def _embedding_class(kind: Any) -> type:
    """Return a subclass of an embedding's class; a call of an instance is passed to the running session."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__call__": _embed})


@functools.cache
def _stub_class(kind: Any) -> type:
    """Return a subclass of a layer's class without modules and parameters, which passes ``isinstance`` checks."""
    made = type(kind.__name__, (kind,), {"__module__": kind.__module__})

    def from_layer(self: nn.Module, name: str) -> Any:
        return getattr(self.__dict__["_rp_layer"], name)

    # set afterwards, because `__init_subclass__` of transformers would wrap forward
    for name, function in (("__call__", _answer), ("forward", _answer), ("__getattr__", from_layer)):
        setattr(made, name, function)
    return made


def copy_with_stubs(model: nn.Module, layers: Mapping[str, nn.Module], embeddings: Set[str] = frozenset()) -> nn.Module:
    """Return a copy of a model that shares its parameters, with a stub instead of each of ``layers``."""
    # embeddings: names of embeddings that call the session
    memo: dict[int, Any] = {}
    for name, layer in layers.items():
        memo[id(layer)] = stub = nn.Module()
        stub.__dict__.update(_rp_layer=layer, _rp_name=name, training=layer.training)
        stub.__class__ = _stub_class(type(layer))  # type: ignore[arg-type] # mypy takes __hash__ of the class for that of its objects
    inside = {id(module) for layer in layers.values() for module in layer.modules()}
    for module in model.modules():
        if id(module) not in inside:
            shared = [tensor for held in (module._parameters, module._buffers) for tensor in held.values()]
            # the dictionaries of hooks are shared, so hooks that are registered or removed later also apply to the copy
            shared += [value for name, value in module.__dict__.items() if "config" in name or name.endswith(_HOOKS)]
            memo.update((id(value), value) for value in [*shared, *tensors_held(module)])
    keep_alive = list(memo.values())  # deepcopy looks objects up by id
    try:
        with with_own_forwards(model):  # `generate` of a pipeline may have replaced the forward
            made: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, ValueError, AttributeError, copy.Error) as error:
        raise CutError("copy", f"{type(model).__name__} cannot be copied: {error}") from error
    rebind_functions(made, memo)
    del keep_alive
    collect_on_copy(made)
    for name in embeddings:
        module = made.get_submodule(name)
        module.__dict__["_rp_embedding"] = name
        module.__class__ = _embedding_class(type(module))  # type: ignore[arg-type] # as above
    return made


def sync(copied: nn.Module, model: nn.Module, used: Set[str] | None) -> None:
    # used: names of the parameters for the copy; `None` for all
    for path, module in copied.named_modules():
        if "_rp_name" in module.__dict__:
            continue
        original = model.get_submodule(path)
        prefix, held = f"{path}." if path else "", original._parameters.items()
        module._parameters.clear()
        module._parameters.update((n, p) for n, p in held if used is None or p is None or f"{prefix}{n}" in used)
        module._buffers.clear()
        module._buffers.update(original._buffers)
        for name, value in original.__dict__.items():
            if _is_simple(value) or isinstance(value, torch.Tensor):
                module.__dict__[name] = value
            elif _is_plain(value) and module.__dict__.get(name) != value:  # for example the active adapters
                module.__dict__[name] = copy.deepcopy(value)


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_simple(key) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple, set):
        return all(_is_plain(item) for item in value)
    return _is_simple(value)


def rebind_functions(copied: nn.Module, copies: Mapping[int, Any]) -> None:
    """Let functions in a copied model, such as a replaced ``forward``, use the modules of the copy."""
    made: dict[int, Any] = {}
    for module in copied.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, (types.FunctionType, types.MethodType)):
                module.__dict__[name] = _rebound(value, copies, made)


def _rebound(value: Any, copies: Mapping[int, Any], made: dict[int, Any]) -> Any:
    """Replace a module by its copy, also inside a function or bound method; return any other value unchanged."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        function, owner = _rebound(value.__func__, copies, made), _rebound(value.__self__, copies, made)
        is_same = function is value.__func__ and owner is value.__self__
        return value if is_same else types.MethodType(function, owner)
    if not isinstance(value, types.FunctionType):
        return value
    if id(value) in made:
        return made[id(value)]
    made[id(value)] = value  # a function whose closure contains itself is visited once
    cells = []
    for cell in value.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not set yet
            cells.append(cell)
        else:
            other = _rebound(held, copies, made)
            cells.append(cell if other is held else types.CellType(other))
    if any(one is not cell for one, cell in zip(cells, value.__closure__ or (), strict=True)):
        new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
        new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
        new.__module__, new.__doc__ = value.__module__, value.__doc__
        new.__dict__.update(value.__dict__)  # for example ``__wrapped__``, which has the signature
        made[id(value)] = new
    return made[id(value)]


# While the forward of a model is recorded, layers do not run, and placeholders replace their outputs. A model can pass
# placeholders from layer to layer. The first operation on a placeholder ends the forward with `NeedsValue`.


class Key(NamedTuple):
    """Identifies a tensor, such as output number ``leaf`` of layer call number ``call``."""

    call: int  # negative if no layer returned the tensor
    leaf: int


class NeedsValue(BaseException):  # models catch `Exception`
    """Raised when a model's forward computes with a `Placeholder`, a tensor whose values are not computed yet."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


# Queries that a placeholder of known shape answers.
_FORM = {*QUERIES_OF_FORM, torch.Tensor.__len__}
# Functions that create a tensor with the shape, or the dtype and device, of another one.
_OF_FORM = {
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
    torch.Tensor.new_tensor,
}
_ALWAYS = {torch.Tensor.__repr__, torch.Tensor.__hash__, torch.Tensor.__format__}


class Placeholder(torch.Tensor):
    """A tensor without memory that stands for a tensor that is not computed yet, such as an output of a layer."""

    key: Key
    has_form: bool  # whether shape, dtype and device are known

    @staticmethod
    def __new__(cls, key: Key, like: torch.Tensor | None) -> Placeholder:
        known = like is not None and not (isinstance(like, Placeholder) and not like.has_form)
        with DisableTorchFunctionSubclass():
            form = like if known and like is not None else torch.empty(0)
            made: Placeholder = make_wrapper_subclass(
                cls, form.shape, dtype=form.dtype, device=form.device, requires_grad=False
            )
        made.key = key
        made.has_form = known
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # mypy loses its default
        return f"Placeholder({self.key})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = first_placeholder([*args, *(kwargs or {}).values()])
        if found is None or func in _ALWAYS or (found.has_form and func in _FORM):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if found.has_form and func in _OF_FORM and args[0] is found:
            with DisableTorchFunctionSubclass():
                form = torch.empty((), dtype=found.dtype, device=found.device).expand(found.shape)
            return func(form, *args[1:], **(kwargs or {}))
        raise NeedsValue(found.key)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch annotates it as no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise `NeedsValue`: an ATen operator, called without ``__torch_function__``, reads a placeholder's values."""
        found = first_placeholder([*args, *(kwargs or {}).values()])
        raise NeedsValue(found.key if found is not None else Key(-1, -1))


def first_placeholder(values: Any) -> Placeholder | None:
    for value in values:
        if isinstance(value, Placeholder):
            return value
        if isinstance(value, (list, tuple)) and (inner := first_placeholder(value)) is not None:
            return inner
    return None
