"""Find the first node of an exported folder whose values differ from the values in the model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import DamagedFileError, InvalidArgumentError
from ..export.onnx.compare_nodes import Compared, compare_nodes
from ..export.onnx.rewrite.group_query_attention import shared_inputs
from ..files.document import inside, read_onnx
from ..generate.layout import located
from ..recipe.aliases import TransformersModel
from ..runners.adapters import FIRST, SECOND, leave_room
from ..runners.folder_adapters import rooms_of_files
from ..runners.open import open_runner
from ..storage.cases import load_case
from .export_piece import FolderOptions, export_piece
from .manifest import FolderManifest, check_folder, read_manifest
from .pieces.tasks import pieces_for
from .pieces.text import Piece, Split
from .source.classes import without_peft
from .source.find import find_model


@dataclasses.dataclass(frozen=True)
class FolderExplanation:
    """The first node at which the files of a folder compute a different value than the model; ``print`` shows the node.

    Attributes:
        path: the folder.
        files: the comparison for each file and case; after a case that differs, the file's other cases are left out.
    """

    path: pathlib.Path
    files: Mapping[tuple[str, str], Compared]

    @property
    def ok(self) -> bool:
        """Whether all values in the folder's files equal the values in the model."""
        return all(one.first is None for one in self.files.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = []
        for (file, case), one in self.files.items():
            if one.first is None:
                lines.append(f"{file}, {case}: none of {one.values} values differs from the model's.")
            else:
                lines.append(f"{file}, {case}: {one.first}")
        return "\n".join(lines)


def explain_folder(
    folder: str | os.PathLike[str], model: TransformersModel | str | os.PathLike[str]
) -> FolderExplanation:
    """Find the first node of a folder's files whose value differs from the value in the model.

    The model is exported again to a temporary file, which is checked. Both files then run on the stored cases, with the
    values of all their nodes as outputs.

    Args:
        folder: a folder of ONNX files as :func:`export_folder` writes it.
        model: the model that the folder was exported from, or the name of this model.

    Returns:
        For each file and case the first node that differs, in the order of execution, with its operator, the line of
        the model's code, both values, and the weights that differ from the weights of the model.

    Raises:
        ForeignFileError: when there is no such folder, or :func:`export_folder` did not write it.
        InvalidArgumentError: the folder is not for onnxruntime, has quantised weights, or is for a different model.
        DamagedFileError: when a file cannot be read or run.
        FlattenError: when the model cannot be exported here any more.
    """
    path = check_folder(folder)
    manifest = read_manifest(path)
    if manifest.runtime != "onnxruntime" or manifest.quality:
        raise InvalidArgumentError(
            f"{path} is {'quantised' if manifest.quality else f'for {manifest.runtime}'}, but only ONNX files with "
            "unquantized weights are compared by node. Export without quantize=, and explain that folder."
        )
    if not manifest.cases:
        raise InvalidArgumentError(f'{path} contains no test cases: export again without proof="none".')
    found: dict[tuple[str, str], Compared] = {}
    base = load_model(model, manifest)
    with tempfile.TemporaryDirectory() as scratch, _with_rooms(base, path):
        for name, right in _exported_again(base, path, manifest, pathlib.Path(scratch)):
            for stored in manifest.cases.get(name, []):
                case = load_case(inside(path, stored, DamagedFileError))
                found[name, case.name] = compare_nodes(located(path, name), right, case.inputs)
                if found[name, case.name].first is not None:
                    break  # other cases most likely differ at the same node
    return FolderExplanation(path, found)


def _exported_again(
    model: TransformersModel, folder: pathlib.Path, manifest: FolderManifest, scratch: pathlib.Path
) -> Iterator[tuple[str, pathlib.Path]]:
    """Yield the name of each file of the folder, and a new export of the same part of the model."""
    pieces, rows = pieces_of_folder(model, folder, manifest)
    for piece in pieces:
        name = f"{piece.stem}.onnx"
        options = FolderOptions(batch=rows, **_options_of(located(folder, name)))
        export_piece(type(model).__qualname__, piece, scratch / name, options, "sample")
        yield name, scratch / name


def _options_of(file: pathlib.Path) -> dict[str, Any]:
    opsets = read_onnx(file, failure=DamagedFileError).opset_import
    version = next(one.version for one in opsets if one.domain in ("", "ai.onnx"))
    return {"opset_version": version, "optimize": "onnxruntime" if shared_inputs(file) else None}


def _with_rooms(model: torch.nn.Module, folder: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """In a ``with`` block, let the layers accept the same optional adapter inputs as the exported files."""
    rooms = rooms_of_files(folder)
    layers = {name.rpartition(".")[0] for name in rooms}
    sizes = {
        layer: (rooms[f"{layer}.{FIRST}"].shape[0] or 0, rooms[f"{layer}.{SECOND}"].shape[1] or 0) for layer in layers
    }
    return leave_room(model, sizes)


def load_model(given: TransformersModel | str | os.PathLike[str], manifest: FolderManifest) -> TransformersModel:
    """Return the model of a folder without adapters, in the dtype of the files."""
    if not isinstance(given, (str, os.PathLike)):
        return without_peft(given)
    found = dataclasses.replace(find_model(os.fspath(given)), adapter=None)
    of_task = found.for_task(manifest.task)
    if manifest.model in (of_task.config.architectures or ()):
        found = of_task
    return found.load(dtype=manifest.dtype)


def pieces_of_folder(
    model: TransformersModel, folder: pathlib.Path, manifest: FolderManifest
) -> tuple[list[Piece], int | None]:
    """Return the module, the example and one test case of each file, and the batch size if it is fixed."""
    runners = {name: open_runner(located(folder, name), caller="pieces_of_folder") for name in manifest.files}
    sizes = {port.shape[0] for runner in runners.values() for port in runner.ports.values() if port.shape}
    rows = next(iter(sizes)) if len(sizes) == 1 else None
    of_last = any("logits" in getattr(runner, "of_last", ()) for runner in runners.values())
    split = Split(
        rows,
        whole_cache=manifest.cache == "shared",
        logits="last" if of_last else "all",
        proof="sample",
        word_times=any(name.startswith("cross_attentions.") for one in runners.values() for name in one.outputs),
        for_genai=not {"encoder.onnx", "embedding.onnx"}.isdisjoint(runners),
    )
    _, pieces = pieces_for(model, manifest.task, split)
    missing = sorted({f"{piece.stem}.onnx" for piece in pieces} ^ set(runners))
    if missing:
        raise InvalidArgumentError(
            f"{type(model).__qualname__} is not the model of this folder ({manifest.model}): only one of the two "
            f"models has {missing[0]}. Name the model that was exported: model=FOLDER"
        )
    return pieces, rows
