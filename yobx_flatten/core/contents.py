"""List the contents of an object without running code of its class, and copy values that can be written in place.

``getattr``, ``isinstance``, ``len`` and ``iter`` are not used, since they can run code of the class. The contents of
classes, Python modules, functions, methods, weak references, generators and frames are not listed.
"""

# class Layer(Base):                  state.layers          a list            list.__iter__
#     __slots__ = ("keys",)           state.layers[0]       a Layer
#     name = "a"                      state.layers[0].keys  a slot            member descriptor
#     @property
#     def size(self): ...             never called

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import random
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

from ..errors.failures import result_or
from .private_names.of_torch import DisableTorchFunctionSubclass, set_version

# Built-in types whose ``repr`` runs no code of a user
NUMBERS = (bool, int, float, complex, str, bytes, bytearray, type(None), type(...), range)

_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_namespace: Callable[[type], Any] = type.__dict__["__dict__"].__get__

_OF_PYTHON = (
    "Module Function BuiltinFunction Method MethodWrapper WrapperDescriptor MethodDescriptor Code Frame Traceback "
    "Generator Coroutine AsyncGenerator Cell"
)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_CLOSED = (*NUMBERS, type, property, classmethod, staticmethod, weakref.ref, *_OF_TORCH)
_CLOSED += tuple(getattr(types, f"{name}Type") for name in _OF_PYTHON.split())

_Items = Callable[[Any], Iterable[tuple[str, Any]]]


def _numbered(cls: Any, path: str = "[{}]") -> _Items:
    iterate = cls.__iter__
    return lambda obj: ((path.format(index), item) for index, item in enumerate(iterate(obj)))


_ITEMS: dict[type, _Items] = {
    dict: lambda obj: ((f"[{format_key(key)}]", value) for key, value in dict.items(obj)),
    list: _numbered(list),
    tuple: _numbered(tuple),
    collections.deque: _numbered(collections.deque),
    # an item of a set has no path in Python; a number identifies it
    set: _numbered(set, "{{{}}}"),
    frozenset: _numbered(frozenset, "{{{}}}"),
}


class Layout(NamedTuple):
    """The `__dict__` and slots in which instances of one class store their contents."""

    is_tensor: bool
    is_closed: bool
    attributes: Callable[[Any], Any] | None  # reads `__dict__`
    slots: tuple[tuple[str, Callable[[Any], Any]], ...]
    items: _Items | None

    def names(self, obj: object) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for name, read in self.slots:
            with contextlib.suppress(AttributeError):  # a slot that was never set
                found.append((name, read(obj)))
        if self.attributes is not None:
            found += dict.items(self.attributes(obj))
        return found

    def children(self, obj: object) -> list[tuple[str, Any]]:
        """Return each attribute and item of an instance, together with Python code that reads it, such as ``.x``."""
        found = [
            (f".{name}" if type(name) is str and name.isidentifier() else f".__dict__[{format_key(name)}]", value)
            for name, value in self.names(obj)
        ]
        return found if self.items is None else [*found, *self.items(obj)]


class Layouts:
    """Cache of the :class:`Layout` of each class that is found during one traversal of nested objects."""

    def __init__(self) -> None:
        self._by_id: dict[int, Layout] = {}
        known = (("numpy", "ndarray"), ("jax._src.array", "ArrayImpl"))
        arrays = (getattr(sys.modules.get(module), name, None) for module, name in known)
        self._arrays = tuple(cls for cls in arrays if cls is not None)

    def __call__(self, cls: type) -> Layout:
        if (found := self._by_id.get(id(cls))) is not None:
            return found
        bases = _mro(cls)
        is_tensor = any(base is torch.Tensor or any(base is array for array in self._arrays) for base in bases)
        is_closed = is_tensor or any(base is closed for base in bases for closed in _CLOSED)
        attributes, slots, items = None, [], None
        for base in () if is_closed else bases:
            for name, value in _namespace(base).items():
                kind = type(value)
                if name == "__dict__":
                    if attributes is None and kind in (types.GetSetDescriptorType, types.MemberDescriptorType):
                        attributes = value.__get__
                elif kind is types.MemberDescriptorType:
                    slots.append((name, value.__get__))
            if items is None:
                items = next((_ITEMS[built_in] for built_in in _ITEMS if base is built_in), None)
        found = self._by_id[id(cls)] = Layout(is_tensor, is_closed, attributes, tuple(slots), items)
        return found


def size_in_bytes(tensor: Any) -> int:
    """Return the size in bytes of all elements of a tensor or array; 0 if the size is not known."""
    try:
        if issubclass(type(tensor), torch.Tensor):
            with DisableTorchFunctionSubclass():  # a subclass may run its own code
                return int(torch.Tensor.numel(tensor) * torch.Tensor.element_size(tensor))
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(type(tensor), numpy.ndarray):
            return int(numpy.ndarray.nbytes.__get__(tensor))
        return int(tensor.nbytes)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0  # a nested or sparse layout has no such size, and a symbolic size of a trace is not an int


# `cls.__module__` and `cls.__qualname__`, without code of the metaclass
MODULE_OF: Callable[[type], str] = type.__dict__["__module__"].__get__
QUALNAME_OF: Callable[[type], str] = type.__dict__["__qualname__"].__get__


def is_known_base(cls: type, names: Iterable[str]) -> bool:
    """Return whether a class or one of its bases is defined in one of the named packages."""
    return any(str(MODULE_OF(base)).partition(".")[0] in names for base in _mro(cls))


def format_key(key: object) -> str:
    """Return a dict key as text; an object that is not of a built-in type is shown as the name of its class."""
    if any(type(key) is kind for kind in NUMBERS):
        return repr(key)
    if type(key) is tuple:
        inner = [format_key(item) for item in key]
        return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
    cls: Any = key if issubclass(type(key), type) else type(key)  # not isinstance, which may run code of the key
    return f"<{QUALNAME_OF(cls)}>"


# Returns a fingerprint of an object that changes with each write: the values, or a tensor's version and memory.
Reader: TypeAlias = Callable[[Any], object]
REMEMBERING = type(functools.cache(len))


def reader_of(kind: type) -> Reader | None:
    """Return the function that computes fingerprints of instances of a class; ``None`` if the class has none."""
    if issubclass(kind, torch.Tensor):
        return mark_of_tensor
    if issubclass(kind, torch.Generator):
        return lambda one: bytes(one.get_state().tolist())
    if issubclass(kind, random.Random):
        return lambda one: hash(one.getstate())
    if kind is REMEMBERING:
        return lambda one: None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return lambda one: None if one.dtype.hasobject else zlib.crc32(one.tobytes())
    is_of_numpy = numpy is not None and issubclass(kind, (numpy.random.Generator, numpy.random.RandomState))
    return _numpy_state if is_of_numpy else None


def mark_of_tensor(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a fingerprint of a tensor that changes when torch writes to the tensor or moves it in memory."""
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.shape, tensor.dtype, tensor.requires_grad, _place(tensor)


def _place(tensor: torch.Tensor) -> object:
    return result_or(
        lambda: (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride()),
        lambda error: None,  # a fake tensor has no memory
    )


def mark_with_bits(tensor: torch.Tensor) -> object:
    """Return a fingerprint that contains a checksum of a tensor's bytes, because torch does not count every write."""

    def read() -> object:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return zlib.crc32(ctypes.string_at(flat.data_ptr(), flat.nbytes)) if flat.nbytes else 0

    # a fake tensor, or a layout without memory, has no values
    return *mark_of_tensor(tensor), result_or(read, lambda error: None)


def _numpy_state(generator: Any) -> object:
    if hasattr(generator, "bit_generator"):
        return repr(generator.bit_generator.state)
    _, keys, *others = generator.get_state()
    return keys.tobytes(), others


def restoring(obj: Any, mark: Any, grad: torch.Tensor | None, copied: dict[object, Any]) -> Callable[[], object]:
    if isinstance(obj, torch.Tensor):
        return _restoring_tensor(obj, mark, grad, copied)
    if isinstance(obj, random.Random):
        return functools.partial(obj.setstate, obj.getstate())
    if isinstance(obj, REMEMBERING):
        misses = obj.cache_info().misses
        # a cache that was filled during the call may hold tensors of a trace, which have no data
        return lambda: obj.cache_clear() if obj.cache_info().misses != misses else None
    if hasattr(obj, "bit_generator"):
        return functools.partial(setattr, obj.bit_generator, "state", obj.bit_generator.state)
    if hasattr(obj, "set_state"):
        return functools.partial(obj.set_state, obj.get_state())
    values = obj.copy()
    return lambda: obj.__setitem__(..., values) if obj.flags.writeable else None


def _restoring_tensor(
    tensor: torch.Tensor, mark: Any, grad: torch.Tensor | None, copied: dict[object, Any]
) -> Callable[[], object]:
    # the whole storage is copied, so that views and shared elements are restored
    storage, alias = tensor.untyped_storage(), tensor.detach()
    if storage.device.type == "meta":  # without data, like a tensor of a trace
        return lambda: None
    if (key := (storage.data_ptr(), storage.nbytes())) not in copied:
        copied[key] = storage.clone()
    values, requires_grad, version = copied[key], tensor.requires_grad, mark[0]

    def restore() -> None:
        with torch.inference_mode(tensor.is_inference()):
            if _place(tensor) != mark[4] or tensor.shape != mark[1]:
                tensor.data = alias
            if storage.nbytes() != values.nbytes():
                storage.resize_(values.nbytes())
            if not torch.equal(_bytes_of(storage), _bytes_of(values)):  # memory mapped from a file may be read-only
                storage.copy_(values)
            if tensor.is_leaf and tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.is_leaf and requires_grad and tensor.grad is not grad:
                tensor.grad = grad
        if version is not None and tensor._version != version:
            set_version(tensor, version)

    return restore


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
