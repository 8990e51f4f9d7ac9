"""Name the arguments that ``forward`` takes in its ``**kwargs``, during a trace.

``torch.export`` takes dynamic shapes by the parameters of ``forward`` and has none for what ends in ``**kwargs``
(https://github.com/pytorch/pytorch/issues/150371). Hugging Face models take half of their arguments there.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from ...errors import InvalidArgumentError
from .replaced_forward import replaced_forward


def swallowed_names(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> list[str]:
    """List the arguments that ``forward`` has no name for and takes all the same."""
    # returns: names that end in `**kwargs`; none where `forward` has no such parameter
    parameters = _parameters(module)
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in kwargs if name not in parameters]


@contextlib.contextmanager
def named_in_forward(module: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let ``forward`` have keyword parameters of these names inside, instead of its ``**kwargs``."""
    # names: see `swallowed_names`; nothing changes without any
    if not names:
        yield
        return
    original = module.forward
    kept = [p for p in _parameters(module).values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    forward.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined] # what inspect reads first
    with replaced_forward(module, forward):
        yield


def check_spelling(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Refuse likely misspellings of parameters, which would end in ``**kwargs`` silently."""
    known = list(_parameters(module))
    for name in names:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if close:
            raise InvalidArgumentError(
                f"{type(module).__qualname__}.forward has no parameter {name!r}, and its **kwargs would take it "
                f"silently. Did you mean {close[0]!r}?"
            )


def check_all_read(
    module: torch.nn.Module, names: Sequence[str], program: ExportedProgram, inputs: Mapping[str, Sequence[str]]
) -> None:
    """Refuse tensors that ``forward`` took in its ``**kwargs`` and did not read."""
    # inputs: for each argument, the inputs of the graph that its tensors are
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    unread = [name for name in names if inputs.get(name) and not used.intersection(inputs[name])]
    if unread:
        parameters = [p.name for p in _parameters(module).values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        close = difflib.get_close_matches(unread[0], parameters, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward has no parameter {', '.join(map(repr, unread))}, took it in its "
            f"**kwargs and did not read it. Its parameters are {', '.join(parameters)}.{hint}"
        )


def _parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # of a scripted module nothing is known
        return {}
