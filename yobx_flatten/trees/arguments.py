"""Check the arguments of ``export_program`` and ``export_onnx`` before anything is traced."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..errors import DynamicShapesError, InvalidArgumentError, NotRegisteredError, describe_class
from ..registry.recipe.aliases import DynamicShapes
from .walk import check_no_cycles, class_name, node_of, torch_leaves

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_EXAMPLE = '\n    args=(x,), kwargs={"y": y}'


def check_arguments(module: object, args: object, kwargs: object) -> None:
    """Raise an error if ``module`` is not a module, or its ``forward`` or ``torch.export`` refuses the arguments."""
    owner = getattr(module, "__self__", None)
    if inspect.ismethod(module) and isinstance(owner, torch.nn.Module):
        name, kind = module.__name__, type(owner).__qualname__
        raise InvalidArgumentError(
            f"module: expected a torch.nn.Module, found the method {name!r} of {kind}. Record a call of the method, "
            f"and export the recording:\n    with record_calls(model, method={name!r}) as calls: model.{name}(...)\n"
            "    export_onnx(calls.module(), kwargs=calls.example(), path=...)"
        )
    if not isinstance(module, torch.nn.Module):
        hint = instance_hint(module)
        if isinstance(module, str):
            hint = f" A model by its name or folder is for:\n    export_folder({module!r}, folder)"
        raise InvalidArgumentError(f"module: expected a torch.nn.Module, found {describe_class(module)}.{hint}")
    if not isinstance(args, tuple):
        raise InvalidArgumentError(
            f"args: expected a tuple of positional arguments, found {describe_class(args)}.{_EXAMPLE}"
        )
    if not isinstance(kwargs, Mapping | None):
        raise InvalidArgumentError(
            f"kwargs: expected a dict of keyword arguments, found {describe_class(kwargs)}.{_EXAMPLE}"
        )
    for name, value in inputs_by_name(module, args, kwargs).items():
        check_no_cycles(value, name)
        for path, leaf in torch_leaves(value, name):
            if not issubclass(type(leaf), torch.Tensor) or not (leaf.is_nested or leaf.layout in _SPARSE):
                continue
            kind, cure = "sparse", f"it dense:\n    {path}.to_dense()"
            if leaf.is_nested:
                kind = "nested"
                cure = f"its rows padded to one length, and a mask:\n    torch.nested.to_padded_tensor({path}, 0.0)"
            refused = InvalidArgumentError(
                f"{path} is a {kind} tensor, which torch.export does not accept. Pass {cure}"
            )
            refused.path = path  # type: ignore[attr-defined] # for check_inputs
            raise refused
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a scripted module has no signature to check
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        unknown = [name for name in kwargs or {} if name not in signature.parameters]
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward cannot be called with these args and kwargs: {error}. Its parameters "
            f"are {', '.join(signature.parameters)}.{did_you_mean(unknown, signature.parameters)}"
        ) from None


def instance_hint(given: object) -> str:
    """If ``given`` is a class, return a sentence for an error message on how to make an instance; else ``""``."""
    how = ".from_pretrained(FOLDER)" if hasattr(given, "from_pretrained") else "(...)"
    return f" Make an instance: {given.__qualname__}{how}." if isinstance(given, type) else ""


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    names = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, names, n=1)]
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""


def inputs_by_name(module: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all inputs of a module by the parameter names of its ``forward``, in the order of the parameters."""
    # returns: the inputs by name; under `args` and `kwargs` if the names of `forward` are unknown or do not fit
    kwargs, bound = kwargs or {}, None
    if isinstance(module, torch.nn.Module):
        with contextlib.suppress(TypeError, ValueError):
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    if bound is None:
        return {**({"args": args} if args else {}), **({"kwargs": dict(kwargs)} if kwargs else {})}
    swallowed = {p.name for p in bound.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD}
    named = {name: value for name, value in bound.arguments.items() if name not in swallowed}
    return {**named, **{name: value for name, value in kwargs.items() if name not in named}}


def shapes_by_name(inputs: Mapping[str, Any], shapes: DynamicShapes) -> dict[str, Any]:
    """Return the ``dynamic_shapes`` of every input by name; inputs without an entry get ``None``."""
    # shapes: a dict by parameter name, or a list in the order of the inputs
    if isinstance(shapes, (tuple, list)):
        if len(shapes) > len(inputs):
            raise DynamicShapesError(
                f"dynamic_shapes: found {len(shapes)} entries for {len(inputs)} inputs, {list(inputs)}. Write one "
                "entry per input, None for an input of fixed size."
            )
        shapes = dict(zip(inputs, shapes, strict=False))
    if not isinstance(shapes, Mapping):
        raise DynamicShapesError(
            f'dynamic_shapes: expected "auto", None, or a dict with the keys {list(inputs)}, found '
            f"{describe_class(shapes)}."
        )
    missing = [name for name, value in inputs.items() if name not in shapes and node_of(value) is not None]
    if missing:
        raise DynamicShapesError(
            f"dynamic_shapes: each input that contains tensors needs an entry. Missing: {missing}. The entry None "
            "fixes the sizes of an input:\n"
            f"    {missing[0]!r}: None"
        )
    return {**dict.fromkeys(inputs), **shapes}


def check_no_modules(inputs: Mapping[str, Any]) -> None:
    """Raise a clear error for inputs that contain a module, where torch would report "expected 0 shapes, got 1"."""
    for name, value in inputs.items():
        for path, leaf in torch_leaves(value, name):
            if isinstance(leaf, torch.nn.Module):
                cls = type(leaf).__qualname__
                raise NotRegisteredError(
                    f"{path} is a module ({class_name(type(leaf))}), which cannot be an input. Assign it to an "
                    "attribute of the module that uses it:\n    self.part = part\nor, if it only holds tensors, "
                    "register its class by the names of the tensors:\n"
                    f"    register({cls}, children=['x'])"
                )


def has_no_data(module: torch.nn.Module, leaves: Iterable[Any], brought: Collection[str] = ()) -> str:
    """Return a text that names a weight or input without data (fake or on ``meta``); ``""`` if all have data."""
    # brought: names of weights that are loaded when a layer is called; none by default
    from ..core.private_names.of_torch import FakeTensor

    state = (*module.named_parameters(), *module.named_buffers())
    weights = [(name, tensor) for name, tensor in state if name not in brought]
    for name, tensor in [*weights, *(("an input", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))]:
        if isinstance(tensor, FakeTensor):
            return f"{name} is a FakeTensor, which has no data"
        if tensor.is_meta:
            return f"{name} is on the device meta and has no data"
    return ""


def check_not_offloaded(module: torch.nn.Module) -> None:
    """Refuse a module with weights offloaded by the library accelerate, which ``torch.export`` would not find."""
    for name, part in module.named_modules():
        hook = getattr(part, "_hf_hook", None)
        if any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ()))):
            raise InvalidArgumentError(
                f"The weights of {name or 'the module'} ({type(part).__qualname__}) are offloaded by accelerate, which "
                "loads them when the layer is called, so torch.export finds no weights. Call export_program, which "
                "loads them. Or load the model without device_map, or load the weights first:\n"
                "    accelerate.hooks.remove_hook_from_module(module, recurse=True)"
            )


def on_other_devices(module: torch.nn.Module, tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the inputs on a different device than the weights, as (path, input's device, weights' device)."""
    # several devices are valid if hooks of accelerate move the inputs, and a 0-d tensor may be on the CPU
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) != 1 or any(hasattr(part, "_hf_hook") for part in module.modules()):
        return []
    (device,) = devices
    return [
        (path, str(tensor.device), str(device))
        for path, tensor in tensors
        if tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu")
    ]


def about_devices(path: str, found: str, weights: str) -> str:
    return f"{path} is on {found}, the weights are on {weights}. The trace fails unless forward moves it. Move it:"
