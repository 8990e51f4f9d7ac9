"""Add an adapter to an exported folder whose files have inputs for adapters, without a new export."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence

import torch

from ..errors import FolderExistsError, InvalidArgumentError, ReplayError
from ..errors.failures import table
from ..export.proof.eager_runs import sampled
from ..files.document import write_tensor_file
from ..files.scratch import check_writable, copy_links, publish_folder, scratch_for
from ..generate.layout import MANIFEST
from ..recipe.aliases import TransformersModel
from ..runners.adapters import ADAPTERS, Adapter, adapter_names, check_matrices
from ..runners.folder_adapters import rooms_of_files
from ..runners.ports import ELEMENTS
from ..storage.cases import load_case
from .explain import load_model, pieces_of_folder
from .manifest import FolderManifest, StoredAdapter, read_manifest, write_manifest
from .pieces.tasks import GENERATES
from .source.adapter import read_adapters
from .stored_cases import CASES, SAMPLED_TOKENS, store_generation, store_piece
from .verify import FolderCheck, check_adapter


@dataclasses.dataclass(frozen=True)
class AddedAdapter:
    """The result of :func:`add_adapter`: the name of the adapter, and the comparisons with PEFT.

    Attributes:
        path: the folder.
        name: name of the adapter.
        checks: one result per test case.
    """

    path: pathlib.Path
    name: str
    checks: tuple[FolderCheck, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.path}: {self.name}", *table(check.cells() for check in self.checks)])


def add_adapter(
    folder: str | os.PathLike[str],
    name: str,
    adapter: str | os.PathLike[str],
    *,
    model: TransformersModel | str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> AddedAdapter:
    """Add a LoRA adapter to an exported folder, and check that its files compute the same values as PEFT.

    Args:
        folder: a folder that ``export_folder(..., adapters=...)`` wrote. The folder has room in the layers that its
            first adapters change, or in all linear layers if ``adapters={}`` was passed.
        name: name of the adapter, by which callers select it.
        adapter: the folder that PEFT wrote.
        model: the model that the folder was exported from, or the model's name; by default the adapter's base model.
        overwrite: whether to replace an adapter of that name; ``False`` by default.

    Returns:
        One result for each test case that was compared.

    Raises:
        ForeignFileError: when there is no such folder, or :func:`export_folder` did not write it.
        InvalidArgumentError, ModelSourceError: when the adapter or the model does not fit the folder.
        DamagedFileError: when the files have no inputs for the adapter, or a file is damaged.
        FolderExistsError: when the folder has an adapter of that name.
        ReplayError: when the files and PEFT compute different values; nothing is written then.
        MissingDependencyError: when peft or transformers is not installed.
    """
    path = pathlib.Path(folder).resolve()
    manifest = read_manifest(path)
    rooms = rooms_of_files(path)
    if manifest.runtime != "onnxruntime" or not rooms:
        raise InvalidArgumentError(
            f"The files of {path} have no inputs for adapters. Export the model with the adapter:\n    "
            f"export_folder(model, folder, adapters={{{name!r}: {os.fspath(adapter)!r}}})   (--adapter NAME=FOLDER)"
        )
    if name in adapter_names(path) and not overwrite:
        raise FolderExistsError(f"{path} has an adapter {name!r}. Choose another name, or pass overwrite=True.")
    check_writable(path)
    base = load_model(adapter if model is None else model, manifest)
    (found,) = read_adapters(base, {name: adapter})
    check_matrices(found.matrices, rooms, os.fspath(adapter))
    # matrices, cases and manifest must match: the whole folder is replaced at once
    with scratch_for(path) as work:
        copy_links(path, work)
        cases = work / CASES / ADAPTERS / name
        shutil.rmtree(cases, ignore_errors=True)
        cases.mkdir(parents=True)
        for written in (MANIFEST, f"{ADAPTERS}/{name}.safetensors", f"{ADAPTERS}/{name}.onnx_adapter"):
            (work / written).unlink(missing_ok=True)  # writing to a hard link would change the original folder
        stored = _stored(base, path, manifest, found, cases)
        checks = check_adapter(path, manifest, name, dict(found.matrices), stored, cases)
        done = AddedAdapter(pathlib.Path(folder), name, tuple(checks))
        if not all(check.ok for check in checks):
            raise ReplayError(f"With the adapter, the files compute different values than PEFT.\n{done}")
        write_matrices(work, [found])
        paths = {file: [f"{CASES}/{ADAPTERS}/{name}/{case}" for case in found] for file, found in stored.cases.items()}
        quality = {check.file: check.quality for check in checks if check.quality is not None}
        adapters = {**manifest.adapters, name: StoredAdapter(paths, quality)}
        write_manifest(work, dataclasses.replace(manifest, adapters=adapters))
        publish_folder(work, path)
    return done


def _stored(
    model: TransformersModel, folder: pathlib.Path, manifest: FolderManifest, adapter: Adapter, work: pathlib.Path
) -> StoredAdapter:
    cases: dict[str, list[str]] = {}
    pieces, rows = pieces_of_folder(model, folder, manifest)
    with adapter.active():
        for piece in pieces:
            name = f"{piece.stem}.onnx"
            texts = [load_case(folder / case) for case in manifest.cases.get(name, []) if "-text-" in case]
            tokens = torch.cat([case.outputs["text"] for case in texts]) if texts else None
            cases[name] = store_piece(piece, sampled(piece.cases), tokens, work, ".")
        if manifest.task in GENERATES:
            cases[""] = [store_generation(model, manifest.task, rows, SAMPLED_TOKENS, work, below=".")]
    return StoredAdapter({name: [pathlib.PurePosixPath(one).name for one in paths] for name, paths in cases.items()})


def write_matrices(folder: pathlib.Path, adapters: Sequence[Adapter]) -> None:
    """Write the matrices of adapters into an exported folder, for this package and for onnxruntime-genai."""
    rooms = rooms_of_files(folder) if adapters else {}
    for adapter in adapters:
        check_matrices(adapter.matrices, rooms, f"The adapter {adapter.name!r}")
        place = folder / ADAPTERS
        place.mkdir(exist_ok=True)
        write_tensor_file(place / f"{adapter.name}.safetensors", adapter.matrices)
        if (folder / "genai_config.json").is_file():
            _write_for_genai(place / f"{adapter.name}.onnx_adapter", adapter.matrices)


def _write_for_genai(path: pathlib.Path, matrices: Mapping[str, torch.Tensor]) -> None:
    import onnxruntime

    def value(matrix: torch.Tensor) -> onnxruntime.OrtValue:
        if matrix.dtype == torch.bfloat16:
            bits = matrix.view(torch.uint16).numpy()
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, ELEMENTS["bfloat16"].code)
        return onnxruntime.OrtValue.ortvalue_from_numpy(matrix.numpy())

    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(1)
    form.set_model_version(1)
    form.set_parameters({name: value(matrix) for name, matrix in matrices.items()})
    form.export_adapter(str(path))
