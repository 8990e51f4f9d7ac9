"""Read and switch LoRA adapters, and add inputs for the matrices of an adapter to an exported ONNX file."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..core.files.document import read_onnx, read_tensors
from ..errors import DamagedFileError, GenerationError, InvalidArgumentError, require
from .onnx_runner import OnnxRunner
from .ports import FIRST, SECOND, Port, Runner

ADAPTERS = "adapters"
"""The subfolder of an exported folder that contains LoRA adapters."""

_SUFFIX = ".safetensors"


def adapter_names(folder: pathlib.Path) -> list[str]:
    return sorted(path.stem for path in (folder / ADAPTERS).glob(f"*{_SUFFIX}"))


def read_adapter(path: pathlib.Path, rooms: Mapping[str, Port]) -> dict[str, torch.Tensor]:
    # rooms: the optional inputs for LoRA matrices that the files of the folder have, by name
    require("safetensors", purpose="an adapter")
    found = read_tensors(path, failure=DamagedFileError)
    check_matrices(found, rooms, str(path))
    return found


def check_matrices(found: Mapping[str, torch.Tensor], rooms: Mapping[str, Port], where: str) -> None:
    for name, matrix in found.items():
        port = rooms.get(name)
        if port is None:
            layers = dict.fromkeys(room.rpartition(".")[0].rpartition(".")[2] for room in rooms)
            room = f"they accept adapters in {', '.join(layers)}" if layers else "they accept no adapters"
            raise DamagedFileError(
                f"{where} holds {name}, but the exported files have no such input: {room}. Export the model again "
                "with this adapter: export_folder(..., adapters={...}) (--adapter NAME=FOLDER)"
            )
        if matrix.dtype != port.dtype:
            raise DamagedFileError(f"{where}: {name} has the dtype {matrix.dtype}, but the files take {port.dtype}.")
        sizes = list(zip(matrix.shape, port.shape, strict=False))
        if matrix.ndim != 2 or any(size not in (None, given) for given, size in sizes):
            wanted = ", ".join("rank" if size is None else str(size) for size in port.shape)
            raise DamagedFileError(
                f"{where}: {name} has shape {tuple(matrix.shape)}, and the exported files take ({wanted}): the "
                "adapter is for a different model."
            )
    for name, matrix in found.items():
        room, _, which = name.rpartition(".")
        other = f"{room}.{SECOND if which == FIRST else FIRST}"
        if other not in found:
            raise DamagedFileError(f"{where} holds the LoRA matrix {name}, but not {other}.")
        if which == FIRST and matrix.shape[1] != found[other].shape[0]:
            raise DamagedFileError(
                f"{where}: {name} has a rank of {matrix.shape[1]}, but {other} has a rank of {found[other].shape[0]}."
            )


def rooms_of_files(folder: pathlib.Path) -> dict[str, Port]:
    """Return the optional inputs for LoRA matrices that the ONNX files in a folder have, by input name."""
    require("onnx", purpose="adapters of a folder", extra="onnx")
    found, types = {}, {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
    for path in sorted(folder.glob("*.onnx")):
        graph = read_onnx(path, failure=DamagedFileError).graph
        held = {tensor.name for tensor in graph.initializer}
        for value in graph.input:
            if value.name in held and value.name.endswith((f".{FIRST}", f".{SECOND}")):
                kind = value.type.tensor_type
                sizes = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
                found[value.name] = Port(value.name, sizes, types.get(kind.elem_type))
    return found


class FolderAdapters:
    """The LoRA adapters of an exported folder; an adapter is read from its file when it is first used."""

    # folder: the exported folder; `None` for files outside of an exported folder

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder
        self._read: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def names(self) -> Sequence[str]:
        return [] if self._folder is None else adapter_names(self._folder)

    def hold(self, name: str, matrices: dict[str, torch.Tensor]) -> None:
        """Add an adapter from memory, which takes precedence over an adapter file of the same name."""
        self._read[name] = matrices

    def runners(self, runners: Mapping[str, Runner], name: str) -> dict[str, Any]:
        onnx = {part: runner for part, runner in runners.items() if isinstance(runner, OnnxRunner)}
        for other in (runner for part, runner in runners.items() if part not in onnx):
            raise InvalidArgumentError(f"adapter={name!r} needs ONNX files in onnxruntime, found {other.runtime}.")
        if name not in self._read:
            if self._folder is None:
                raise InvalidArgumentError(f"adapter={name!r} needs an exported folder: open the folder, not the file.")
            there = adapter_names(self._folder)
            if name not in there:
                raise GenerationError(
                    f"{self._folder} has no adapter {name!r}; found: {', '.join(there) or 'none'}. To add an adapter:\n"
                    f"    yobx-flatten adapter {self._folder} NAME=FOLDER"
                )
            rooms = {key: port for runner in onnx.values() for key, port in runner.rooms.items()}
            self._read[name] = read_adapter(self._folder / ADAPTERS / f"{name}{_SUFFIX}", rooms)
        return {part: runner.with_adapter(self._read[name]) for part, runner in onnx.items()}


_MATRICES = (FIRST, SECOND)
_MARK = "_yobx_room"
_TRACED_RANK = 2  # of the matrices of a trace; torch fixes sizes of 1


# A projection adds a product with two matrices, which are optional inputs of the file.
#
#     x ──┬── projection ──────────────────────── Add ──> y     without these inputs both matrices have a rank of 0,
#         └── MatMul lora_A ── MatMul lora_B ──────┘            so that the product is zero
#             (rows, rank)     (rank, columns)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that both the exported file and the eager model use while their outputs are compared."""

    name: str
    matrices: Mapping[str, torch.Tensor]  # by name of the file's input
    active: Callable[[], contextlib.AbstractContextManager[object]]  # in this context the eager model uses the adapter


@contextlib.contextmanager
def leave_room(model: torch.nn.Module, sizes: Mapping[str, tuple[int, int]]) -> Iterator[None]:
    """In a ``with`` block, each projection in ``sizes`` adds its input times two LoRA matrices to its output."""
    # sizes: numbers of input and output features of each projection, by its name in the model
    generator = torch.Generator().manual_seed(0)
    changed: list[torch.nn.Module] = []
    try:
        for name, (rows, columns) in sizes.items():
            module = model.get_submodule(name)
            like = next(module.parameters())
            # passes over a graph would merge equal constants, so these are random
            first = torch.randn(rows, _TRACED_RANK, generator=generator).to(like.dtype)
            module.register_buffer(_MATRICES[0], first)
            module.register_buffer(_MATRICES[1], torch.zeros(_TRACED_RANK, columns, dtype=like.dtype))
            setattr(module, _MARK, name)
            module.forward = _adding(module, module.forward)
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward, module._buffers[_MATRICES[0]], module._buffers[_MATRICES[1]]
            delattr(module, _MARK)


def _adding(module: Any, own: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor, /) -> torch.Tensor:
        return own(x) + torch.matmul(torch.matmul(x, module.lora_A), module.lora_B)

    return forward


def rooms_in(module: torch.nn.Module) -> dict[str, str]:
    """Return a dict from each LoRA matrix's name in the module to the name of its input in the exported file."""
    marked = [(place, one) for place, one in module.named_modules(remove_duplicate=False) if hasattr(one, _MARK)]
    return {f"{place}.{one}": f"{getattr(owner, _MARK)}.{one}" for place, owner in marked for one in _MATRICES}
