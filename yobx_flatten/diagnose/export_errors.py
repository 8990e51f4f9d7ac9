"""Explain error messages of ``torch.export``: cause, place, and the line to type (:func:`explain_error`).

Each row of the table reads one kind of message. torch words some of them differently with ``strict=True``, and has
reworded most of them once or twice; a row looks for the words that stayed. A message without a row is unknown.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from ..core.contents import Layouts
from ..errors import FlattenError
from ..errors.failures import result_or
from ..errors.tried_versions import possible_cause
from ..recipe.aliases import DynamicShapes
from ..trees.walk import class_name, torch_leaves
from .explanation import Explanation, Failure, Row
from .places import place_of
from .program_errors import PROGRAM_ROWS, explain_guards
from .remedies import Remedy, remedy_for
from .size_errors import SIZE_ROWS, explain_misfit, misfit_in_our_words
from .tool_messages import OTHER_ROWS


def explain_error(
    error: BaseException | str,
    module: torch.nn.Module | ExportedProgram | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: DynamicShapes = None,
) -> Explanation:
    """Explain an error of ``torch.export``, of an exported program, or of a tool that the program is passed to.

    Args:
        error: the exception that was raised, or its text, as a log has it.
        module: the module that was exported, or the program that was called. It helps to find the place; for an output
            that torch refuses, the module is called once more.
        args: positional arguments of the export or the call; none by default.
        kwargs: keyword arguments of the export or the call; none by default.
        dynamic_shapes: as passed to ``torch.export.export``.

    Returns:
        The explanation. For an unknown message ``known`` is ``False``, and the explanation repeats the message.

    >>> class Adds(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.ones(2)
    >>> batch = torch.export.Dim("batch")
    >>> try:
    ...     program = torch.export.export(Adds(), (torch.zeros(2),), dynamic_shapes={"x": {0: batch}})
    ... except Exception as error:
    ...     print(explain_error(error))
    batch was to vary, but the code works for size 2 only. Either take out what fixes it, or let it be fixed:
        batch = 2
    """
    is_text = isinstance(error, str)
    if isinstance(error, str):
        error = RuntimeError(error)
    if isinstance(error, FlattenError):
        return Explanation(str(error))
    failure = Failure(error, str(error), module, args, kwargs or {}, dynamic_shapes)
    for pattern, explain in _TABLE:
        found = re.search(pattern, failure.message, re.DOTALL)
        if found is not None and (explanation := explain(failure, found)) is not None:
            return explanation
    if (explanation := explain_guards(failure)) is not None:
        return explanation
    if misfit := misfit_in_our_words(failure):
        return explain_misfit(failure, misfit, ())
    message = failure.message if is_text else f"{type(error).__name__}: {failure.message}"
    text = f"This error is not known here. torch reports: {_first_line_of(message)}"
    return Explanation("\n".join(filter(None, (text, possible_cause()))), known=False)


def _first_line_of(message: str) -> str:
    """The first line of a message; of a traceback that of the last error, which stands after its frames."""
    last = message.rpartition("Traceback (most recent call last):\n")[2]
    lines = [line for line in last.strip("\n").split("\n") if line.strip() and not line.startswith("  ")]
    return (lines or [""])[0].strip().removesuffix(":")


# -- classes that are not registered ----------------------------------------------------------------------------------


def _unregistered_input(failure: Failure, found: re.Match[str]) -> Explanation:
    return _unregistered("torch.export takes no object of this class as input", found[1], failure.inputs())


def _unregistered_output(failure: Failure, found: re.Match[str]) -> Explanation:
    # where the module cannot be called the place stays unknown, the class is known all the same
    outputs: dict[str, Any] = result_or(lambda: _outputs(failure), lambda error: {})
    return _unregistered("torch.export takes no object of this class as output", found[1], outputs)


def _outputs(failure: Failure) -> dict[str, Any]:
    if not isinstance(failure.module, torch.nn.Module):
        return {}
    with torch.no_grad():
        return {"output": failure.module(*failure.args, **failure.kwargs)}


def _unregistered(what: str, name: str, trees: dict[str, Any]) -> Explanation:
    """Look for the leaves of a class that is known by its name only."""
    short, layouts = name.rpartition(".")[2], Layouts()
    leaves = [(path, leaf) for root, tree in trees.items() for path, leaf in torch_leaves(tree, root)]
    places = [(path, leaf) for path, leaf in leaves if type(leaf).__name__ == short]
    if not places:
        cls = vars(sys.modules.get(name.rpartition(".")[0], object)).get(short)
        if isinstance(cls, type):
            remedy = remedy_for(cls, None, layouts)
        else:
            remedy = Remedy("Register it first", f"register_class_flattening({short}, ...)")
        return Explanation(f"{what}: {name}. {remedy.advice}:", (), remedy.line)
    paths = tuple(path for path, _ in places)
    leaf = places[0][1]
    remedy = remedy_for(type(leaf), leaf, layouts, paths[0])
    return Explanation(f"{what}: {_some(paths)} is a {class_name(type(leaf))}. {remedy.advice}:", paths, remedy.line)


def _some(paths: tuple[str, ...]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} (one of {len(paths)} such places)"


def _not_registered_now(failure: Failure, found: re.Match[str]) -> Explanation | None:
    """A program that outlives a registration ends in ``KeyError: <class ...>``."""
    cls = failure.error.args[0] if failure.error.args else None
    if not isinstance(failure.error, KeyError) or not isinstance(cls, type):
        return None
    remedy = remedy_for(cls, None, Layouts())
    return Explanation(
        f"The program takes or returns a {cls.__qualname__}, which is not registered (any more). Call it where the "
        "class is registered:",
        (),
        remedy.line,
    )


def _not_registered_when_loaded(failure: Failure, found: re.Match[str]) -> Explanation:
    module, _, name = found[1].rpartition(".")
    block = "with register_flattening_functions(patch_transformers=True): ..."
    own = f"from {module} import {name}\nregister_class_flattening({name}, ...)"
    return Explanation(
        f"The stored program holds a {found[1]}, which is not registered in this process. Load it where the class is:",
        (),
        block if module.startswith("transformers.") else own,
    )


# -- the code looks at values ----------------------------------------------------------------------------------------


_TORCH = os.path.dirname(torch.__file__)


def _looks_at_values(failure: Failure, found: re.Match[str]) -> Explanation:
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)(?:\n {4,}(\S.*))?', failure.message)
    own = [place for place in places if not place[0].startswith(_TORCH)]
    where = place_of(failure.error)
    if where:
        pass  # what the traceback shows, the message has in fewer words
    elif own:
        file, line, function, code = own[-1]
        where = f" in {function}, {file}:{line}{': ' + code.strip() if code else ''}"
    else:
        caused = re.search(r"Caused by: .*?\(?([\w./\\-]+\.py):(\d+) in (\w+)", failure.message)
        if caused is not None and not os.path.exists(os.path.join(_TORCH, caused[1])):
            where = f" in {caused[3]}, {caused[1]}:{caused[2]}"
    return Explanation(
        f"The code decides by the value of a tensor{where}\nA program has one way for all values. Compute both sides "
        "and choose, or branch inside the program; if it is a size, state what is known of it:",
        (),
        "torch.where(condition, a, b)\ntorch.cond(condition, f, g, (x,))\ntorch._check(n > 3)",
    )


# -- arguments -------------------------------------------------------------------------------------------------------


def _arguments(failure: Failure, found: re.Match[str]) -> Explanation | None:
    if not isinstance(failure.error, TypeError):
        return None
    return Explanation(
        f"The module's forward cannot be called with these args and kwargs: {failure.message.strip()}.",
        (found[1],),
        "check_inputs(module, args, kwargs)",
    )


def _args_are_no_tuple(failure: Failure, found: re.Match[str]) -> Explanation:
    return Explanation("args must be a tuple of positional arguments:", ("args",), "torch.export.export(module, (x,))")


_TABLE: list[Row] = [
    (r"Unsupported input type <class '([^']+)'>", _unregistered_input),
    (r"one of the inputs with type `?<class '([^']+)'>`?\s*is not supported", _unregistered_input),
    (r"Encountered an unsupported object of type <class '([^']+)'> while writing", _unregistered_input),
    (r"Found <class '([^']+)'> in output, which is not a known type", _unregistered_output),
    (r"Encountered unrecognized type \w+\((?:\w+\()?([\w.]+)\)* at output", _unregistered_output),
    (r"Deserializing ([\w.]+) in pytree is not registered", _not_registered_when_loaded),
    (r"<class '([^']+)'>$", _not_registered_now),
    *SIZE_ROWS,
    *PROGRAM_ROWS,
    (
        r"data-dependent expression|[Dd]ata-dependent branching|Dynamic control flow is not supported",
        _looks_at_values,
    ),
    (r"missing a required (?:keyword-only )?argument: '(\w+)'", _arguments),
    (r"got an unexpected keyword argument '(\w+)'", _arguments),
    (r"(too many positional arguments)", _arguments),
    (r"Expecting `args` to be a tuple", _args_are_no_tuple),
    *OTHER_ROWS,
]
