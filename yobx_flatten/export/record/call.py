"""Store inputs and outputs of a recorded call, in memory or in a safetensors file with their structure as JSON."""

# call-00003.safetensors
#     inputs.0  inputs.1 ...  outputs.0 ...                tensors, by their index among the leaves
#     metadata["yobx_flatten.call"]                        {"version": 1, "about": {...},
#                                                           "inputs": {"spec": ..., "leaves": [...]}, "outputs": ...}

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.contents import Layouts
from ...core.files.document import damage_as, opened_tensors, parse_document, write_tensor_file
from ...core.files.scratch import publish_files, scratch_for
from ...core.private_names.of_torch import pytree
from ...declare.scopes import options_in_use, register_flattening_functions
from ...diagnose.opaque import find_unregistered
from ...errors import InvalidArgumentError, NotRegisteredError, RecordError, describe_class, require
from ...registry.recipe.aliases import PyTree
from ...registry.recipe.static_codec import check_spec, dump_static, load_static
from ...trees.walk import check_no_cycles, key_name, leaf_places, own_children, recipe_for


@dataclasses.dataclass(eq=False, repr=False)
class Call:
    """One recorded call of a model; its inputs and outputs are returned as copies, which the caller may change.

    Attributes:
        index: number of the call, in the order in which the calls began.
        kind: one of ``"prefill"`` (the cache is empty, or made by the call), ``"decode"`` (the cache holds tokens) and
            ``"forward"`` (there is no cache).
        past: number of tokens that the KV cache had received before the call; ``None`` without a cache.
        new: number of tokens that the KV cache received in the call; ``None`` without a cache or after an error.
        error: class and text of the exception that the call raised; empty if the call returned.
    """

    callee: Callee
    index: int
    kind: str
    past: int | None
    new: int | None
    parts: dict[str, Snapshot]
    error: str = ""

    @property
    def inputs(self) -> dict[str, Any]:
        """All arguments of the recorded call, by parameter name."""
        return self.parts["inputs"].restore()  # type: ignore[no-any-return] # a dict, as it was

    @property
    def outputs(self) -> Any:
        """The outputs of the recorded call.

        Raises:
            RecordError: when outputs were not recorded, or the call raised.
        """
        if self.error:
            raise RecordError(f"call {self.index} has no outputs, because it raised {self.error}")
        if "outputs" not in self.parts:
            raise RecordError("Outputs of calls were not recorded. Record them:\n    record_calls(model, outputs=True)")
        return self.parts["outputs"].restore()

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the recorded call: the arguments that cannot be passed by name."""
        return self.callee.split(self.inputs)[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the recorded call: all arguments that are not in :attr:`args`."""
        return self.callee.split(self.inputs)[1]

    def facts(self, part: str = "inputs") -> tuple[Fact, ...]:
        """Return the path, dtype and shape of each tensor in the inputs or outputs, without reading the data.

        Args:
            part: which values to describe: ``"inputs"``, the default, or ``"outputs"``.

        Returns:
            One entry per leaf of the inputs or outputs; an empty tuple if the outputs were not recorded.
        """
        return self.parts[part].facts if part in self.parts else ()

    @property
    def snapshot(self) -> Snapshot:
        """The stored inputs of the recorded call, as a ``Snapshot`` object that is not copied."""
        return self.parts["inputs"]

    def __repr__(self) -> str:
        tokens = "" if self.past is None else f", past {self.past}" + ("" if self.error else f", new {self.new}")
        raised = f", raised {self.error.partition(':')[0]}" if self.error else ""
        return f"<call {self.index} of {self.callee.label}, {self.kind}{tokens}{raised}>"


@dataclasses.dataclass(frozen=True)
class About:
    """Properties of a recorded call that its file stores in addition to inputs and outputs; see :class:`Call`."""

    index: int  # the number of the call
    kind: str
    past: int | None  # number of tokens in the cache before the call; `None` without a cache
    new: int | None  # number of tokens that the call read; `None` without a cache
    label: str  # class and method that was called
    names: Any  # the parameters of the method and their kinds, in the form of `dump_static`
    error: str = ""  # class and text of the raised error; empty if the call returned, and in older files


# The recorded method: its arguments by name, and a module that takes only the varying ones.

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Callee:
    """The method whose calls are recorded, with its object, name and signature."""

    label: str  # class and method, for messages
    owner: Any  # the object; `None` for calls read from a folder without their model
    method: str  # the name of the method
    signature: inspect.Signature  # the signature of the bound method

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a call's arguments by parameter name; ``None`` if the method rejects the arguments."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError:  # the call itself raises the error
            return None
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named[name] = value
        return named

    def split(self, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Split named arguments into positional arguments (which cannot be passed by name) and keyword arguments."""
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
        args, kwargs = self.split(inputs)
        if self.method == "forward" and isinstance(self.owner, torch.nn.Module):
            return self.owner(*args, **kwargs)  # with its hooks
        return getattr(self.owner, self.method)(*args, **kwargs)


def callee_of(target: object, method: str | None) -> Callee:
    """Return the method to record: a bound method, the named method of an object, or a module's ``forward``."""
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


class Fact(NamedTuple):
    """A leaf of recorded inputs or outputs: path, dtype, shape and device of a tensor, or path and value otherwise."""

    path: str  # the keys from the arguments to the leaf, with dots between them: `cache.key_0`
    dtype: torch.dtype | None  # the dtype of a tensor, `None` for anything else
    shape: tuple[int, ...]  # the shape of a tensor, `()` for anything else
    device: torch.device | None  # where the tensor was
    # what its axes mean, if the registration of its class states it; see `yobx_flatten.trees.Leaf`
    axes: dict[int, str] | None
    value: Any  # the leaf itself, where it is not a tensor

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """A copy of a recorded call's inputs or outputs; :meth:`restore` returns another copy that may be changed."""

    facts: tuple[Fact, ...]
    spec: pytree.TreeSpec
    leaves: Callable[[], Sequence[Any]]  # returns the stored leaves uncopied; the caller must not change them

    @classmethod
    def take(cls, tree: PyTree, *, name: str, device: torch.device | None) -> Snapshot:
        """Copy nested inputs or outputs; call this inside a ``register_flattening_functions`` block."""
        check_no_cycles(tree, name)
        leaves, spec = pytree.tree_flatten(tree)
        layouts = Layouts()
        if not all(isinstance(leaf, _PLAIN) or layouts(type(leaf)).is_tensor for leaf in leaves):
            hidden = [found for found in find_unregistered(tree, name=name) if found.inside is None]
            if hidden:
                raise NotRegisteredError("\n".join(map(str, hidden)))
        facts = []
        for place in leaf_places(tree, own_children, name):
            path, leaf = ".".join(map(key_name, place.keys)), place.obj
            recipe = recipe_for(type(place.parent)) if place.keys else None
            axes = None if recipe is None or recipe.axes is None else recipe.axes(key_name(place.keys[-1]))
            if isinstance(leaf, torch.Tensor):
                facts.append(Fact(path, leaf.dtype, tuple(leaf.shape), leaf.device, axes, None))
            else:
                facts.append(Fact(path, None, (), None, axes, leaf))
        kept = tuple(_copy(leaf, device) for leaf in leaves)
        return cls(tuple(facts), spec, lambda: kept)

    def restore(self, leaves: Sequence[Any] | None = None) -> PyTree:
        """Rebuild the nested object from ``leaves``, or from copies of the stored leaves on their original devices."""
        if leaves is None:
            leaves = [_copy(leaf, fact.device) for leaf, fact in zip(self.leaves(), self.facts, strict=True)]
        with libraries_in_use():
            return pytree.tree_unflatten(list(leaves), self.spec)


def same_value(one: Fact, other: Fact) -> bool:
    """Return whether two non-tensor leaves are the same object, or built-in values of one type with equal ``repr``."""
    if one.value is other.value:
        return True
    plain = isinstance(one.value, _PLAIN) and type(one.value) is type(other.value)
    return plain and repr(one.value) == repr(other.value)


def libraries_in_use() -> contextlib.AbstractContextManager[Any]:
    return register_flattening_functions(**options_in_use())


def _copy(leaf: object, device: torch.device | None) -> object:
    if isinstance(leaf, torch.Tensor):
        # copy=True: without it, a tensor on the same device would not be copied
        return leaf.detach().to(device=leaf.device if device is None else device, copy=True)
    numpy = sys.modules.get("numpy")
    return leaf.copy() if numpy is not None and isinstance(leaf, numpy.ndarray) else leaf


_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_KEY, _VERSION, _SUFFIX = "yobx_flatten.call", 1, ".safetensors"


def call_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"call-*{_SUFFIX}"))


def write_call(folder: pathlib.Path, call: Call) -> Call:
    """Write a recorded call to a file, and return a :class:`Call` that reads inputs and outputs from the file."""
    from safetensors.torch import _TYPES

    names = [(parameter.name, int(parameter.kind)) for parameter in call.callee.signature.parameters.values()]
    about = About(call.index, call.kind, call.past, call.new, call.callee.label, dump_static(names), call.error)
    path = folder / f"call-{call.index:05}{_SUFFIX}"
    with scratch_for(path) as half:
        head: dict[str, Any] = {"version": _VERSION, "about": dataclasses.asdict(about)}
        tensors = {}
        for name, part in call.parts.items():
            fields = [dump_static(tuple(fact), where=fact.path) for fact in part.facts]
            head[name] = {"spec": pytree.treespec_dumps(part.spec), "leaves": fields}
            for number, leaf in enumerate(part.leaves()):
                if isinstance(leaf, torch.Tensor):
                    stored = leaf.cpu().contiguous()
                    # a dtype that the format lacks is stored as bytes; the metadata has the original dtype
                    tensors[f"{name}.{number}"] = (
                        stored if stored.dtype in _TYPES.values() else stored.reshape(-1).view(torch.uint8)
                    )
        write_tensor_file(half / path.name, tensors, metadata={_KEY: json.dumps(head)})
        publish_files(half, path)
    parts = {name: _stored(path, name, part.facts, part.spec) for name, part in call.parts.items()}
    return dataclasses.replace(call, parts=parts)


def read_call(path: pathlib.Path, callee: Callee | None) -> Call:
    # callee: the recorded method; `None` for a method without its object, as the file describes it
    require("safetensors", "msgspec", purpose="read_call")
    import msgspec

    with opened_tensors(path, failure=RecordError) as file:
        text = (file.metadata() or {}).get(_KEY)
    if text is None:
        raise RecordError(f"{path} is not a recorded call: it was not written by record_calls.")
    head = parse_document(text, dict[str, Any], str(path), failure=RecordError, finite=False)
    with damage_as(RecordError, str(path)):  # torch's reader, and the wrong types of a file
        if head.pop("version") != _VERSION:
            raise RecordError(f"{path} needs a newer yobx-flatten:\n    pip install --upgrade yobx-flatten")
        about = head.pop("about")
        parts = {}
        with libraries_in_use():
            for name, part in head.items():
                facts = tuple(Fact(*load_static(fields)) for fields in part["leaves"])
                check_spec(part["spec"])
                try:
                    spec = pytree.treespec_loads(part["spec"])
                except NotImplementedError as error:  # torch's error for a class that is not registered
                    raise RecordError(
                        f"{path}: {error} Register the classes of the arguments before you load the calls."
                    ) from None
                parts[name] = _stored(path, name, facts, spec)
        about = msgspec.convert(about, About)
        if callee is None:
            names = load_static(about.names)
            parameters = [inspect.Parameter(name, inspect._ParameterKind(kind)) for name, kind in names]
            callee = Callee(about.label, None, about.label.rpartition(".")[2], inspect.Signature(parameters))
        return Call(callee, about.index, about.kind, about.past, about.new, parts, about.error)


def _stored(path: pathlib.Path, name: str, facts: tuple[Fact, ...], spec: pytree.TreeSpec) -> Snapshot:
    """Return recorded inputs or outputs whose tensors are read from a file each time they are used."""

    def load() -> Sequence[Any]:
        leaves: list[Any] = []
        with opened_tensors(path, failure=RecordError) as file:
            for number, fact in enumerate(facts):
                leaf = file.get_tensor(f"{name}.{number}") if fact.is_tensor else fact.value
                if fact.dtype is not None and leaf.dtype is not fact.dtype:  # stored as bytes
                    leaf = leaf.view(fact.dtype).reshape(fact.shape)
                leaves.append(leaf)
        return leaves

    return Snapshot(facts, spec, load)
