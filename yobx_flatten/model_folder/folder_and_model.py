"""Find the node at which an exported folder differs from its model; add a LoRA adapter to an exported folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Literal

import torch

from ..core.files.document import inside, read_onnx
from ..core.files.scratch import check_writable, copy_links, publish_folder, scratch_for
from ..errors import DamagedFileError, FolderExistsError, InvalidArgumentError, ReplayError
from ..errors.failures import table
from ..export.onnx.compare_nodes import Compared, compare_nodes
from ..export.onnx.rewrite.group_query_attention import shared_inputs
from ..export.proof.eager_runs import sampled
from ..generate.settings import MANIFEST, located
from ..registry.recipe.aliases import TransformersModel
from ..runners.adapters import ADAPTERS, adapter_names, check_matrices, leave_room, rooms_of_files
from ..runners.open import open_runner
from ..runners.ports import FIRST, SECOND
from ..storage.cases import load_case
from .export_piece import FolderOptions, export_piece
from .manifest import FolderManifest, StoredAdapter, check_folder, read_manifest, write_manifest
from .pieces.tasks import GENERATES, pieces_for
from .pieces.text import Piece, Split
from .source.adapter import read_adapters
from .source.find import find_model, without_peft
from .stored_cases import CASES, SAMPLED_TOKENS, store_generation, store_piece
from .verify import FolderCheck, check_adapter
from .write import write_matrices


@dataclasses.dataclass(frozen=True)
class FolderExplanation:
    """For each file of a folder, the first node whose value differs from that in the model; ``print`` shows the nodes.

    Attributes:
        path: the folder.
        files: the comparisons by file name and test case name. No test case of a file runs after one that differs.
    """

    path: pathlib.Path
    files: Mapping[tuple[str, str], Compared]

    @property
    def ok(self) -> bool:
        """Whether all compared nodes of the folder's files have the same values as in the model."""
        return all(one.first is None for one in self.files.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        equal = "none of {} values differs from the model's."
        found = {place: one.first or equal.format(one.values) for place, one in self.files.items()}
        return "\n".join(f"{file}, {case}: {what}" for (file, case), what in found.items())


def explain_folder(
    folder: str | os.PathLike[str], model: TransformersModel | str | os.PathLike[str]
) -> FolderExplanation:
    """Find, in each file of an exported folder, the first node whose value differs from the value in the model.

    The model is exported again to temporary files, and the outputs of these files are compared with the outputs of the
    model. For each stored test case, the value of each node in a file of the folder is then compared with the value of
    the same node in the temporary file.

    Args:
        folder: a folder of ONNX files as :func:`export_folder` writes it.
        model: the model that the folder was exported from, or the name of this model.

    Returns:
        For each file and test case, the first node whose value differs, with its operator, its line in the model's
        code, both values, and the weights that differ from the model's.

    Raises:
        ForeignFileError: when ``folder`` does not exist, or :func:`export_folder` did not write it.
        InvalidArgumentError: when the folder is not for onnxruntime, has quantised weights, or is for another model.
        DamagedFileError: when a file cannot be read or run.
        FlattenError: when the model cannot be exported again.
    """
    path = check_folder(folder)
    manifest = read_manifest(path)
    if manifest.runtime != "onnxruntime" or manifest.quality:
        raise InvalidArgumentError(
            f"{path} is {'quantized' if manifest.quality else f'for {manifest.runtime}'}, but only ONNX files with "
            "unquantized weights can be compared node by node. Export to ONNX without quantize=, and pass that folder."
        )
    if not manifest.cases:
        raise InvalidArgumentError(f'{path} contains no test cases: export again without proof="none".')
    found: dict[tuple[str, str], Compared] = {}
    base = load_model(model, manifest)
    inputs = rooms_of_files(path)
    # the layers accept the same adapter inputs as the exported files
    rooms = {
        layer: (inputs[f"{layer}.{FIRST}"].shape[0] or 0, inputs[f"{layer}.{SECOND}"].shape[1] or 0)
        for layer in {name.rpartition(".")[0] for name in inputs}
    }
    with tempfile.TemporaryDirectory() as scratch, leave_room(base, rooms):
        pieces, rows = pieces_of_folder(base, path, manifest)
        for piece in pieces:
            name = f"{piece.stem}.onnx"
            file, right = located(path, name), pathlib.Path(scratch) / name
            opsets = read_onnx(file, failure=DamagedFileError).opset_import
            version = next(one.version for one in opsets if one.domain in ("", "ai.onnx"))
            optimize: Literal["onnxruntime"] | None = "onnxruntime" if shared_inputs(file) else None
            options = FolderOptions(batch=rows, opset_version=version, optimize=optimize)
            export_piece(type(base).__qualname__, piece, right, options, "sample")
            for stored in manifest.cases.get(name, []):
                case = load_case(inside(path, stored, DamagedFileError))
                found[name, case.name] = compare_nodes(file, right, case.inputs)
                if found[name, case.name].first is not None:
                    break  # other cases most likely differ at the same node
    return FolderExplanation(path, found)


def load_model(given: TransformersModel | str | os.PathLike[str], manifest: FolderManifest) -> TransformersModel:
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
    """Return the pieces (module, example inputs, a test case) of all files, and the batch size if it is fixed."""
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
            f"{type(model).__qualname__} is not the model of this folder ({manifest.model}): only one of these "
            f"two models is exported to a file {missing[0]}. Pass the model that was exported: model=FOLDER"
        )
    return pieces, rows


@dataclasses.dataclass(frozen=True)
class AddedAdapter:
    """The result of :func:`add_adapter`: the name of the adapter, and comparisons with PEFT.

    Attributes:
        path: the folder.
        name: name of the LoRA adapter that was added.
        checks: for each test case, the comparison of the folder's files with PEFT.
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
        folder: a folder that ``export_folder(..., adapters=...)`` wrote. If that call passed adapters, the new adapter
            can change only layers that one of the passed adapters changes. After a call with ``adapters={}``, the new
            adapter can change all linear layers except ``model.get_output_embeddings()``.
        name: name of the new adapter; ``generate(adapter=NAME)`` runs the model with the adapter of this name.
        adapter: the folder of the adapter, which PEFT wrote.
        model: the model that the folder was exported from, or the model's name; by default the adapter's base model.
        overwrite: whether to replace an adapter of the same name; ``False`` by default.

    Returns:
        The name of the adapter, and the comparison with PEFT for each test case.

    Raises:
        ForeignFileError: when ``folder`` does not exist, or :func:`export_folder` did not write it.
        InvalidArgumentError, ModelSourceError: when the adapter or the model does not fit the folder.
        DamagedFileError: when the files have no inputs for the adapter, or a file is damaged.
        FolderExistsError: when the folder has an adapter of the same name, and ``overwrite`` is ``False``.
        ReplayError: when the files and PEFT compute different values, in which case nothing is written.
        MissingDependencyError: when peft or transformers is not installed.
    """
    path = pathlib.Path(folder).resolve()
    manifest = read_manifest(path)
    rooms = rooms_of_files(path)
    if manifest.runtime != "onnxruntime" or not rooms:
        raise InvalidArgumentError(
            f"{path} was exported without adapters, so none can be added. Export the model with the adapter:\n    "
            f"export_folder(model, folder, adapters={{{name!r}: {os.fspath(adapter)!r}}})   (--adapter NAME=FOLDER)"
        )
    if name in adapter_names(path) and not overwrite:
        raise FolderExistsError(f"{path} already has adapter {name!r}. Choose another name, or pass overwrite=True.")
    check_writable(path)
    base = load_model(adapter if model is None else model, manifest)
    (found,) = read_adapters(base, {name: adapter})
    check_matrices(found.matrices, rooms, os.fspath(adapter))
    # matrices, cases and manifest must match: the whole folder is replaced at once
    with scratch_for(path) as work:
        copy_links(path, work)
        below = f"{CASES}/{ADAPTERS}/{name}"
        shutil.rmtree(work / below, ignore_errors=True)
        for written in (MANIFEST, f"{ADAPTERS}/{name}.safetensors", f"{ADAPTERS}/{name}.onnx_adapter"):
            (work / written).unlink(missing_ok=True)  # writing to a hard link would change the original folder
        stored: dict[str, list[str]] = {}
        pieces, rows = pieces_of_folder(base, path, manifest)
        with found.active():
            for piece in pieces:
                file = f"{piece.stem}.onnx"
                texts = [load_case(path / case) for case in manifest.cases.get(file, []) if "-text-" in case]
                tokens = torch.cat([case.outputs["text"] for case in texts]) if texts else None
                stored[file] = store_piece(piece, sampled(piece.cases), tokens, work, below)
            if manifest.task in GENERATES:
                stored[""] = [store_generation(base, manifest.task, rows, SAMPLED_TOKENS, work, below=below)]
        checks = check_adapter(path, found, stored, work)
        done = AddedAdapter(pathlib.Path(folder), name, tuple(checks))
        if not all(check.ok for check in checks):
            raise ReplayError(f"Adapter {name!r}: files and PEFT return different values. Nothing was written.\n{done}")
        write_matrices(work, [found])
        quality = {check.file: check.quality for check in checks if check.quality is not None}
        adapters = {**manifest.adapters, name: StoredAdapter(stored, quality)}
        write_manifest(work, dataclasses.replace(manifest, adapters=adapters))
        publish_folder(work, path)
    return done
