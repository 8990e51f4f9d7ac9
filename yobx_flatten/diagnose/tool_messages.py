"""Explain error messages of tools around ``torch.export``: the old tracer, ``vmap``, stored programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from ..trees.walk import class_name, torch_leaves
from .explanation import Explanation, Failure, Row
from .opaque import find_unregistered


def _leaves(failure: Failure) -> list[tuple[str, Any]]:
    return [item for name, value in failure.inputs().items() for item in torch_leaves(value, name)]


def _tensors(failure: Failure) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in _leaves(failure) if isinstance(leaf, torch.Tensor)]


def _fixed(text: str, line: str) -> Callable[[Failure, re.Match[str]], Explanation]:
    """The same words for whatever was found."""
    return lambda failure, found: Explanation(text, (), line)


def _old_tracer(failure: Failure, found: re.Match[str]) -> Explanation:
    others = [one for name, value in failure.inputs().items() for one in find_unregistered(value, name=name)]
    paths = tuple(one.path for one in others if one.inside is None)
    what = f" ({paths[0]} is a {class_name(others[0].cls)})" if paths else ""
    return Explanation(
        "The old tracer (torch.jit.trace, torch.onnx.export(dynamo=False)) takes tensors in lists, tuples and dicts, "
        f"and does not look at registrations{what}. Let torch.export trace it:",
        paths,
        'export_onnx(module, args, kwargs, path="model.onnx")',
    )


def _other_structure(failure: Failure, found: re.Match[str]) -> Explanation:
    others = [one for name, value in failure.inputs().items() for one in find_unregistered(value, name=name)]
    text = "The unflattened program was called with inputs of another structure than it was exported with."
    if not others:
        return Explanation(
            f"{text} Call it as it was exported, and where its classes are registered:",
            (),
            "with register_flattening_functions(patch_transformers=True):\n    module(*args, **kwargs)",
        )
    return Explanation(
        f"{text} {others[0].path} is a {class_name(others[0].cls)}, which is not registered here. Unflatten the "
        "program, and call it, where it is:",
        (others[0].path,),
        others[0].remedy,
    )


def _devices(failure: Failure, found: re.Match[str]) -> Explanation:
    module = failure.module
    held = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    devices = {str(tensor.device) for tensor in held}
    if len(devices) != 1:
        places = f": the module has weights on {', '.join(sorted(devices))}" if devices else ""
        return Explanation(
            f"Tensors that meet are on several devices{places}. Move all to one:", (), "module.to(device)"
        )
    (device,) = devices
    if device == "meta":
        return _without_data(failure, found)
    paths = tuple(path for path, tensor in _tensors(failure) if str(tensor.device) != device)
    what = f"{', '.join(paths[:3])} {'is' if len(paths) == 1 else 'are'} elsewhere" if paths else "others are elsewhere"
    return Explanation(
        f"The weights are on {device}, and {what}. Move the inputs:",
        paths,
        f"torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to({device!r}), inputs)",
    )


def _without_data(failure: Failure, found: re.Match[str]) -> Explanation:
    return Explanation(
        "Weights on the meta device, and offloaded ones, have no data, and to compare the program with the module "
        "both have to run. Load the weights, or trace without a proof, with inputs on the same device:",
        (),
        "torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes(kwargs))",
    )


def _nested(failure: Failure, found: re.Match[str]) -> Explanation:
    paths = tuple(path for path, tensor in _tensors(failure) if tensor.is_nested)
    return Explanation(
        f"{paths[0] if paths else 'An input'} is a nested tensor, which torch.export does not take. Pass its rows "
        "filled up to one length, and a mask of their lengths:",
        paths,
        f"torch.nested.to_padded_tensor({paths[0] if paths else 'tensor'}, 0.0)",
    )


def _module_among_inputs(failure: Failure, found: re.Match[str]) -> Explanation | None:
    paths = tuple(path for path, leaf in _leaves(failure) if isinstance(leaf, torch.nn.Module))
    if not paths:
        return None
    return Explanation(
        f"{paths[0]} is a module among the inputs, where torch.export takes no dynamic shapes. Make it a submodule:",
        paths,
        "self.part = part",
    )


def _not_storable(failure: Failure, found: re.Match[str]) -> Explanation:
    name, value = found[1], found[2]
    return Explanation(
        f"The program takes {name}, here {value}, which a file has no place for; the program itself ignores what a "
        "call passes there. Keep it in the module, or let it be static data of the object that holds it:",
        (name,),
        'field: object = dataclasses.field(metadata={"static": True})',
    )


def _no_tensor_for_vmap(failure: Failure, found: re.Match[str]) -> Explanation:
    return Explanation(
        f"torch.vmap takes tensors only, and a leaf is a {found[1]}. Give the axes in the form of the "
        "input, with None for what is not a tensor:",
        (),
        "in_dims=(torch.utils._pytree.tree_map(lambda x: 0 if isinstance(x, torch.Tensor) else None, input),)",
    )


def _no_tensor_for_grad(failure: Failure, found: re.Match[str]) -> Explanation:
    return Explanation(
        f"torch.func differentiates by tensors only, and a leaf is a {found[1]}. Differentiate by the "
        "tensors, and put the object together inside:",
        (),
        "torch.func.grad(lambda x: function(dataclasses.replace(obj, x=x)))(obj.x)",
    )


OTHER_ROWS: list[Row] = [
    (r"are supported as JIT inputs/outputs", _old_tracer),
    (r"are supported as inputs or outputs of traced functions", _old_tracer),
    (r"cannot be traced\. Only Tensors and \(possibly nested\)", _old_tracer),
    (r"There is no flat args adapter specified", _other_structure),
    (
        r"We ran into an error when deserializing the saved file",
        _fixed(
            "The stored program cannot be read; a warning states why, most often a class that is not registered "
            "in this process. Load it where the class is:",
            "with register_flattening_functions(patch_transformers=True):\n"
            '    program = torch.export.load("model.pt2")',
        ),
    ),
    (
        r"^cannot pickle 'module' object",
        _fixed(
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
        _fixed(
            "OpenVINO has no rule for the sizes of a program with caches. Convert the ONNX file:",
            'export_onnx(module, args, kwargs, path="model.onnx")\nopenvino.convert_model("model.onnx")',
        ),
    ),
]
