"""Describe a nested object in one line: :func:`string_type`."""

# C T 1 s2x3 [0.0,5.0:A2.5 N1nans]
# | | |  |    |   |    |    +------ number of NaN, left out of the rest
# | | |  |    +---+----+----------- minimum, maximum, average (`with_min_max`), or `=value` if 0-d
# | | |  +------------------------- shape (`with_shape`), otherwise `r` and the number of dimensions
# | | +---------------------------- element type, as `onnx.TensorProto` numbers it
# | +------------------------------ T torch tensor, F FakeTensor, A NumPy array, OV OrtValue
# +-------------------------------- C host or meta, G accelerator (`with_device`; none for NumPy)

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..core.private_names.of_torch import dispatch_depth, pytree
from ..errors.failures import result_or

if TYPE_CHECKING:
    import numpy
    import onnxruntime

LOGGER = logging.getLogger("yobx_flatten")

# The names in torch, NumPy and ml_dtypes of the element types, in the order of onnx.TensorProto; strings are objects.
_ORDER = """
    undefined float32 uint8 int8 uint16 int16 int32 int64 object bool float16 float64 uint32 uint64 complex64
    complex128 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz uint4 int4 float4_e2m1fn
    float8_e8m0fnu uint2 int2
"""
_ELEMENT_TYPES = {name: code for code, name in enumerate(_ORDER.split())}
_STRING, _UNDEFINED = _ELEMENT_TYPES["object"], _ELEMENT_TYPES["undefined"]

# torch has no minimum for these types; they are converted (only 53 bits of uint64 are exact)
_COMPARABLE = {"uint16": torch.int64, "uint32": torch.int64, "uint64": torch.float64}
_DEEPEST = 100  # far below Python's recursion limit: each level needs about four frames
_LONGEST_SET = 10
_PAIR = ("keys", "values")
_PLAIN_LAYERS = {"DynamicLayer"}, {"StaticLayer"}


def string_type(
    obj: object,
    with_shape: bool = False,
    with_min_max: bool = False,
    with_device: bool = False,
    ignore: bool = False,
    limit: int = 20,
    verbose: int = 0,
    *,
    caches: Literal["layers", "lists"] = "layers",
) -> str:
    """Describe the structure of a nested object in one line.

    The function never raises an error: an unknown class becomes ``Name(child, child)`` if it is registered as a pytree
    node, else ``Name(...)``. An object inside itself becomes ``<cycle>``, an object deeper than 100 levels ``...``.

    Args:
        obj: Any object, such as tensors, containers, caches, model outputs, dynamic shapes.
        with_shape: Show the sizes of a tensor, such as ``s2x3``, instead of the number of its axes, such as ``r2``.
        with_min_max: Show minimum, maximum and average of tensors, and values of numbers. Values are not shown for
            tensors without data (FakeTensor, meta), and for torch tensors in a trace, which would record the operators.
        with_device: Put ``C`` (host) or ``G`` (accelerator) before torch tensors.
        ignore: Has no effect. In onnx-diagnostic, ``string_type`` raises an error for unknown classes unless ``ignore``
            is set.
        limit: Lists and tuples of this length or longer are cut after their first element.
        verbose: Log the visited classes with the logger ``yobx_flatten``, even if its level is above ``DEBUG``.
        caches: How to write a cache whose layers are all of one class: ``"layers"`` writes each layer, as in every
            other cache; ``"lists"`` writes the two lists ``key_cache`` and ``value_cache``, as onnx-diagnostic does.

    Returns:
        The description, without line breaks.

    Example:
        >>> import torch
        >>> string_type({"a": torch.ones(2, 3), "b": [1, None]}, with_shape=True)
        'dict(a:T1s2x3,b:#2[int,None])'
        >>> string_type((torch.arange(4), 2.5), with_shape=True, with_min_max=True)
        '(T7s4[0,3:A1.5],float=2.5)'
    """
    del ignore
    text = _Writer(with_shape, with_min_max, with_device, limit, verbose, caches == "lists").text(obj)
    return " ".join(text.split())  # a key can contain line breaks


@dataclasses.dataclass
class _Writer:
    """The options of one :func:`string_type` call, and the ids of the objects that enclose the current object."""

    shape: bool
    values: bool
    device: bool
    limit: int
    verbose: int
    lists: bool
    inside: list[int] = dataclasses.field(default_factory=list)

    def text(self, obj: object) -> str:
        if id(obj) in self.inside:
            return "<cycle>"
        if len(self.inside) >= _DEEPEST:
            return "..."
        self.log("string_type: a %s", type(obj).__qualname__)
        self.inside.append(id(obj))

        def opaque(error: Exception) -> str:
            self.log("string_type: %s cannot be described: %r", type(obj).__qualname__, error)
            return _opaque(self, obj)

        try:
            # a property or flatten function of the user may raise any error
            return result_or(lambda: _rule(obj)(self, obj), opaque)
        finally:
            self.inside.pop()

    def join(self, children: Iterable[Any], separator: str = ",") -> str:
        return separator.join([self.text(child) for child in children])

    def items(self, pairs: Iterable[tuple[Any, Any]]) -> str:
        return ",".join([f"{key}:{self.text(value)}" for key, value in pairs])

    def named(self, obj: object, names: Iterable[str]) -> str:
        return ", ".join([f"{name}={self.text(getattr(obj, name, None))}" for name in names])

    def log(self, message: str, *args: object) -> None:
        if self.verbose:
            # the level of the logger is not changed, which would affect other threads
            LOGGER.handle(LOGGER.makeRecord(LOGGER.name, logging.DEBUG, __file__, 0, message, args, None))
        else:
            LOGGER.debug(message, *args)


_Rule = Callable[[_Writer, Any], str]


def _rule(obj: object) -> _Rule:
    if isinstance(obj, enum.Enum):
        return lambda writer, obj: f"{type(obj).__name__}.{obj.name}"  # first: many enums are integers or strings
    for base in type(obj).__mro__:
        package = str(base.__module__).partition(".")[0]
        rule = _RULES.get(f"{package}:{base.__name__}") or _RULES.get(base.__name__)
        if rule is not None:
            return rule
    return _other


def _number(writer: _Writer, obj: Any) -> str:
    if hasattr(obj, "dtype"):  # a NumPy scalar; some are also Python floats
        name = str(obj.dtype.name)
    else:
        name = next(base.__name__ for base in type(obj).__mro__ if base in (bool, int, float, complex))
    return f"{name}={obj}" if writer.values else name


def _opaque(writer: _Writer, obj: object) -> str:
    return f"{type(obj).__name__}(...)"


def _dim(writer: _Writer, obj: object) -> str:
    if hasattr(obj, "__name__"):
        return "DerivedDim" if hasattr(obj, "root") else f"Dim({obj.__name__})"
    text = str(obj)
    return {"DimHint(AUTO)": "AUTO", "DimHint(DYNAMIC)": "DYNAMIC"}.get(text, text)


def _mean_of_numbers(writer: _Writer, obj: Collection[Any], form: str) -> str:
    # each caller passes the format of onnx-diagnostic for its type
    if not writer.values or not all(isinstance(x, int | float) for x in obj):
        return ""
    return form.format(min(obj), max(obj), sum(map(float, obj)) / len(obj))


def _tuple(writer: _Writer, obj: tuple[Any, ...]) -> str:
    if len(obj) >= max(writer.limit, 2):
        tail = _mean_of_numbers(writer, obj, "[{},{}:A[{}]]")
        return f"#{len(obj)}({writer.text(obj[0])},...){tail}"
    return f"({writer.join(obj)},)" if len(obj) == 1 else f"({writer.join(obj)})"


def _list(writer: _Writer, obj: list[Any]) -> str:
    if len(obj) >= max(writer.limit, 1):
        return f"#{len(obj)}[{writer.text(obj[0])},...]{_mean_of_numbers(writer, obj, '[{},{}:{}]')}"
    return f"#{len(obj)}[{writer.join(obj)}]"


def _set(writer: _Writer, obj: Collection[Any]) -> str:
    if len(obj) < _LONGEST_SET:
        # sorted, since the order of a set differs between processes
        return f"{{{','.join(sorted(map(writer.text, obj)))}}}"
    tail = _mean_of_numbers(writer, obj, "[{},{}:A{}]")
    return f"{{...}}#{len(obj)}{tail}" if tail or writer.shape else "{...}"


def _dict(writer: _Writer, obj: dict[Any, Any]) -> str:
    if type(obj) is not dict or not all(isinstance(key, int) for key in obj):
        return _mapping(writer, obj)
    if all(isinstance(value, str) or _rule(value) is _dim for value in obj.values()):
        # The dynamic shape of one tensor: here a string is the name of a dimension.
        axes = [f"{k}:DYN({v})" if isinstance(v, str) else f"{k}:{writer.text(v)}" for k, v in obj.items()]
        return f"{{{','.join(axes)}}}"
    return f"{{{writer.items(obj.items())}}}"


def _mapping(writer: _Writer, obj: Mapping[Any, Any]) -> str:
    return f"{type(obj).__name__}({writer.items(obj.items())})"


def _other(writer: _Writer, obj: object) -> str:
    if dataclasses.is_dataclass(obj):
        found = [(field.name, getattr(obj, field.name, None)) for field in dataclasses.fields(obj)]
        return f"{type(obj).__name__}({writer.items(pair for pair in found if pair[1] is not None)})"
    if isinstance(obj, Mapping):
        return _mapping(writer, obj)
    if type(obj) in pytree.SUPPORTED_NODES:
        children, _ = pytree.SUPPORTED_NODES[type(obj)].flatten_fn(obj)
        return f"{type(obj).__name__}({writer.join(children, ', ')})"
    return _opaque(writer, obj)


def _cache(writer: _Writer, obj: object) -> str:
    if hasattr(obj, "self_attention_cache"):
        return f"{type(obj).__name__}({writer.named(obj, ['self_attention_cache', 'cross_attention_cache'])})"
    if not hasattr(obj, "layers"):
        return _other(writer, obj)  # another library's class of that name
    if writer.lists and obj.layers and {type(layer).__name__ for layer in obj.layers} in _PLAIN_LAYERS:
        keys, values = ([getattr(layer, name) for layer in obj.layers] for name in _PAIR)
        return f"{type(obj).__name__}(key_cache={writer.text(keys)}, value_cache={writer.text(values)})"
    layers = []
    for layer in obj.layers:
        parts = [writer.text(getattr(layer, name)) for name in _PAIR] if hasattr(layer, "keys") else []
        states = [name for name, value in vars(layer).items() if name not in _PAIR and _is_state(value)]
        parts += [writer.named(layer, states)] if states else []
        layers.append(f"{type(layer).__name__}({', '.join(parts)})")
    return f"{type(obj).__name__}({', '.join(layers)})"


def _is_state(value: Any) -> bool:
    # Linear attention stores dicts of tensors, indexed layers store matrices; a counter has at most one dimension.
    if isinstance(value, dict):
        return any(isinstance(child, torch.Tensor) for child in value.values())
    return isinstance(value, torch.Tensor) and value.ndim > 1


def _array_text(writer: _Writer, letter: str, code: int, shape: Iterable[Any]) -> str:
    sizes = [str(size).replace(" ", "") for size in shape]  # a SymInt prints as `s0 + 1`
    return f"{letter}{code}s{'x'.join(sizes)}" if writer.shape else f"{letter}{code}r{len(sizes)}"


def _tensor(writer: _Writer, obj: torch.Tensor) -> str:
    fake = any(base.__name__ == "FakeTensor" for base in type(obj).__mro__)
    # `_x2`: two values per byte, and the shape counts bytes.
    code = _ELEMENT_TYPES.get(str(obj.dtype).removeprefix("torch.").removesuffix("_x2"), _UNDEFINED)
    place = ("C" if obj.device.type in ("cpu", "meta") else "G") if writer.device else ""
    text = place + _array_text(writer, "F" if fake else "T", code, obj.shape)
    # Reading a value inside a trace fails, or adds a node to the graph.
    tracing = torch.compiler.is_compiling() or dispatch_depth() > 0
    if not writer.values or fake or obj.is_meta or tracing:
        return text
    return text + _values(writer, _torch_values, obj)


def _ndarray(writer: _Writer, obj: numpy.ndarray[Any, Any]) -> str:
    code = _STRING if obj.dtype.kind == "U" else _ELEMENT_TYPES.get(obj.dtype.name, _UNDEFINED)
    text = _array_text(writer, "A", code, obj.shape)
    if not writer.values or code in (_STRING, _UNDEFINED):
        return text
    return text + _values(writer, _numpy_values, obj)


def _ort_value(writer: _Writer, obj: onnxruntime.OrtValue) -> str:
    if not obj.has_value():
        return "OV(<novalue>)"
    if not obj.is_tensor():
        return "OV(NOTENSOR)"
    place = ("C" if obj.device_name().lower() == "cpu" else "G") if writer.device else ""
    text = _array_text(writer, "", obj.element_type(), obj.shape())
    # NumPy has no name for types that it lacks, such as bfloat16
    values = _values(writer, lambda value: _ndarray(writer, value.numpy()), obj) if writer.values else ""
    return f"{place}OV({values})" if values else f"{place}OV{text}"


def _values(writer: _Writer, read: Callable[[Any], str], obj: object) -> str:
    def unread(error: Exception) -> str:
        writer.log("string_type: no values of a %s: %r", type(obj).__qualname__, error)
        return ""

    # sparse layouts, 4-bit types, vmap: show type and shape only
    return result_or(lambda: read(obj), unread)


def _torch_values(tensor: torch.Tensor) -> str:
    if tensor.ndim == 0:
        return f"={tensor.item()}"
    if tensor.numel() == 0:
        return "[empty]"
    flat = tensor.detach().reshape(-1)
    name = str(flat.dtype).removeprefix("torch.")
    flat = flat.abs() if flat.is_complex() else flat.to(_COMPARABLE.get(name, flat.dtype))
    flat = flat.float() if name.startswith("float8") else flat
    nans = int((flat != flat).sum())
    flat = flat[flat == flat] if nans else flat
    if flat.numel() == 0:
        return f"[N{nans}nans]"
    wide = torch.float32 if flat.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    tail = f"N{nans}nans" if nans else ""
    return f"[{flat.min().item()},{flat.max().item()}:A{flat.to(wide).mean().item()}{tail}]"


def _numpy_values(array: numpy.ndarray[Any, Any]) -> str:
    if array.ndim == 0:
        return f"={array}"
    if array.size == 0:
        return "[empty]"
    # An array exists, so NumPy is imported. NumPy would warn about the mean of infinities.
    with sys.modules["numpy"].errstate(all="ignore"):
        flat = abs(array.reshape(-1)) if array.dtype.kind == "c" else array.reshape(-1)
        nans = int((flat != flat).sum())
        flat = flat[flat == flat]
        if flat.size == 0:
            return f"[N{nans}nans]"
        tail = f"N{nans}nans" if nans else ""
        return f"[{flat.min()},{flat.max()}:A{flat.astype('float64').mean()}{tail}]"


# `package:Class`, or `Class` of any package; the first base of a type that is in the table decides.
_RULES: dict[str, _Rule] = {
    name: rule
    for rule, names in (
        (
            lambda writer, obj: "None" if obj is None else type(obj).__name__,
            "builtins:NoneType builtins:slice torch:SymInt torch:SymFloat torch:SymBool",
        ),
        (_number, "builtins:bool builtins:int builtins:float builtins:complex numpy:generic"),
        (lambda writer, obj: "str" if isinstance(obj, str) else "bytes", "builtins:str builtins:bytes numpy:character"),
        (lambda writer, obj: f"type({obj.__name__})", "builtins:type"),
        (_tuple, "builtins:tuple"),
        (_list, "builtins:list"),
        (_set, "builtins:set builtins:frozenset"),
        (_dict, "builtins:dict"),
        (_ndarray, "numpy:ndarray"),
        (lambda writer, obj: f"dtype({obj})", "numpy:dtype"),
        (_tensor, "torch:Tensor"),
        (_ort_value, "onnxruntime:OrtValue"),
        (_dim, "torch:Dim torch:_DimHint"),
        (lambda _, obj: f"{type(obj).__name__}({obj})", "torch:dtype torch:device torch:layout torch:memory_format"),
        (
            lambda writer, obj: "".join(repr(obj).split()),
            "torch:TreeSpec torch:MappingKey torch:SequenceKey torch:GetAttrKey torch:Proxy",
        ),
        (lambda writer, obj: f"%{obj.target}", "torch:Node"),
        # In new versions of transformers a configuration is a dataclass of fifty fields.
        (_opaque, "torch:Module transformers:PreTrainedConfig transformers:PretrainedConfig"),
        (
            lambda writer, obj: f"{type(obj).__name__}({writer.named(obj, ['data'])})",
            "transformers:BatchEncoding transformers:BatchFeature",
        ),
        (_cache, "Cache EncoderDecoderCache"),  # any package: model code can define caches
        (lambda writer, obj: f"{type(obj).__name__}({writer.named(obj, _PAIR)})", "CacheLayerMixin"),
    )
    for name in names.split()
}
