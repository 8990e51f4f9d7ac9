"""Explain error messages of ``torch.export``: cause, place, and line of code to change (:func:`explain_error`).

A table maps regular expressions for torch's messages to explanations. Some messages are different with ``strict=True``
or in newer versions of torch. A regular expression contains only words that all variants of a message have.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from ..core.contents import Layouts
from ..errors import FlattenError, InvalidArgumentError, describe_class, possible_cause
from ..errors.failures import result_or
from ..registry.recipe.aliases import DynamicShapes
from ..trees.walk import class_name, torch_leaves
from .opaque import Remedy, find_unregistered, remedy_for
from .size_errors import LAST_ROWS, PROGRAM_ROWS, SIZE_ROWS, TORCH, Explanation, Failure, Row, fixed, place_of


def _old_tracer(failure: Failure, found: re.Match[str]) -> Explanation:
    others = [one for name, value in failure.inputs().items() for one in find_unregistered(value, name=name)]
    paths = tuple(one.path for one in others if one.inside is None)
    what = f" ({paths[0]} is a {class_name(others[0].cls)})" if paths else ""
    return Explanation(
        "The old tracer (torch.jit.trace, torch.onnx.export(dynamo=False)) accepts tensors in lists, tuples and "
        f"dicts, and ignores registrations{what}. Use torch.export:",
        paths,
        'export_onnx(module, args, kwargs, path="model.onnx")',
    )


def _other_structure(failure: Failure, found: re.Match[str]) -> Explanation:
    others = [one for name, value in failure.inputs().items() for one in find_unregistered(value, name=name)]
    text = "The unflattened program was called with inputs of another structure than those of the example."
    if not others:
        return Explanation(
            f"{text} Pass inputs like the example's, where their classes are registered:",
            remedy="with register_flattening_functions(patch_transformers=True):\n    module(*args, **kwargs)",
        )
    return Explanation(
        f"{text} {others[0].path} is a {class_name(others[0].cls)}, which is not registered here. Unflatten and call "
        "the program where the class is registered:",
        (others[0].path,),
        others[0].remedy,
    )


_WITHOUT_DATA = fixed(
    r"cannot be called on meta tensors|Cannot copy out of meta tensor",
    "Weights that are offloaded or on the meta device have no data, so the program cannot be compared with the "
    "module. Load the weights, or trace without the comparison, with inputs on the same device:",
    "torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes(kwargs))",
)


def _devices(failure: Failure, found: re.Match[str]) -> Explanation | None:
    module = failure.module
    held = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    devices = {str(tensor.device) for tensor in held}
    if len(devices) != 1:
        places = f": the module has weights on {', '.join(sorted(devices))}" if devices else ""
        text = f"An operator gets tensors of several devices{places}. Use one device:"
        return Explanation(text, remedy="module.to(device)")
    (device,) = devices
    if device == "meta":
        return _WITHOUT_DATA[1](failure, found)
    paths = tuple(path for path, tensor in failure.leaves(torch.Tensor) if str(tensor.device) != device)
    what = f"{', '.join(paths[:3])} {'is' if len(paths) == 1 else 'are'} not" if paths else "other tensors are not"
    return Explanation(
        f"The weights are on {device}, and {what}. Move the inputs:",
        paths,
        f"torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to({device!r}), inputs)",
    )


def _nested(failure: Failure, found: re.Match[str]) -> Explanation:
    paths = tuple(path for path, tensor in failure.leaves(torch.Tensor) if tensor.is_nested)
    return Explanation(
        f"{paths[0] if paths else 'An input'} is a nested tensor, which torch.export does not accept. Pass its rows "
        "padded to one length, and a mask:",
        paths,
        f"torch.nested.to_padded_tensor({paths[0] if paths else 'tensor'}, 0.0)",
    )


def _module_among_inputs(failure: Failure, found: re.Match[str]) -> Explanation | None:
    paths = tuple(path for path, _ in failure.leaves(torch.nn.Module))
    if not paths:
        return None
    return Explanation(
        f"The input {paths[0]} is a module, for which torch.export accepts no dynamic shapes. Make it a submodule:",
        paths,
        "self.part = part",
    )


def explain_error(
    error: BaseException | str,
    module: torch.nn.Module | ExportedProgram | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: DynamicShapes = None,
) -> Explanation:
    """Explain an error of ``torch.export``, of an exported program, or of a tool that reads exported programs.

    Args:
        error: the exception that was raised, or its text from a log.
        module: the module that was exported, or the program that was called. Inputs of a module are named like the
            parameters of ``forward``. If an output has an unregistered class, the module is called to find the output.
        args: positional arguments of the export or the call; none by default.
        kwargs: keyword arguments of the export or the call; none by default.
        dynamic_shapes: as passed to ``torch.export.export``.

    Returns:
        The explanation. If the error is unknown, ``known`` is ``False``, and ``text`` quotes the message of torch.

    >>> class Adds(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.ones(2)
    >>> batch = torch.export.Dim("batch")
    >>> try:
    ...     program = torch.export.export(Adds(), (torch.zeros(2),), dynamic_shapes={"x": {0: batch}})
    ... except Exception as error:
    ...     print(explain_error(error))
    batch should vary, but the code works for size 2 only. Change the code, or fix the size:
        batch = 2
    """
    is_text = isinstance(error, str)
    if isinstance(error, str):
        error = RuntimeError(error)
    if not isinstance(error, BaseException):
        raise InvalidArgumentError(f"explain_error: expected an exception or its text, found {describe_class(error)}.")
    if isinstance(error, FlattenError):
        return Explanation(str(error))
    failure = Failure(error, str(error), module, args, kwargs or {}, dynamic_shapes)
    for pattern, explain in _TABLE:
        found = re.search(pattern, failure.message, re.DOTALL)
        if found is not None and (explanation := explain(failure, found)) is not None:
            return explanation
    message = failure.message if is_text else f"{type(error).__name__}: {failure.message}"
    last = message.rpartition("Traceback (most recent call last):\n")[2]  # the error of a traceback is below its frames
    lines = [line for line in last.strip("\n").split("\n") if line.strip() and not line.startswith("  ")]
    text = f"This error is unknown. torch reports: {(lines or [''])[0].strip().removesuffix(':')}"
    return Explanation("\n".join(filter(None, (text, possible_cause()))), known=False)


def _unregistered(what: str, failure: Failure, found: re.Match[str]) -> Explanation:
    name, short, layouts, module = found[1], found[1].rpartition(".")[2], Layouts(), failure.module
    trees = failure.inputs() if what == "input" else {}
    if what == "output" and isinstance(module, torch.nn.Module):
        with torch.no_grad():  # if the call fails, the explanation has the class without its position
            trees = result_or(lambda: {"output": module(*failure.args, **failure.kwargs)}, lambda error: {})
    what = f"torch.export takes no object of this class as {what}"
    leaves = [(path, leaf) for root, tree in trees.items() for path, leaf in torch_leaves(tree, root)]
    places = [(path, leaf) for path, leaf in leaves if type(leaf).__name__ == short]
    if not places:
        cls = vars(sys.modules.get(name.rpartition(".")[0], object)).get(short)
        own = Remedy("Register it first", f"register_class_flattening({short}, ...)")
        remedy = remedy_for(cls, None, layouts) if isinstance(cls, type) else own
        return Explanation(f"{what}: {name}. {remedy.advice}:", (), remedy.line)
    paths = tuple(path for path, _ in places)
    leaf = places[0][1]
    remedy = remedy_for(type(leaf), leaf, layouts, paths[0])
    some = paths[0] if len(paths) == 1 else f"{paths[0]} (one of {len(paths)} such places)"
    return Explanation(f"{what}: {some} is a {class_name(type(leaf))}. {remedy.advice}:", paths, remedy.line)


_unregistered_input = functools.partial(_unregistered, "input")
_unregistered_output = functools.partial(_unregistered, "output")


def _not_registered_now(failure: Failure, found: re.Match[str]) -> Explanation | None:
    # torch raises `KeyError: <class ...>` for a program that is called after its classes were unregistered
    cls = failure.error.args[0] if failure.error.args else None
    if not isinstance(failure.error, KeyError) or not isinstance(cls, type):
        return None
    return Explanation(
        f"The program takes or returns a {cls.__qualname__}, which is not registered (any more). Call the program "
        "where the class is registered:",
        remedy=remedy_for(cls, None, Layouts()).line,
    )


def _not_registered_when_loaded(failure: Failure, found: re.Match[str]) -> Explanation:
    path = found[1]
    module, _, name = path.rpartition(".")
    block = "with register_flattening_functions(patch_transformers=True): ..."
    own = f"from {module} import {name}\nregister_class_flattening({name}, ...)"
    return Explanation(
        f"The stored program holds a {path}, which is not registered in this process. Register the class first:",
        remedy=block if module.startswith("transformers.") else own,
    )


def _looks_at_values(failure: Failure, found: re.Match[str]) -> Explanation:
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)(?:\n {4,}(\S.*))?', failure.message)
    own = [place for place in places if not place[0].startswith(TORCH)]
    where = place_of(failure.error)  # the traceback has more details than the message
    if not where and own:
        file, line, function, code = own[-1]
        where = f" in {function}, {file}:{line}{': ' + code.strip() if code else ''}"
    elif not where:
        caused = re.search(r"Caused by: .*?\(?([\w./\\-]+\.py):(\d+) in (\w+)", failure.message)
        if caused is not None and not os.path.exists(os.path.join(TORCH, caused[1])):
            where = f" in {caused[3]}, {caused[1]}:{caused[2]}"
    return Explanation(
        f"The code branches on the value of a tensor{where}\nAn exported program takes the same path for every "
        "value. Use torch.where or torch.cond; if the value is a size, bound it with torch._check:",
        remedy="torch.where(condition, a, b)\ntorch.cond(condition, f, g, (x,))\ntorch._check(n > 3)",
    )


def _arguments(failure: Failure, found: re.Match[str]) -> Explanation | None:
    if not isinstance(failure.error, TypeError):
        return None
    return Explanation(
        f"The module's forward cannot be called with these args and kwargs: {failure.message.strip()}.",
        (found[1],),
        "check_inputs(module, args, kwargs)",
    )


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
    (r"data-dependent expression|[Dd]ata-dependent branching|Dynamic control flow is not supported", _looks_at_values),
    (r"missing a required (?:keyword-only )?argument: '(\w+)'", _arguments),
    (r"got an unexpected keyword argument '(\w+)'", _arguments),
    (r"(too many positional arguments)", _arguments),
    fixed(
        r"Expecting `args` to be a tuple",
        "args must be a tuple of positional arguments:",
        "torch.export.export(module, (x,))",
        "args",
    ),
    (r"are supported as JIT inputs/outputs", _old_tracer),
    (r"are supported as inputs or outputs of traced functions", _old_tracer),
    (r"cannot be traced\. Only Tensors and \(possibly nested\)", _old_tracer),
    (r"There is no flat args adapter specified", _other_structure),
    fixed(
        r"We ran into an error when deserializing the saved file",
        "The saved program cannot be loaded; a warning gives the reason, most often a class that is not registered "
        "in this process. Load the program where the class is registered:",
        'with register_flattening_functions(patch_transformers=True):\n    program = torch.export.load("model.pt2")',
    ),
    fixed(
        r"^cannot pickle 'module' object",
        "torch.save uses pickle protocol 2, which cannot store memory formats such as torch.channels_last. "
        "Use a higher protocol:",
        'torch.export.save(program, "model.pt2", pickle_protocol=4)',
    ),
    (r"to be on the same device, but found at least two devices", _devices),
    (r"Tensor on device \S+ is not on the expected device|found two different devices", _devices),
    _WITHOUT_DATA,
    (r"NestedTensorImpl doesn't support|strided NestedTensor|'NestedIntNode' object", _nested),
    (r"expected \d+ shapes, got \d+", _module_among_inputs),
    fixed(
        r"Failed serializing node (\w+) in graph.*Unimplemented graph input type: (\S+)",
        "The program ignores its input {0} ({1}), and a file cannot store an ignored input. Keep the value in "
        "the module, or make it static data of its object:",
        'field: object = dataclasses.field(metadata={{"static": True}})',
        "{0}",
    ),
    fixed(
        r"but the input is of type <class '([^']+)'>\. We cannot vmap over non-Tensor",
        "torch.vmap accepts tensors only, and a leaf is a {0}. Give the axes in the structure of the input, "
        "with None for leaves that are not tensors:",
        "in_dims=(torch.utils._pytree.tree_map(lambda x: 0 if isinstance(x, torch.Tensor) else None, input),)",
    ),
    fixed(
        r"passed to transform API must be Tensor, got <class '([^']+)'>",
        "torch.func differentiates with respect to tensors only, and a leaf is a {0}. Pass the tensors, and "
        "rebuild the object in the function:",
        "torch.func.grad(lambda x: function(dataclasses.replace(obj, x=x)))(obj.x)",
    ),
    fixed(
        r"functorch tensor|Expected Fake|no attribute 'constant'|constant's list|\.numpy\(\) is not supported",
        "forward uses torch.func, .data or .numpy(), which a trace does not follow. Use torch.autograd, in-place "
        "writes and torch functions:",
        "with torch.enable_grad():\n    (gradient,) = torch.autograd.grad(model(x).sum(), x)\n"
        "with torch.no_grad():\n    tensor.mul_(2)",
    ),
    fixed(
        r"No conversion rule .*sym_(?:max|min)",
        "OpenVINO cannot convert the size computations of this program. Convert its ONNX file:",
        'export_onnx(module, args, kwargs, path="model.onnx")\nopenvino.convert_model("model.onnx")',
    ),
    *LAST_ROWS,
]
