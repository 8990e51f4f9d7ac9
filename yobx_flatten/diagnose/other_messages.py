"""Messages of the tools around ``torch.export``: the old tracer, ``vmap``, unflattened and stored programs, devices.

A row of the table has the words that a message keeps from version to version, and a function that states what it means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..trees.walk import class_name, torch_leaves
from .opaque import find_unregistered

__all__ = ["Meaning", "meaning_of"]

Inputs = Mapping[str, Any]


class Meaning(NamedTuple):
    """What a message means, the inputs it is about, and what to type."""

    text: str
    paths: tuple[str, ...]
    line: str


def meaning_of(message: str, module: Any, inputs: Inputs) -> Meaning | None:
    """Say what a message means.

    Args:
        message: the text of the error.
        module: what was exported or called, if it is known.
        inputs: what it was given, by name.

    Returns:
        The meaning, ``None`` for other messages.
    """
    for pattern, explain in _TABLE:
        found = re.search(pattern, message, re.DOTALL)
        if found is not None:
            return explain(found, module, inputs)
    return None


def _tensors(inputs: Inputs) -> list[tuple[str, torch.Tensor]]:
    leaves = [item for name, value in inputs.items() for item in torch_leaves(value, name)]
    return [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]


def _said(text: str, line: str) -> Callable[[re.Match[str], Any, Inputs], Meaning]:
    """The same words for whatever was found."""
    return lambda found, module, inputs: Meaning(text, (), line)


def _old_tracer(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    others = [one for name, value in inputs.items() for one in find_unregistered(value, name=name)]
    paths = tuple(one.path for one in others if one.inside is None)
    what = f" ({paths[0]} is a {class_name(others[0].cls)})" if paths else ""
    return Meaning(
        "The old tracer (torch.jit.trace, torch.onnx.export(dynamo=False)) takes tensors in lists, tuples and dicts, "
        f"and does not look at registrations{what}. Let torch.export trace it:",
        paths,
        'export_onnx(module, args, kwargs, path="model.onnx")',
    )


def _other_structure(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    others = [one for name, value in inputs.items() for one in find_unregistered(value, name=name)]
    text = "The unflattened program was called with inputs of another structure than it was exported with."
    if not others:
        return Meaning(
            f"{text} Call it as it was exported, and where its classes are registered:",
            (),
            "with register_flattening_functions(patch_transformers=True):\n    module(*args, **kwargs)",
        )
    return Meaning(
        f"{text} {others[0].path} is a {class_name(others[0].cls)}, which is not registered here. Unflatten the "
        "program, and call it, where it is:",
        (others[0].path,),
        others[0].remedy,
    )


def _devices(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    held = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    devices = {str(tensor.device) for tensor in held}
    if len(devices) != 1:
        places = f": the module has weights on {', '.join(sorted(devices))}" if devices else ""
        return Meaning(f"Tensors that meet are on several devices{places}. Move all to one:", (), "module.to(device)")
    (device,) = devices
    if device == "meta":
        return _without_data(found, module, inputs)
    paths = tuple(path for path, tensor in _tensors(inputs) if str(tensor.device) != device)
    what = f"{', '.join(paths[:3])} {'is' if len(paths) == 1 else 'are'} elsewhere" if paths else "others are elsewhere"
    return Meaning(
        f"The weights are on {device}, and {what}. Move the inputs:",
        paths,
        f"torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to({device!r}), inputs)",
    )


def _without_data(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    return Meaning(
        "Weights on the meta device, and offloaded ones, have no data, and to compare the program with the module "
        "both have to run. Load the weights, or trace without a proof, with inputs on the same device:",
        (),
        "torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes(kwargs))",
    )


def _nested(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    paths = tuple(path for path, tensor in _tensors(inputs) if tensor.is_nested)
    return Meaning(
        f"{paths[0] if paths else 'An input'} is a nested tensor, which torch.export does not take. Pass its rows "
        "filled up to one length, and a mask of their lengths:",
        paths,
        f"torch.nested.to_padded_tensor({paths[0] if paths else 'tensor'}, 0.0)",
    )


def _module_among_inputs(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning | None:
    leaves = [item for name, value in inputs.items() for item in torch_leaves(value, name)]
    paths = tuple(path for path, leaf in leaves if isinstance(leaf, torch.nn.Module))
    if not paths:
        return None
    return Meaning(
        f"{paths[0]} is a module among the inputs, where torch.export takes no dynamic shapes. Make it a submodule:",
        paths,
        "self.part = part",
    )


def _not_storable(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    name, value = found[1], found[2]
    return Meaning(
        f"The program takes {name}, here {value}, which a file has no place for; the program itself ignores what a "
        "call passes there. Keep it in the module, or let it be static data of the object that holds it:",
        (name,),
        'field: object = dataclasses.field(metadata={"static": True})',
    )


def _no_tensor_for_vmap(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    return Meaning(
        f"torch.vmap takes tensors only, and a leaf is a {found[1]}. Give the axes in the form of the "
        "input, with None for what is not a tensor:",
        (),
        "in_dims=(torch.utils._pytree.tree_map(lambda x: 0 if isinstance(x, torch.Tensor) else None, input),)",
    )


def _no_tensor_for_grad(found: re.Match[str], module: Any, inputs: Inputs) -> Meaning:
    return Meaning(
        f"torch.func differentiates by tensors only, and a leaf is a {found[1]}. Differentiate by the "
        "tensors, and put the object together inside:",
        (),
        "torch.func.grad(lambda x: function(dataclasses.replace(obj, x=x)))(obj.x)",
    )


_TABLE: list[tuple[str, Callable[[re.Match[str], Any, Inputs], Meaning | None]]] = [
    (r"are supported as JIT inputs/outputs", _old_tracer),
    (r"are supported as inputs or outputs of traced functions", _old_tracer),
    (r"cannot be traced\. Only Tensors and \(possibly nested\)", _old_tracer),
    (r"There is no flat args adapter specified", _other_structure),
    (
        r"We ran into an error when deserializing the saved file",
        _said(
            "The stored program cannot be read; a warning states why, most often a class that is not registered "
            "in this process. Load it where the class is:",
            "with register_flattening_functions(patch_transformers=True):\n"
            '    program = torch.export.load("model.pt2")',
        ),
    ),
    (
        r"^cannot pickle 'module' object",
        _said(
            "torch.save writes pickles of version 2, which have no place for torch.channels_last and other memory "
            "formats, here among the example inputs. Take a newer version:",
            'torch.export.save(program, "model.pt2", pickle_protocol=4)',
        ),
    ),
    (r"to be on the same device, but found at least two devices", _devices),
    (r"Tensor on device \S+ is not on the expected device", _devices),
    (r"cannot be called on meta tensors|Cannot copy out of meta tensor", _without_data),
    (r"NestedTensorImpl doesn't support|strided NestedTensor|'NestedIntNode' object", _nested),
    (r"expected \d+ shapes, got \d+", _module_among_inputs),
    (r"Failed serializing node (\w+) in graph.*Unimplemented graph input type: (\S+)", _not_storable),
    (r"but the input is of type <class '([^']+)'>\. We cannot vmap over non-Tensor", _no_tensor_for_vmap),
    (r"passed to transform API must be Tensor, got <class '([^']+)'>", _no_tensor_for_grad),
    (
        r"No conversion rule .*sym_(?:max|min)",
        _said(
            "OpenVINO has no rule for the sizes of a program with caches. Convert the ONNX file:",
            'export_onnx(module, args, kwargs, path="model.onnx")\nopenvino.convert_model("model.onnx")',
        ),
    ),
]
