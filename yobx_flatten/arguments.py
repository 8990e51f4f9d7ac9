"""What ``export_program`` and ``export_onnx`` are given, looked over before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .errors import DynamicShapesError, InvalidArgumentError, NotRegisteredError, describe_class
from .registry import REGISTRY
from .replay import Case
from .tree import key_name, node_of

__all__ = ["check_arguments", "check_cases", "explain_leaf", "shapes_by_name"]

_EXAMPLE = '\n    export_program(module, (x,), {"y": y})'


def check_arguments(module: Any, args: Any, kwargs: Any) -> None:
    """Refuse what is no module, and arguments that its ``forward`` does not take.

    Raises:
        InvalidArgumentError: naming the argument, what was found and the line to type.
    """
    if not isinstance(module, torch.nn.Module):
        hint = f" Make an instance: {module.__qualname__}(...)." if isinstance(module, type) else ""
        raise InvalidArgumentError(
            f"module: expected a torch.nn.Module, found {describe_class(module)}.{hint}{_EXAMPLE}"
        )
    if not isinstance(args, tuple):
        raise InvalidArgumentError(
            f"args: expected a tuple of positional arguments, found {describe_class(args)}.{_EXAMPLE}"
        )
    if not isinstance(kwargs, Mapping | None):
        raise InvalidArgumentError(
            f"kwargs: expected a dict of keyword arguments, found {describe_class(kwargs)}.{_EXAMPLE}"
        )
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a scripted module has no signature to check
        return
    try:
        signature.bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward cannot be called with these args and kwargs: {error}. Its parameters "
            f"are {', '.join(signature.parameters)}."
        ) from None


def check_cases(cases: Iterable[Any]) -> list[Case]:
    """Refuse cases that are none.

    Raises:
        InvalidArgumentError: naming the first one.
    """
    found = list(cases)
    for number, case in enumerate(found):
        if not isinstance(case, Case):
            raise InvalidArgumentError(
                f"cases[{number}]: expected a Case, found {describe_class(case)}.\n"
                '    cases=[Case("five rows", args, kwargs)]'
            )
    return found


def shapes_by_name(inputs: Mapping[str, Any], shapes: Any) -> dict[str, Any]:
    """Give every input its entry of ``dynamic_shapes``, ``None`` where it has none.

    Args:
        inputs: by parameter name.
        shapes: a dict by parameter name, or a list in the order of the inputs.

    Raises:
        DynamicShapesError: when it is something else, or longer than the inputs.
    """
    if isinstance(shapes, (tuple, list)):
        if len(shapes) > len(inputs):
            raise DynamicShapesError(
                f"dynamic_shapes: found {len(shapes)} entries for {len(inputs)} inputs, {list(inputs)}. Write one "
                "entry per input, None for one that stays as it is."
            )
        shapes = dict(zip(inputs, shapes, strict=False))
    if not isinstance(shapes, Mapping):
        raise DynamicShapesError(
            f'dynamic_shapes: expected "auto", None, or a dict with the keys {list(inputs)}, found '
            f"{describe_class(shapes)}."
        )
    return {**dict.fromkeys(inputs), **shapes}


def explain_leaf(inputs: Mapping[str, Any], refusal: str) -> NotRegisteredError | None:
    """Say where among the inputs the object is that torch refuses, and the line that registers its class.

    Args:
        inputs: by parameter name.
        refusal: what ``torch.export`` says, which names the class and neither place nor remedy.
    """
    for path, leaf in _leaves(inputs, ()):
        if str(type(leaf)) in refusal:
            cls = type(leaf)
            remedy = REGISTRY.remedy(cls) or (
                f"register_class_flattening({cls.__qualname__}, f_flatten, f_unflatten, f_flatten_with_keys)"
            )
            return NotRegisteredError(
                f"{'.'.join(path)} is a {describe_class(cls)}, which torch does not know how to flatten. Register it "
                f"first:\n    {remedy}"
            )
    return None


def _leaves(obj: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    node = node_of(obj)
    if node is None:
        yield path, obj
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _leaves(child, (*path, key_name(key)))
