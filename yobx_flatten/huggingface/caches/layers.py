"""Describe the attributes of the cache layer classes in transformers, and their codes in leaf names, such as ``W8``.

If the class of a cache layer is not in :data:`LETTERS`, all attributes of the layer are flattened. The leaf names of
such a layer contain a code of :data:`OTHER_LETTERS`, or the name of the class. A token counter that a layer stores as a
tensor is the leaf ``position``. The integer token counter of all sliding layers of a cache is the leaf ``length``.
"""

# letter  class                    leaves           counter         static (digits after the letter)
# `D`     `DynamicLayer`           `key`, `value`   their length    none
# `W`     `DynamicSlidingWindow-`  `key`, `value`   `length`        window; `r` while it records
#         `Layer`                                                   its past
# `S`     `StaticLayer`            `key`, `value`,  `position`      maximal length
#                                  `position`
# `X`     `StaticSlidingWindow-`   `key`, `value`,  `position` and  window; `c` where it never
#         `Layer`                  `position`       `length`        drops a token

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import logging
import re
import sys
from typing import Any

import torch

from ...core.private_names.of_torch import dispatch_depth, functorch, is_jit_tracing
from ...errors import CacheStructureError, UnsupportedLayerError, describe_class
from ...errors.failures import say
from ...registry.recipe.aliases import CacheLayer
from .state import SIZES, Template

# Marks a layer that was rebuilt around ``None``, torch's temporary placeholder: it is not half-initialised.
PLACEHOLDERS = "_yobx_placeholders"

# class name -> letter
LETTERS = {
    "DynamicLayer": "D",
    "DynamicSlidingWindowLayer": "W",
    "StaticLayer": "S",
    "StaticSlidingWindowLayer": "X",
    "SlidingWindowLayer": "X",  # the name in transformers 4.56
}

_KINDS: dict[type, LayerKind | None] = {}  # not functools.cache, which dynamo ignores

# Letters of classes that are flattened by their attributes (see :mod:`yobx_flatten.huggingface.caches.state`).
OTHER_LETTERS = {
    "DynamicIndexedLayer": "I",
    "StaticIndexedLayer": "J",
    "LinearAttentionLayer": "L",
    "LinearAttentionAndFullAttentionLayer": "LD",
    "LinearAttentionAndSlidingWindowAttentionLayer": "LW",
    "LinearAttentionAndStaticFullAttentionLayer": "LS",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "LX",
    "QuantoQuantizedLayer": "Q",
    "HQQQuantizedLayer": "H",
    "Fp8QuantizedLayer": "F",
    "DummyLayer": "Z",
}

# window -> device -> the tensor that transformers 5 keeps next to the window (DDP gathers it). Stored when a layer is
# flattened, because unflatten must not make tensors, which a trace turns into constants of the program.
_WINDOW_TENSORS: dict[int, dict[torch.device, torch.Tensor]] = {}


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The letter code, such as ``D``, and the attributes of a class of cache layers in the installed transformers."""

    cls: Any  # the class
    letter: str  # its letter code
    has_flag: bool  # instances have `is_initialized` (transformers >= 4.57); before, empty means `keys is None`
    has_recording: bool  # instances have `record_past` (transformers >= 5.17)
    has_dtype: bool  # a filled layer has `dtype` (transformers < 5.24)
    has_cropping: bool  # instances have `_is_croppable` (transformers >= 5.24)
    derived: tuple[str, ...]  # attributes that a filled static layer computes from its tensors
    has_position: bool  # a static layer counts in a tensor (transformers >= 5.10 or so)

    @property
    def counter(self) -> str | None:
        """The attribute in which a sliding layer counts all tokens that it has seen; ``None`` for other layers."""
        if self.letter == "X" and self.has_position:
            return "cumulative_length_int"
        return "cumulative_length" if self.letter in "WX" else None

    def code(self, layer: CacheLayer) -> str:
        """Return the code that describes a layer's class and settings in leaf names, such as ``W8``."""
        if self.letter == "D":
            return "D"
        if self.letter == "W":
            return f"W{layer.sliding_window}{'r' if getattr(layer, 'record_past', False) else ''}"
        # depends on the requested capacity, but the layer stores only the smaller of capacity and window
        return f"{self.letter}{layer.max_cache_len}{'c' if getattr(layer, '_is_croppable', False) else ''}"

    def knows(self, layer: CacheLayer) -> bool:
        """Return whether a cache layer has only attributes that its class sets in tested versions of transformers."""
        # otherwise a user or an untested version of transformers added one, and all attributes are stored
        known = {"keys", "values", "dtype", "device", "is_initialized", "sliding_window", "record_past"}
        known |= {"max_cache_len", "cumulative_length", "cumulative_length_int", "_is_croppable", *self.derived}
        return known.union((PLACEHOLDERS, "_sliding_window_tensor")).issuperset(vars(layer))

    def is_filled(self, layer: CacheLayer, index: int) -> bool:
        held = vars(layer)
        if PLACEHOLDERS in held:
            return True
        keys, values = held.get("keys"), held.get("values")
        filled = bool(held.get("is_initialized", keys is not None))
        if (keys is None) == (values is None) and (filled or keys is None):
            return filled
        found = {name: "None" if held.get(name) is None else type(held[name]).__name__ for name in ("keys", "values")}
        raise CacheStructureError(
            f"layers[{index}] is a half-initialised {self.cls.__name__}: keys is {found['keys']}, values is "
            f"{found['values']}, is_initialized is {held.get('is_initialized', 'missing')}. Fill the layer with "
            "layer.update(keys, values), or empty it with layer.reset()."
        )

    def template(self, parameter: str, *, has_position: bool) -> Template:
        """Return a template (see :mod:`.state`) from which all attributes of a filled layer are rebuilt."""
        # has_position: whether the layer counts in a tensor, or did so in the version that stored the program
        template: Template = {"keys": ["tensor"], "values": ["tensor"]}
        if self.has_flag:
            template["is_initialized"] = ["fixed", True]
        if self.letter == "W":
            template["sliding_window"] = ["fixed", int(parameter.rstrip("r"))]
            if self.has_recording:
                template["record_past"] = ["fixed", parameter.endswith("r")]
        elif self.letter in "SX":  # keys and values have full length from the start, as in a `StaticCache`
            template["max_cache_len"] = ["fixed", int(parameter.rstrip("c"))]
            if self.has_cropping:
                template["_is_croppable"] = ["fixed", parameter.endswith("c")]
        if has_position:
            template["cumulative_length"] = ["tensor"]
        if self.counter is not None:
            template[self.counter] = ["length"]
        template |= {"dtype": ["dtype", 0]} if self.has_dtype else {}
        template["device"] = ["device", 0]
        for name in self.derived:
            part, axis = SIZES[name]
            template[name] = ["shape", ("keys", "values").index(part), axis]
        return template

    def empty(self, parameter: str) -> CacheLayer:
        if self.letter == "D":
            return self.cls()
        size = int(parameter.rstrip("rc"))
        layer: Any = self.cls(size, size) if self.letter == "X" else self.cls(size)
        if self.has_cropping:
            layer._is_croppable = parameter.endswith("c")
        if parameter.endswith("r"):
            layer.activate_past_recording()
        return layer


def remember(held: dict[str, Any]) -> None:
    """Keep ``_sliding_window_tensor``, one of the attributes ``held`` of a cache layer, for layers rebuilt later."""
    tensor = held.get("_sliding_window_tensor")
    if type(tensor) is torch.Tensor:
        _WINDOW_TENSORS.setdefault(held["sliding_window"], {}).setdefault(tensor.device, tensor)


def make_window_tensor(cls: type, window: int, device: torch.device) -> torch.Tensor | None:
    """Return the window size as a tensor, for the attribute ``_sliding_window_tensor`` of a layer; or ``None``."""
    # no tensor is made for classes without one, and in a trace, where a new tensor would become a constant
    tensors = _WINDOW_TENSORS.setdefault(window, {})
    may_be_traced = torch.compiler.is_compiling() or is_jit_tracing()
    if may_be_traced or dispatch_depth() > 0 or functorch.peek_interpreter_stack() is not None:
        return tensors.get(device)
    if device not in tensors:
        cache_utils: Any = sys.modules["transformers.cache_utils"]
        read_by = getattr(cache_utils.DynamicCache.__iter__, "__code__", None)
        is_read = read_by is not None and "_sliding_window_tensor" in read_by.co_consts
        if is_read and issubclass(cls, cache_utils.DynamicSlidingWindowLayer):
            with torch.inference_mode(False):  # the tensor outlives the block
                tensors[device] = torch.tensor(window, dtype=torch.long, device=device)
    return tensors.get(device)


def kind_of(cls: Any) -> LayerKind | None:
    """Return the ``LayerKind`` of a cache layer class; ``None`` for a class that is flattened by its attributes."""
    if cls in _KINDS:
        return _KINDS[cls]
    letter = LETTERS.get(cls.__name__) if cls.__module__ == "transformers.cache_utils" else None
    if letter is None:
        say(logging.DEBUG, "unknown cache layer %s: flattened by its attributes", describe_class(cls))
        _KINDS[cls] = None
        return None
    dynamic = sys.modules[cls.__module__].DynamicLayer
    filled_by = getattr(cls, "lazy_initialization", None)
    names = inspect.unwrap(filled_by).__code__.co_names if filled_by is not None and letter in "SX" else ()
    _KINDS[cls] = LayerKind(
        cls,
        letter,
        has_flag="is_initialized" in vars(dynamic()),
        has_recording=hasattr(cls, "activate_past_recording"),
        has_dtype=keeps_dtype(cls),
        has_cropping=letter == "X" and "_is_croppable" in inspect.unwrap(cls.__init__).__code__.co_names,
        derived=tuple(name for name in SIZES if name in names),
        # a tensor is increased in place; sliding layers of older versions count in an integer of the same name
        has_position=letter in "SX" and "add_" in inspect.unwrap(cls.update).__code__.co_names,
    )
    return _KINDS[cls]


def code_of(layer: CacheLayer) -> str:
    """Return the code that describes a layer in leaf names, such as ``W8`` for a sliding window of 8 tokens."""
    cls = type(layer)
    kind = kind_of(cls)
    if kind is not None:
        return kind.code(layer)
    if cls.__name__ not in OTHER_LETTERS or cls.__module__ != "transformers.cache_utils":
        name = cls.__name__.replace("_", "")
        return f"{name}Layer" if letter_of(name) else name
    return f"{OTHER_LETTERS[cls.__name__]}{vars(layer).get('sliding_window', '')}"


_CODE = re.compile(f"({'|'.join({*LETTERS.values(), *OTHER_LETTERS.values()})})([0-9]*[rc]?)")


def letter_of(code: str) -> str:
    """Return the letters of a cache layer's code, which leaf names contain; ``""`` if the code is a class name.

    >>> letter_of("W8"), letter_of("LX16"), letter_of("SummedLayer")
    ('W', 'LX', '')
    """
    found = _CODE.fullmatch(code)
    return found[1] if found else ""


@functools.cache
def keeps_dtype(cls: type) -> bool:
    """Return whether layers of a class have a ``dtype`` attribute, as in versions of transformers before 5.24."""
    fill = [vars(base)["lazy_initialization"] for base in cls.__mro__ if "lazy_initialization" in vars(base)]
    written = (step for one in fill for step in dis.get_instructions(inspect.unwrap(one).__code__))
    return any(step.opname == "STORE_ATTR" and step.argval == "dtype" for step in written)


@functools.cache
def kind_of_code(code: str) -> tuple[LayerKind, str]:
    import transformers.cache_utils as cache_utils

    letter = letter_of(code)
    for name, known in LETTERS.items():
        kind = kind_of(getattr(cache_utils, name, object))
        if letter == known and kind is not None:
            parameter = code[len(letter) :]
            if not re.fullmatch({"D": "", "W": "[0-9]+r?", "X": "[0-9]+c?"}.get(letter, "[0-9]+"), parameter):
                break
            return kind, parameter
    raise UnsupportedLayerError(
        f"The stored cache has a layer of kind {code!r}, which this version of yobx_flatten does not know. Known "
        "kinds: D (dynamic), and with any number of tokens for 8: W8 (sliding), S8 (static) and X8 (static sliding)."
    )
