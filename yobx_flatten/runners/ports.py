"""Describe an exported file's inputs, and find the output that becomes each KV cache input in the next call.

Each call must return every KV cache tensor except the encoder's; otherwise the next call would lose earlier tokens.
"""

# past_key_values.0.key          <-- next time --   present.0.key
# past_key_values.length         <-- next time --   present.length
# past_key_values.0.encoder.key      unchanged after the first call, if no output has its name

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from ..core.compare import is_text
from ..errors import FlattenError, GenerationError, ReplayError, require
from ..huggingface.cache_names import CACHE, PRESENT, after_cache

KEPT_SCORES = "num_logits_to_keep"
"""Name of an optional input of ONNX files: for how many of the last tokens logits are returned."""

FIRST, SECOND = "lora_A", "lora_B"
"""Endings, after a dot, of the names of a LoRA adapter's inputs: matrix (rows, rank), then matrix (rank, columns)."""

_NAMES = (
    "Export it again with these names, which export_onnx gives by itself:\n"
    f'    torch.onnx.export(..., input_names=[..., "{CACHE}.0.key"], output_names=[..., "{PRESENT}.0.key"])'
)


class Port(NamedTuple):
    name: str  # the name of the input
    shape: tuple[int | None, ...]  # `None` for a size that varies
    dtype: torch.dtype | None  # the dtype of its elements; `None` for text and other types that torch does not have


@dataclasses.dataclass(frozen=True)
class CacheSlot:
    """One tensor of the KV cache: an input, and the output that becomes this input in the next call."""

    port: Port  # the input
    present: str | None  # the output that replaces it in the next call; `None` if the leaf is unchanged


def present_of(name: str) -> str | None:
    """Return the name of the output that becomes a cache input in the next call; ``None`` for any other input.

    >>> present_of("past_key_values.0.key"), present_of("input_ids")
    ('present.0.key', None)
    """
    rest = after_cache(name)
    return None if rest is None else PRESENT + rest


def check_cache_outputs(
    inputs: Iterable[str], outputs: Collection[str], where: str, *, of: str | None = None, remedy: str = _NAMES
) -> None:
    """Raise an error if a file accepts a growing KV cache but does not return all tensors of the cache.

    >>> check_cache_outputs(["past_key_values.0.key"], ["logits", "present.0.key"], "model.onnx")
    """
    # where: name of the file that returns the outputs
    # of: name of the file that takes the inputs, if another file takes them
    grown = {name: present_of(name) for name in inputs if ".encoder." not in name}  # an encoder's keys do not grow
    lost = {name: present for name, present in grown.items() if present is not None and present not in outputs}
    if lost:
        name, present = next(iter(lost.items()))
        takes, returns = f"{of or where} takes", "does not return" if of is None else f"{where} does not return"
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise GenerationError(
            f"{takes} {name} and {returns} {present}{more}: the next call would not get the updated cache. It "
            f"returns {', '.join(outputs)}. {remedy}"
        )


def cache_slots(ports: Iterable[Port], outputs: Collection[str]) -> list[CacheSlot]:
    """Return the inputs that are KV cache tensors, each with the output to pass as this input in the next call.

    >>> counter = Port("past_key_values.length", (), torch.int64)
    >>> cache_slots([Port("input_ids", (None, None), torch.int64), counter], ["logits", "present.length"])
    [CacheSlot(port=Port(name='past_key_values.length', shape=(), dtype=torch.int64), present='present.length')]
    """
    presents = [(port, present_of(port.name)) for port in ports]
    grown = [(port, present) for port, present in presents if present is not None]
    return [CacheSlot(port, present if present in outputs else None) for port, present in grown]


def presents_of(slots: Iterable[CacheSlot]) -> dict[str, str]:
    return {slot.port.name: slot.present for slot in slots if slot.present is not None}


def is_present(name: str) -> bool:
    return name.startswith(f"{PRESENT}.")


def split_cache(
    found: Mapping[str, Any], slots: Iterable[CacheSlot], cache: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the outputs of a generation step into outputs such as logits, and the KV cache for the next step.

    >>> slots = [CacheSlot(Port("past_key_values.length", (), torch.int64), "present.length")]
    >>> split_cache({"logits": 1, "present.length": 4}, slots, {"past_key_values.length": 3})
    ({'logits': 1}, {'past_key_values.length': 4})
    """
    # slots: the cache inputs; empty for the file of a first call, whose outputs are the cache inputs of another file
    # returns: the other outputs by name, and the cache by name of the input, or by name of the output without slots
    slots = list(slots)
    if any(slot.present is None for slot in slots):
        check_cache_outputs([slot.port.name for slot in slots], found, "the file")
    presents = {name: value for name, value in found.items() if is_present(name)}
    named = ((slot.port.name, slot.present) for slot in slots)
    following = {name: cache[name] if present is None else found[present] for name, present in named}
    return {name: value for name, value in found.items() if name not in presents}, following or presents


def with_rows(leaf: Any, rows: torch.Tensor) -> Any:
    """Select rows of the batch in a cache tensor; a tensor without a batch axis, such as a counter, is unchanged.

    >>> with_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 1, 0])).tolist()
    [[3, 4], [3, 4], [1, 2]]
    """
    # rows: for each new row the index of an old row
    return leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.ndim > 1 else leaf


class Runner(Protocol):
    """The methods of an exported file that is open in a runtime, which comparisons and generation loops call."""

    # run    {input_ids, past_key_values.0.key, ...} ──> {logits, present.0.key, ...}      tensors
    # step   {input_ids, ...}, cache ──> {logits, ...}, cache for the next step            memory of the library

    runtime: ClassVar[str]  # name of the library, for reports
    name: str  # the name of the file or program, for messages

    @property
    def ports(self) -> Mapping[str, Port]: ...
    @property
    def outputs(self) -> Sequence[str]: ...
    @property
    def slots(self) -> Sequence[CacheSlot]: ...

    # inputs: a tensor, an array, a number or a text for every input of the file; other entries are ignored
    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]: ...

    # converts cache tensors by input name to the KV cache that `step` accepts
    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]: ...

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        # last_scores: whether the caller needs the scores of the last token only; some files then take less time
        ...


# Map element types between torch, NumPy and ONNX.
#
# A file must run in onnxruntime and in `onnx.reference`, which return NumPy arrays. So
#
# - complex numbers, which onnxruntime refuses to load, are stored as pairs of real numbers, in an additional axis;
# - bfloat16 and the 8-bit floats, which NumPy lacks, are stored in their own types, and the graph casts them to
#   float32, which represents each of their values;
# - `float4_e2m1fn_x2`, two numbers in a byte, is stored as bytes;
# - the types of two and four bits that ml_dtypes adds to NumPy, one number in a byte, are stored in ONNX's types, four
#   or two numbers in a byte, and cast like the floats. onnxruntime (1.31) has no kernel that casts `float4_e2m1fn`.


class Element(NamedTuple):
    """The format in which an ONNX file stores tensor elements of one dtype."""

    code: int  # the type of the initializer, a value of `onnx.TensorProto.DataType`
    pair: bool = False  # whether each element is stored as two numbers, in an additional last axis
    cast: bool = False  # whether the graph casts the elements to float32
    opset: int = 18  # the first version of ONNX's operators whose `Cast` accepts the type
    packed: int = 1  # how many numbers are stored in a byte; NumPy's arrays have one number in a byte

    def nbytes(self, count: int, itemsize: int) -> int:
        return count * itemsize if self.packed == 1 else -(-count // self.packed)


UINT8, INT64, STRING, BOOL, DOUBLE = Element(2), Element(7), Element(8), Element(9), Element(11)

_PLAIN = {"float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9}

ELEMENTS: dict[str, Element] = {
    **{name: Element(code) for name, code in _PLAIN.items()},
    "float16": Element(10),
    "float64": DOUBLE,
    "uint32": Element(12),
    "uint64": Element(13),
    "complex32": Element(10, pair=True),
    "complex64": Element(1, pair=True),
    "complex128": Element(11, pair=True),
    "bfloat16": Element(16, cast=True),
    "float8_e4m3fn": Element(17, cast=True, opset=19),
    "float8_e4m3fnuz": Element(18, cast=True, opset=19),
    "float8_e5m2": Element(19, cast=True, opset=19),
    "float8_e5m2fnuz": Element(20, cast=True, opset=19),
    "float8_e8m0fnu": Element(24, cast=True, opset=24),
    "float4_e2m1fn_x2": UINT8,
    "uint4": Element(21, cast=True, opset=21, packed=2),
    "int4": Element(22, cast=True, opset=21, packed=2),
    "float4_e2m1fn": Element(23, cast=True, opset=23, packed=2),
    "uint2": Element(25, cast=True, opset=25, packed=4),
    "int2": Element(26, cast=True, opset=25, packed=4),
}


def pack(codes: Any, packed: int) -> Any:
    """Pack several small numbers into each byte, the first number in the lowest bits, as ONNX does.

    >>> import numpy
    >>> pack(numpy.array([1, 2, 15], numpy.uint8), 2).tolist()
    [33, 15]
    """
    # codes: a flat array of bytes, one number in each
    import numpy

    bits = 8 // packed
    padded = numpy.zeros((-(-codes.size // packed), packed), numpy.uint8)
    padded.reshape(-1)[: codes.size] = codes & (2**bits - 1)
    return numpy.bitwise_or.reduce(padded << numpy.arange(0, 8, bits, dtype=numpy.uint8), axis=1, dtype=numpy.uint8)


def unpack(data: Any, packed: int, count: int) -> Any:
    """Undo :func:`pack`: return ``count`` numbers of a flat array, each in its own byte."""
    import numpy

    bits = 8 // packed
    codes = (data[:, None] >> numpy.arange(0, 8, bits, dtype=numpy.uint8)) & numpy.uint8(2**bits - 1)
    return codes.reshape(-1)[:count]


def require_onnx(function: str) -> Any:
    require("onnx", purpose=function, extra="onnx")
    import onnx

    if sys.byteorder != "little":  # ONNX stores the low byte first, and the bytes are copied from memory
        raise FlattenError(f"{function} works on little-endian machines only, and this machine is big-endian.")
    return onnx


# types that NumPy lacks, which are passed as bytes, by their number in ONNX
_AS_BYTES = {element.code: name for name, element in ELEMENTS.items() if element.cast and element.packed == 1}


class ValueType(NamedTuple):
    """The element type of an ONNX file's input or output, as torch, NumPy and ONNX name it."""

    name: str  # the name in torch and NumPy; `"str"` for text
    dtype: torch.dtype | None  # torch's dtype; `None` for text and other types that torch lacks
    code: int | None  # the number in ONNX of a type that NumPy lacks; `None` for other types


def value_type(kind: str) -> ValueType:
    """Parse onnxruntime's name of an element type, such as ``tensor(float)``.

    >>> value_type("tensor(float)")
    ValueType(name='float32', dtype=torch.float32, code=None)
    >>> value_type("tensor(bfloat16)").code, value_type("tensor(string)").dtype
    (16, None)
    """
    found = kind.removeprefix("tensor(").removesuffix(")")
    others = {"float": "float32", "double": "float64", "string": "str"}  # names that differ from torch's
    name = next((n for n in ELEMENTS if n.replace("_", "") == found), others.get(found, found))
    dtype = getattr(torch, name, None)
    element = ELEMENTS.get(name)
    code = element.code if element is not None and element.cast else None
    return ValueType(name, dtype if isinstance(dtype, torch.dtype) else None, code)


def to_value(name: str, kind: ValueType, leaf: Any) -> Any:
    """Convert an input to an ``onnxruntime.OrtValue``, without a copy if possible; strings become a NumPy array."""
    from onnxruntime import OrtValue

    if isinstance(leaf, torch.Tensor):
        if leaf.dtype != kind.dtype:
            found = str(leaf.dtype).removeprefix("torch.")
            raise ReplayError(f"Input {name} must be {kind.name}, found {found}.")
        plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if kind.code is None:
            return OrtValue.ortvalue_from_numpy(plain.numpy())
        bits = plain.view(torch.uint16 if plain.element_size() == 2 else torch.uint8).numpy()
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind.code)
    import numpy

    text = kind.name == "str"
    if isinstance(leaf, (bool, int, float, str)):  # a number has no type of its own
        array = numpy.array(leaf, object if text else kind.name)
    elif leaf.dtype.name == kind.name or (text and is_text(leaf)):
        array = leaf.astype(object) if text else leaf
    else:
        raise ReplayError(f"Input {name} must be {kind.name}, found {leaf.dtype.name}.")
    return array if text else OrtValue.ortvalue_from_numpy(array)  # an OrtValue cannot contain text


def from_value(value: Any) -> Any:
    """Convert an output of onnxruntime to a tensor; an output of strings becomes a NumPy array."""
    name = _AS_BYTES.get(value.element_type()) if hasattr(value, "element_type") else None
    if name is None:
        array = value.numpy() if hasattr(value, "numpy") else value
        # onnxruntime's uint64 is a type of C of the same size, which torch does not accept
        return array if is_text(array) else torch.from_numpy(array.view(array.dtype.str))
    # NumPy lacks the type, so the bytes are read from memory
    data = bytearray(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
    return torch.frombuffer(data or bytearray(8), dtype=getattr(torch, name))[: len(data)].reshape(value.shape())
