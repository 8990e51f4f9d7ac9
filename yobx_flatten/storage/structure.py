"""Convert a nested object to JSON (its classes and leaves) and to initializers of an ONNX graph, and back.

A leaf, such as a tensor or a number, is converted to a *record*, an entry of the JSON. A leaf with data also gets a
*payload*, from which an initializer is made. The bytes of a tensor are read only when they are written to the file.
"""

# {"node": "builtins:dict", "static": ["x", "cache"], "children": [
#     {"leaf": "torch", "name": "x", "dtype": "bfloat16", "shape": [2, 3], "crc32": 2768625435},
#     {"node": "transformers.cache_utils:DynamicCache", "static": ["key_0", "value_0"], "children": [...]}]}

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..core.private_names.of_torch import get_node_type, pytree
from ..diagnose.opaque import find_unregistered
from ..errors import DamagedFileError, FlattenError, InvalidArgumentError, NotRegisteredError, StaticDataError
from ..errors.failures import raised_as
from ..registry.recipe.aliases import Device, PyTree, Static
from ..registry.recipe.static_codec import dump_static, import_known, load_static
from ..runners.ports import BOOL, DOUBLE, ELEMENTS, INT64, STRING, UINT8, Element, pack, unpack
from ..trees.walk import check_no_cycles, leaf_names, recipe_for

if TYPE_CHECKING:
    import numpy


class Structure(NamedTuple):
    """A flattened nested object: its structure as JSON, and the data of its leaves."""

    json: dict[str, Any]  # the metadata; the records of the payloads are parts of it
    payloads: list[Payload]  # payloads of the initializers, in the order of the leaves
    again: list[dict[str, Any]]  # the records of the second and further places of a tensor


def flatten_tree(tree: PyTree) -> Structure:
    """Flatten a nested object; classes of Hugging Face caches and outputs need not be registered."""
    check_no_cycles(tree, "values")
    taken: set[str] = set()
    names = iter([unique(name or "value", taken) for name in leaf_names(tree)])
    payloads: list[Payload] = []
    again: list[dict[str, Any]] = []
    seen: dict[int, tuple[Any, str]] = {}  # by id; a reference to the leaf is stored, so that its id is not reused

    def visit(obj: object) -> dict[str, Any]:
        node = _functions_of(type(obj), get_node_type(obj))
        if node is not None:
            children, static = node.flatten(obj)
            cls = f"{type(obj).__module__}:{type(obj).__qualname__}"
            try:
                dumped = dump_static(static)
            except StaticDataError as error:
                raise StaticDataError(f"{type(obj).__qualname__}: {error}") from error
            return {"node": cls, "static": dumped, "children": [visit(child) for child in children]}
        name = next(names)
        # a tensor in two places is stored once, and is read as one tensor
        if id(obj) in seen:
            again.append({"leaf": "same", "name": name, "as": seen[id(obj)][1]})
            return again[-1]
        record, payload = write_leaf(obj, name, where=name)
        if payload is not None:
            payloads.append(payload)
            if record["leaf"] in ("torch", "numpy"):
                seen[id(obj)] = obj, name
        return record

    return Structure(visit(tree), payloads, again)


def unflatten_tree(json: dict[str, Any], source: Source, device: Device) -> PyTree:
    read: dict[str, Any] = {}

    def visit(part: dict[str, Any]) -> Any:
        if "node" in part:
            name = part["node"]
            node = _node_named(name)
            children = [visit(child) for child in part["children"]]
            static = load_trusted(part["static"])
            _check_called(name, node, static)

            def not_rebuilt(error: Exception) -> DamagedFileError:
                return DamagedFileError(
                    f"{name} cannot be rebuilt by its registration ({type(error).__name__}: {error}). Register the "
                    "class with the same functions as when the file was written."
                )

            with raised_as(not_rebuilt):
                return node.unflatten(children, static)
        match part["leaf"]:
            case "same":
                return read[part["as"]]
            case "static":
                value = load_trusted(part["value"])
            case "torch":
                value = _read_tensor(part, source).to(device)
            case "numpy":
                value = _read_array(part, source)
            case "numpy_scalar":
                value = _read_array(part, source)[()]
            case kind:
                value = _read_scalar(kind, part, source)
        if "name" in part:
            read[part["name"]] = value
        return value

    try:
        return visit(json)
    except FlattenError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFileError(f"The file's structure is damaged ({type(error).__name__}: {error}).") from error


def unique(name: str, taken: set[str]) -> str:
    """Return a name that is not in ``taken``, made from ``name``, and add it to ``taken``.

    >>> taken = set()
    >>> unique("a.b", taken), unique("a.b", taken)
    ('a.b', 'a.b#2')
    """
    name = name.encode("utf-8", "replace").decode()  # protobuf cannot store a lone surrogate
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    taken.add(found)
    return found


class _Functions(NamedTuple):
    flatten: Callable[[Any], tuple[Any, Any]]
    unflatten: Callable[[Any, Any], Any]


def _functions_of(cls: type, node_type: Any) -> _Functions | None:
    recipe = recipe_for(cls)
    if recipe is not None:
        return _Functions(recipe.flatten, recipe.unflatten)
    node = pytree.SUPPORTED_NODES.get(node_type)
    if node is not None and cls is torch.Size:  # torch's own unflatten function returns a tuple
        return _Functions(node.flatten_fn, lambda children, static: torch.Size(children))
    return None if node is None else _Functions(node.flatten_fn, node.unflatten_fn)


def _check_called(name: str, node: _Functions, static: Static) -> None:
    """Refuse a file whose named tuple class or ``defaultdict`` factory would make torch call arbitrary code."""
    if name == "collections:defaultdict":
        factory = static[0]
        if factory is not None and not (isinstance(factory, type) and factory.__module__ == "builtins"):
            raise DamagedFileError(f"A stored defaultdict must have a built-in default_factory, found {factory!r}.")
        return
    of_named_tuples = pytree.SUPPORTED_NODES[collections.namedtuple].unflatten_fn  # type: ignore[index] # its key
    own = f"{getattr(static, '__module__', None)}:{getattr(static, '__qualname__', None)}"
    if node.unflatten is of_named_tuples and own != name:
        raise DamagedFileError(f"The file is not loaded: it names the class {name}, but torch would call {static!r}.")


def _node_named(name: str) -> _Functions:
    module, _, qualified = name.partition(":")
    import_known(module)
    cls: Any = sys.modules.get(module)
    for part in qualified.split("."):  # without a module's __getattr__
        cls = vars(cls).get(part) if isinstance(cls, (type, type(sys))) else None
    if not isinstance(cls, type):  # a class that is defined in a function is only in the table
        cls = next((c for c in pytree.SUPPORTED_NODES.copy() if f"{c.__module__}:{c.__qualname__}" == name), None)
    found = None
    if isinstance(cls, type):
        # torch keeps one entry for all named tuples
        named = pytree.is_namedtuple_class(cls) and cls not in pytree.SUPPORTED_NODES
        found = _functions_of(cls, collections.namedtuple if named else cls)
    if found is None:
        where = "" if module in sys.modules else f"import {module}\n    "
        raise NotRegisteredError(
            f"The file contains an object of {module}.{qualified}, which is not registered. Register the class before "
            f"you load the file:\n    {where}register_class_flattening({qualified}, ...)"
        )
    return found


Record = dict[str, Any]

_DRAWN = 10**9  # bytes; a small file could otherwise request any amount of memory


@dataclasses.dataclass(frozen=True)
class Payload:
    record: Record  # the leaf's metadata; the writer adds a checksum
    element: Element  # the type of the elements
    dims: tuple[int, ...]  # the shape of the initializer
    nbytes: int = 0  # the size of the data; 0 for strings
    data: Callable[[], memoryview] = lambda: memoryview(b"")  # returns the bytes, possibly of a copy of the leaf
    strings: Sequence[bytes] | None = None  # the elements of a leaf with strings, else `None`


class Source(Protocol):
    """The interface for reading the stored data of tensors and other leaves."""

    def check(self, record: Record, element: Element, dims: tuple[int, ...], nbytes: int) -> None:
        """Raise an error if a leaf's record does not match its stored data, before memory is allocated for the leaf."""

    def fill(self, record: Record, element: Element, view: memoryview) -> None: ...

    def strings(self, record: Record) -> list[bytes]: ...


def write_leaf(leaf: object, name: str, *, where: str) -> tuple[Record, Payload | None]:
    """Convert a leaf to a record for the file's metadata, and to the data of an initializer if the leaf needs one."""
    if isinstance(leaf, torch.Tensor):
        obstacle = obstacle_of(leaf)
        if obstacle is not None:
            what, line = obstacle
            raise InvalidArgumentError(f"{where}, a tensor of type {leaf.dtype}, is {what}. Store instead:\n    {line}")

        def data() -> memoryview:
            plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
            # not reshape: a tensor with one element may be contiguous with any stride, which `view` refuses
            return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data

        dtype = str(leaf.dtype).removeprefix("torch.")
        record = {"leaf": "torch", "name": name, "dtype": dtype, "shape": list(leaf.shape)}
        return record, Payload(record, ELEMENTS[dtype], _dims(ELEMENTS[dtype], leaf.shape), leaf.nbytes, data)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return _write_array(leaf, name, where)
    if type(leaf) in _SCALARS:
        written = _write_scalar(leaf, name)
        if written is not None:
            return written
    try:
        return {"leaf": "static", "value": dump_static(leaf, where=where)}, None
    except StaticDataError as error:
        found = find_unregistered(leaf, name=where)
        if found:
            raise NotRegisteredError(str(found[0])) from error
        if type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib"):
            raise InvalidArgumentError(
                f"{where} is a JAX array. Store a NumPy array:\n    numpy.asarray(array)"
            ) from error
        raise


def _write_array(leaf: numpy.ndarray[Any, Any] | numpy.generic, name: str, where: str) -> tuple[Record, Payload]:
    import numpy

    scalar = isinstance(leaf, numpy.generic)
    array = leaf if isinstance(leaf, numpy.ndarray) else numpy.asarray(leaf)
    dtype = array.dtype
    record: Record = {
        "leaf": "numpy_scalar" if scalar else "numpy",
        "name": name,
        "dtype": dtype.name if dtype.hasobject or dtype.type.__module__ != "numpy" else dtype.str,
        "shape": list(array.shape),
    }
    plain_class = scalar or type(array) in (numpy.ndarray, numpy.memmap)  # a subclass has more data, such as a mask
    if plain_class and dtype.kind in "UO":
        with contextlib.suppress(AttributeError, UnicodeEncodeError):  # an element is not text that UTF-8 can encode
            texts = [text.encode() for text in array.reshape(-1).tolist()]
            return record, Payload(record, STRING, array.shape, strings=texts)
    if dtype.kind == "U":
        record["text"] = False
    stored = _array_element(dtype)
    if stored is None or not plain_class:
        raise InvalidArgumentError(
            f"{where} is a {type(array).__name__} of type {dtype}, which ONNX does not have. Store numbers or text."
        )
    element, dims = stored[0], _dims(stored[0], (*array.shape, *stored[1]))

    def data() -> memoryview:
        plain = numpy.ascontiguousarray(array, _low_byte_first(dtype)).reshape(-1)
        # NumPy exports no buffer for dates and for the types of ml_dtypes
        codes = plain.view(numpy.uint8)
        return (codes if element.packed == 1 else pack(codes, element.packed)).data

    return record, Payload(record, element, dims, element.nbytes(array.size, dtype.itemsize), data)


def _array_element(dtype: numpy.dtype[Any]) -> tuple[Element, tuple[int, ...]] | None:
    """Return the ONNX element type for a NumPy dtype, and the axes that bytes or text add to the shape."""
    if dtype.hasobject or dtype.subdtype is not None or dtype.names is not None:
        return None
    if dtype.kind in "mM":
        return INT64, ()
    if dtype.kind == "S":
        return UINT8, (dtype.itemsize,)
    if dtype.kind == "U":  # text that UTF-8 cannot encode
        return ELEMENTS["uint32"], (dtype.itemsize // 4,)
    return (ELEMENTS[dtype.name], ()) if dtype.name in ELEMENTS else None


def _low_byte_first(dtype: numpy.dtype[Any]) -> numpy.dtype[Any]:
    return dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype


def _write_scalar(leaf: object, name: str) -> tuple[Record, Payload] | None:
    record: Record = {"leaf": type(leaf).__name__, "name": name}
    if isinstance(leaf, str):
        try:
            return record, Payload(record, STRING, (), strings=[leaf.encode()])
        except UnicodeEncodeError:
            return None
    if isinstance(leaf, bytes):
        record["shape"] = [len(leaf)]
        return record, Payload(record, UINT8, (len(leaf),), len(leaf), lambda: memoryview(leaf))
    element, format_, dims = _SCALARS[type(leaf)]
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return None
    numbers = [leaf.real, leaf.imag] if isinstance(leaf, complex) else [leaf]
    data = struct.pack(format_, *numbers)
    return record, Payload(record, element, dims, len(data), lambda: memoryview(data))


def _dims(element: Element, shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, 2) if element.pair else tuple(shape)


def _read_tensor(record: Record, source: Source) -> torch.Tensor:
    name, kind, shape = record["name"], record["dtype"], record["shape"]
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype) or kind not in ELEMENTS:
        raise DamagedFileError(f"{name!r} has the dtype {kind!r}, which the installed torch lacks. Update torch.")
    if "seed" in record:
        if math.prod(shape) * 4 > _DRAWN:
            raise DamagedFileError(f"{name!r} needs random numbers of shape {shape}: more than the limit of 1 GB.")
        return torch.rand(shape, generator=torch.Generator().manual_seed(record["seed"])).to(dtype)
    element = ELEMENTS[kind]
    nbytes = math.prod(shape) * dtype.itemsize
    source.check(record, element, _dims(element, shape), nbytes)
    data = torch.empty(nbytes, dtype=torch.uint8)
    source.fill(record, element, data.numpy().data)
    return data.view(dtype).reshape(shape)


def _read_array(record: Record, source: Source) -> Any:
    import numpy

    name, shape = record["dtype"], tuple(record["shape"])
    try:
        if name in ELEMENTS and not hasattr(numpy, name):
            import ml_dtypes  # comes with onnx

            name = getattr(ml_dtypes, name)
        dtype = numpy.dtype(name)
    except (TypeError, AttributeError, ImportError):
        raise DamagedFileError(
            f"{record['name']!r} is an array of type {name!r}, which the installed NumPy does not have:\n"
            "    pip install --upgrade numpy ml_dtypes"
        ) from None
    if dtype.kind in "UO" and record.get("text", True):
        source.check(record, STRING, shape, 0)
        texts = [text.decode() for text in source.strings(record)]
        widest = 4 * max(map(len, texts), default=0) * len(texts)  # NumPy reserves the longest length for each text
        if dtype.kind == "U" and dtype.itemsize * len(texts) > max(widest, _DRAWN):
            raise DamagedFileError(f"{record['name']!r} pads strings to {dtype.itemsize // 4} characters, over 1 GB.")
        return numpy.array(texts, dtype).reshape(shape)
    stored = _array_element(dtype)
    if stored is None:
        raise DamagedFileError(f"{record['name']!r} has the type {record['dtype']!r}, which is never stored.")
    element, dims = stored[0], _dims(stored[0], (*shape, *stored[1]))
    count = math.prod(shape)
    nbytes = element.nbytes(count, dtype.itemsize)
    source.check(record, element, dims, nbytes)
    if element.packed > 1:
        data = numpy.empty(nbytes, numpy.uint8)
        source.fill(record, element, data.data)
        return unpack(data, element.packed, count).view(dtype).reshape(shape)
    array = numpy.empty(shape, _low_byte_first(dtype))
    source.fill(record, element, array.reshape(-1).view(numpy.uint8).data)
    return array.astype(dtype, copy=False)


def _read_scalar(kind: str, record: Record, source: Source) -> Any:
    if kind == "str":
        source.check(record, STRING, (), 0)
        return source.strings(record)[0].decode()
    if kind == "bytes":
        element, dims, nbytes = UINT8, tuple(record["shape"]), math.prod(record["shape"])
    else:
        cls = next((cls for cls in _SCALARS if cls.__name__ == kind), None)
        if cls is None:
            raise DamagedFileError(f"The file has a value of unknown kind {kind!r}. Update yobx-flatten to read it.")
        element, format_, dims = _SCALARS[cls]
        nbytes = struct.calcsize(format_)
    source.check(record, element, dims, nbytes)
    data = bytearray(nbytes)
    source.fill(record, element, memoryview(data))
    if kind == "bytes":
        return bytes(data)
    numbers = struct.unpack(format_, data)
    return complex(*numbers) if kind == "complex" else numbers[0]


# by class of a Python scalar: element type, format for `struct`, shape
_SCALARS: dict[type, tuple[Element, str, tuple[int, ...]]] = {
    bool: (BOOL, "<?", ()),
    int: (INT64, "<q", ()),
    float: (DOUBLE, "<d", ()),
    complex: (DOUBLE, "<dd", (2,)),
    str: (STRING, "", ()),
    bytes: (UINT8, "", ()),
}


def obstacle_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be stored directly, and code that converts it; ``None`` if it can be stored.

    >>> obstacle_of(torch.eye(2).to_sparse())[1]
    'tensor.to_dense()'
    >>> obstacle_of(torch.eye(2)) is None
    True
    """
    cls, dtype = type(tensor), str(tensor.dtype).removeprefix("torch.")
    bases = {base.__name__ for base in cls.__mro__}  # by name: some of these modules are slow to import
    if "FakeTensor" in bases:
        what, line = "a FakeTensor", "torch.zeros(tensor.shape, dtype=tensor.dtype)  # outside its mode"
    elif tensor.is_nested:
        what, line = "nested, with rows of several lengths", "list(tensor.unbind())"
    elif tensor.is_meta or "UninitializedTensorMixin" in bases:
        what, line = "on the meta device or not initialized", "torch.zeros_like(tensor, device='cpu')"
    elif tensor.is_quantized:
        what, line = "quantized, with a scale", "tensor.dequantize()"
    elif "DTensor" in bases:
        what, line = "a DTensor in several processes", "tensor.full_tensor()"
    # a subclass with its own operators stores its data elsewhere
    elif cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        own: Any = cls
        what, line = f"a {cls.__name__}, which wraps other tensors", "tensor.dequantize()"
        if own.dequantize is torch.Tensor.dequantize:
            line = "[getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]"
    elif tensor.layout is not torch.strided:
        what, line = f"of layout {tensor.layout}", "tensor.to_dense()"
    elif dtype not in ELEMENTS or ELEMENTS[dtype].packed > 1:
        return "of a type that ONNX does not have", "tensor.view(torch.uint8)"
    elif cls not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {cls.__name__}, which would be loaded as a torch.Tensor", "tensor.as_subclass(torch.Tensor)"
    else:
        return None
    return f"{what}, and cannot be stored directly", line


def load_trusted(data: Static) -> Static:
    def damaged(error: Exception) -> DamagedFileError:
        return DamagedFileError(f"Static data in the file cannot be read ({type(error).__name__}: {error}).")

    with raised_as(damaged, NotRegisteredError):
        return load_static(data)
