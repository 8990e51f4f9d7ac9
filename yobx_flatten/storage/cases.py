"""Store inputs with their expected outputs in one file."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..errors import DamagedFileError, describe_class
from ..recipe.aliases import Device, PyTree
from .nested import read
from .onnx_write import save
from .structure import flatten_tree


@dataclasses.dataclass(frozen=True)
class StoredCase:
    """Inputs and their expected outputs.

    Attributes:
        inputs: nested inputs: keyword arguments by name, or positional ones.
        outputs: nested outputs.
        name: short description of the case; empty by default.
    """

    inputs: Any
    outputs: Any
    name: str = ""


def save_case(
    path: str | os.PathLike[str], inputs: PyTree, outputs: PyTree, *, name: str = "", external_data: bool | None = None
) -> int:
    """Store inputs and expected outputs in a file, as :func:`save_nested` stores values.

    Args:
        path: the file to write.
        inputs: nested inputs: a dict of keyword arguments, which are found by name in a model, or a tuple.
        outputs: what a module returned for them.
        name: short description of the case; empty by default.
        external_data: see :func:`save_nested`.

    Returns:
        The number of bytes written.

    Raises:
        FlattenError: see :func:`save_nested`.

    >>> import tempfile
    >>> import torch
    >>> linear = torch.nn.Linear(3, 2)
    >>> x = torch.ones(4, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nbytes = save_case(f"{folder}/case.onnx", {"input": x}, linear(x).detach(), name="four rows")
    ...     load_case(f"{folder}/case.onnx").name
    'four rows'
    """
    case = {"inputs": inputs, "outputs": outputs, "name": name}
    return save(path, flatten_tree(case), function="save_case", content="case", external_data=external_data)


def load_case(path: str | os.PathLike[str], *, device: Device = "cpu") -> StoredCase:
    """Read what :func:`save_case` stored.

    Args:
        path: the file.
        device: device of the tensors; ``"cpu"`` by default.

    Returns:
        The inputs, the outputs and the name of the case.

    Raises:
        FlattenError: see :func:`load_nested`.

    >>> import tempfile
    >>> import torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     nbytes = save_case(f"{folder}/case.onnx", {"x": torch.arange(3)}, torch.arange(3) * 2, name="doubled")
    ...     case = load_case(f"{folder}/case.onnx")
    >>> case.inputs, case.outputs
    ({'x': tensor([0, 1, 2])}, tensor([0, 2, 4]))
    """
    found = read(path, "load_case", device=device, content="case")
    if not isinstance(found, dict) or set(found) != {"inputs", "outputs", "name"}:
        raise DamagedFileError(f"{os.fspath(path)} is damaged: it holds no inputs and outputs.")
    if not isinstance(found["name"], str):
        kind = describe_class(found["name"])
        raise DamagedFileError(f"{os.fspath(path)} is damaged: the name of the case is {kind}.")
    return StoredCase(**found)
