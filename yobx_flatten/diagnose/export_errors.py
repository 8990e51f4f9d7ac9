"""Explain messages of ``torch.export``: what they mean, where they come from, what to type: :func:`explain_error`.

Each entry of the table reads one kind of message. torch words some of them differently with ``strict=True``, and has
reworded most of them once or twice; an entry looks for the words that stayed. A message without an entry is unknown.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from ..errors import DynamicShapesError, FlattenError
from ..trees.arguments import inputs_by_name
from ..trees.shapes import check_dynamic_shapes
from ..trees.walk import class_name, torch_leaves
from .contents import Layouts
from .other_messages import meaning_of
from .remedies import Remedy, remedy_for
from .spec_diff import Difference, compare_spec_texts, compare_specs

__all__ = ["Explanation", "explain_error"]


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What an error means. Its ``str`` is the text to read.

    Attributes:
        text: the meaning of the error.
        paths: the inputs or outputs it is about, as Python.
        remedy: the line to type; empty where there is none.
        known: whether the message is one of those that :func:`explain_error` knows.
    """

    text: str
    paths: tuple[str, ...] = ()
    remedy: str = ""
    known: bool = True

    def __str__(self) -> str:
        remedy = self.remedy.replace("\n", "\n    ")
        return f"{self.text}\n    {remedy}" if remedy else self.text


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The error with what it happened to."""

    error: BaseException
    message: str
    module: torch.nn.Module | ExportedProgram | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any

    def inputs(self) -> dict[str, Any]:
        return inputs_by_name(self.module, self.args, self.kwargs)


def explain_error(
    error: BaseException,
    module: torch.nn.Module | ExportedProgram | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Explanation:
    """Explain an error of ``torch.export``, of an exported program, or of a tool that the program is passed to.

    Args:
        error: the exception that was raised.
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
    if isinstance(error, FlattenError):
        return Explanation(str(error))
    failure = _Failure(error, str(error), module, args, kwargs or {}, dynamic_shapes)
    for pattern, explain in _TABLE:
        found = re.search(pattern, failure.message, re.DOTALL)
        if found is not None and (explanation := explain(failure, found)) is not None:
            return explanation
    if (meaning := meaning_of(failure.message, module, failure.inputs())) is not None:
        return Explanation(*meaning)
    if (explanation := _in_the_guards(failure)) is not None:
        return explanation
    if misfit := _misfit_in_our_words(failure):
        return _misfit(failure, misfit, ())
    first = failure.message.strip().split("\n")[0]
    return Explanation(
        f"This error is not known here. torch reports: {type(error).__name__}{f': {first}' if first else ''}",
        known=False,
    )


# -- classes that are not registered ----------------------------------------------------------------------------------


def _unregistered_input(failure: _Failure, found: re.Match[str]) -> Explanation:
    return _unregistered("torch.export takes no object of this class as input", found[1], failure.inputs())


def _unregistered_output(failure: _Failure, found: re.Match[str]) -> Explanation:
    outputs: dict[str, Any] = {}
    if isinstance(failure.module, torch.nn.Module):
        try:
            with torch.no_grad():
                outputs = {"output": failure.module(*failure.args, **failure.kwargs)}
        except Exception:  # then the place stays unknown, the class is known all the same
            outputs = {}
    return _unregistered("torch.export takes no object of this class as output", found[1], outputs)


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
    remedy = remedy_for(type(leaf), leaf, layouts)
    if layouts(type(leaf)).is_tensor:
        remedy = Remedy("Pass a tensor instead", f"torch.tensor({paths[0]})")
    return Explanation(f"{what}: {_some(paths)} is a {class_name(type(leaf))}. {remedy.advice}:", paths, remedy.line)


def _some(paths: tuple[str, ...]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} (one of {len(paths)} such places)"


def _not_registered_now(failure: _Failure, found: re.Match[str]) -> Explanation | None:
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


def _not_registered_when_loaded(failure: _Failure, found: re.Match[str]) -> Explanation:
    module, _, name = found[1].rpartition(".")
    block = "with register_flattening_functions(patch_transformers=True): ..."
    own = f"from {module} import {name}\nregister_class_flattening({name}, ...)"
    return Explanation(
        f"The stored program holds a {found[1]}, which is not registered in this process. Load it where the class is:",
        (),
        block if module.startswith("transformers.") else own,
    )


# -- sizes that were to vary -----------------------------------------------------------------------------------------


def _constraints(failure: _Failure, found: re.Match[str]) -> Explanation | None:
    """Every line of "Constraints violated" in other words, and torch's own suggestion."""
    message = failure.message
    fixed = re.findall(r"You marked (.+?) as dynamic but your code specialized it to be a constant \((\d+)\)", message)
    equal = re.findall(r"The values of (.+?) and (.+?) must always be equal", message)
    related = re.findall(r"The values of (.+?) must always be related to the values of (.+?) by ", message)
    narrower = re.findall(r"Not all values of (.+?) in the specified range satisfy the generated guard (.+)", message)
    sentences, paths = [], []
    for name, size in fixed:
        paths.append(_format_size(name))
        if int(size) < 2:
            sentences.append(
                f"{_format_size(name)} was to vary, but has size {size} in the example, which torch.export takes for "
                "fixed. Pass an example of size 2 or more, or let it be fixed:"
            )
        else:
            sentences.append(
                f"{_format_size(name)} was to vary, but the code works for size {size} only. Either take out what "
                "fixes it, or let it be fixed:"
            )
    for pair in equal + related:
        sides = [_format_size(side) for side in pair]
        paths += sides
        kind = "are equal" if pair in equal else "vary together"
        sentences.append(f"The code works only where {' and '.join(sides)} {kind}. Say so:")
    for name, guard in narrower:
        paths.append(_format_size(name))
        sentences.append(
            f"The code takes another way for some sizes of {_format_size(name)}: the trace holds where "
            f"{_format_size(guard)}. Let the range state it, or take the branch out:"
        )
    if not sentences:
        return None
    suggested = re.search(r"Suggested fixes:\n(.+?)(?:\n\n|\Z)", message, re.DOTALL)
    remedy = re.sub(r"(?m)^\s+", "", suggested[1]) if suggested else "Dim.AUTO  # instead of Dim.DYNAMIC"
    return Explanation("\n".join(dict.fromkeys(sentences)), tuple(dict.fromkeys(paths)), remedy)


def _format_size(text: str) -> str:
    """Spell ``L['x'].size()[0]`` as a user would.

    >>> _format_size("batch"), _format_size("L['x']['a'].size()[1]"), _format_size("b = L['y'].size()[0]")
    ('batch', "x['a'].shape[1]", 'b (y.shape[0])')
    """
    text = re.sub(r"L\['(\w+)'\]", r"\1", text).replace(".size()[", ".shape[")
    return re.sub(r"(\w+) = (\S+\.shape\[\d+\])", r"\1 (\2)", text)


def _fixed_by_the_example(failure: _Failure, found: re.Match[str]) -> Explanation:
    path = re.sub(r"inputs\['(\w+)'\]", r"\1", found[2])
    return Explanation(
        f"{path} was to vary, but has size {found[1]} in the example, which torch.export takes for fixed. Pass an "
        "example of size 2 or more, or let torch find out:",
        (path,),
        "Dim.AUTO  # instead of Dim.DYNAMIC",
    )


def _not_in_range(failure: _Failure, found: re.Match[str]) -> Explanation:
    return Explanation(
        f"The example has size {found[1]} where the Dim allows {found[2]}. Pass an example within the range, or widen "
        "it:",
        (),
        f'Dim("name", min={found[1]})',
    )


# -- dynamic_shapes that do not fit ----------------------------------------------------------------------------------


def _shapes_do_not_fit(failure: _Failure, found: re.Match[str]) -> Explanation:
    named = re.findall(r"`(dynamic_shapes\[[^`]*\])`", failure.message)
    text = failure.message.strip().split("\n")[0].split(" For more information")[0]
    return _misfit(failure, _misfit_in_our_words(failure) or text, tuple(named[:1]))


def _misfit_in_our_words(failure: _Failure) -> str:
    """What ``check_dynamic_shapes`` states, nothing where it cannot be asked or finds nothing."""
    if failure.dynamic_shapes is None:
        return ""
    inputs = failure.inputs()
    try:
        check_dynamic_shapes(
            inputs if isinstance(failure.dynamic_shapes, Mapping) else tuple(inputs.values()), failure.dynamic_shapes
        )
    except DynamicShapesError as error:
        return str(error).removeprefix("the inputs: ")
    return ""


def _misfit(failure: _Failure, text: str, paths: tuple[str, ...]) -> Explanation:
    line = "export_program(module, args, kwargs)  # writes them"
    if not failure.args or not failure.kwargs:
        line = f"dynamic_shapes=dynamic_shapes({'kwargs' if failure.kwargs else 'args'})"
    return Explanation(f"dynamic_shapes does not fit the inputs: {text}\nIt can be written for you:", paths, line)


# -- a program refuses its inputs ------------------------------------------------------------------------------------


def _other_structure(failure: _Failure, found: re.Match[str]) -> Explanation | None:
    names = ("exported", "called")
    differences: list[Difference] | None = None
    if isinstance(failure.module, ExportedProgram) and (failure.args or failure.kwargs):
        differences = compare_specs(failure.module, (failure.args, dict(failure.kwargs)), names=names)
    if not differences:
        differences = compare_spec_texts(found[1], found[2], names)
    if not differences:
        return None
    listed = "\n".join(map(str, differences))
    return Explanation(
        f"The program was exported for inputs of another structure:\n{listed}",
        tuple(difference.path for difference in differences),
        "",
    )


def _other_keywords(failure: _Failure, found: re.Match[str]) -> Explanation:
    given, expected = (re.findall(r"'([^']+)'", names) for names in (found[1], found[2]))
    paths = tuple(f"kwargs[{name!r}]" for name in given if name not in expected)
    missing = [name for name in expected if name not in given]
    text = [f"{', '.join(paths)} was not passed by keyword when the program was exported."] if paths else []
    text += [f"{', '.join(missing)} is missing: it was passed by keyword then."] if missing else []
    return Explanation(" ".join(text) + " Call the program as it was exported:", paths, _call(expected))


def _call(keywords: list[str]) -> str:
    return (
        f"program.module()(..., {', '.join(f'{name}=...' for name in keywords)})"
        if keywords
        else "program.module()(...)"
    )


def _guard(failure: _Failure, found: re.Match[str]) -> Explanation:
    guard = found[1].strip()
    sized = re.match(r"(.+?)\.(size|stride)\(\)\[(\d+)\] (==|!=|<=|>=|<|>) (.+)$", guard)
    if sized is None:
        path = re.split(r" (?:==|!=|<=|>=|<|>) ", guard)[0]
        return Explanation(
            f"The program holds only for {guard}: a number, string or None among the inputs is part of the program. "
            "Pass a tensor, or let the number vary when you export:",
            (path,),
            f"dynamic_shapes={{{path!r}: Dim.AUTO, ...}}",
        )
    path, what, axis, operator, value = sized.groups()
    if what == "stride":
        return Explanation(
            f"The program holds only for {guard}: the example was a slice of a larger tensor. Export with a contiguous "
            "one:",
            (path,),
            f"{path}.contiguous()",
        )
    if value.isdigit() and operator == "==":
        return Explanation(
            f"{path} has another size along axis {axis} than {value}, which the program is for: this axis was not to "
            "vary, or the code fixed it. Export again with:",
            (path,),
            f"dynamic_shapes={{{_root(path)!r}: {{{axis}: Dim.AUTO}}, ...}}  # with an example of size 2 or more",
        )
    return Explanation(
        f"The program holds only for {_format_size(guard)}: the code branches on it and the example took one way, "
        "or a Dim sets the range. Take the branch out, or export one program for each way and choose before the call.",
        (path,),
        "",
    )


def _root(path: str) -> str:
    return re.split(r"[\[.]", path)[0]


def _in_the_guards(failure: _Failure) -> Explanation | None:
    """An error raised by the code that torch generates to check the inputs of a program: its file has no name."""
    frames = traceback.extract_tb(failure.error.__traceback__)
    if not frames or (frames[-1].filename, frames[-1].name) != ("<string>", "_"):
        return None
    return Explanation(
        "The program could not check its inputs. Known causes: None where the example had a tensor, or an example that "
        "is a slice of a larger tensor. Pass what the example had, and export with contiguous examples:",
        (),
        "example.contiguous()",
    )


# -- the code looks at values ----------------------------------------------------------------------------------------


_TORCH = os.path.dirname(torch.__file__)


def _looks_at_values(failure: _Failure, found: re.Match[str]) -> Explanation:
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)(?:\n {4,}(\S.*))?', failure.message)
    own = [place for place in places if not place[0].startswith(_TORCH)]
    where = ""
    if own:
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


def _arguments(failure: _Failure, found: re.Match[str]) -> Explanation | None:
    if not isinstance(failure.error, TypeError):
        return None
    return Explanation(
        f"The module's forward cannot be called with these args and kwargs: {failure.message.strip()}.",
        (found[1],),
        "check_inputs(module, args, kwargs)",
    )


def _args_are_no_tuple(failure: _Failure, found: re.Match[str]) -> Explanation:
    return Explanation("args must be a tuple of positional arguments:", ("args",), "torch.export.export(module, (x,))")


_Explain = Callable[[_Failure, "re.Match[str]"], "Explanation | None"]

_TABLE: list[tuple[str, _Explain]] = [
    (r"Unsupported input type <class '([^']+)'>", _unregistered_input),
    (r"one of the inputs with type `?<class '([^']+)'>`?\s*is not supported", _unregistered_input),
    (r"Encountered an unsupported object of type <class '([^']+)'> while writing", _unregistered_input),
    (r"Found <class '([^']+)'> in output, which is not a known type", _unregistered_output),
    (r"Encountered unrecognized type \w+\((?:\w+\()?([\w.]+)\)* at output", _unregistered_output),
    (r"Deserializing ([\w.]+) in pytree is not registered", _not_registered_when_loaded),
    (r"<class '([^']+)'>$", _not_registered_now),
    (r"Constraints violated", _constraints),
    (
        r"conflicts between user-specified ranges and inferred ranges.*specialized due to hint of (\d+) for dimension "
        r"(inputs\S*\d+\])",
        _fixed_by_the_example,
    ),
    (r"(\d+) not in range (\[.*?\])", _not_in_range),
    (r"mismatch between the structure of `inputs` and `dynamic_shapes`", _shapes_do_not_fit),
    (r"`dynamic_shapes` is specified as a dict, its top-level keys must be", _shapes_do_not_fit),
    (r"specified at `dynamic_shapes", _shapes_do_not_fit),
    (
        r"exported input tree spec: *\n(.*?)\nbut actually got inputs with tree spec of: *\n(.*?)\.\nPlease check",
        _other_structure,
    ),
    (r"kwarg keyword mismatch: Got the following keywords (\[.*?\]) but expected (\[.*?\])", _other_keywords),
    (r"^Guard failed: (.+)$", _guard),
    (
        r"data-dependent expression|[Dd]ata-dependent branching|Dynamic control flow is not supported",
        _looks_at_values,
    ),
    (r"missing a required (?:keyword-only )?argument: '(\w+)'", _arguments),
    (r"got an unexpected keyword argument '(\w+)'", _arguments),
    (r"(too many positional arguments)", _arguments),
    (r"Expecting `args` to be a tuple", _args_are_no_tuple),
]
