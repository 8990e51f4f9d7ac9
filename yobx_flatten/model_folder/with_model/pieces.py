"""Find the modules that the files of a folder were exported from, by the model and the folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from ...errors import InvalidArgumentError
from ...generate.layout import located
from ...recipe.aliases import TransformersModel
from ...runners.open import open_runner
from ...runners.runner import Runner
from ..manifest import FolderManifest
from ..pieces.tasks import pieces_for
from ..pieces.text import Piece
from ..source.classes import without_peft
from ..source.find import find_model


def load_model(given: TransformersModel | str | os.PathLike[str], manifest: FolderManifest) -> TransformersModel:
    """Return the model of a folder without adapters, in the type of the files."""
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
    """Return the modules that the files are of, with their example and one case, and the rows they are fixed to."""
    runners = {name: open_runner(located(folder, name), caller="pieces_of_folder") for name in manifest.files}
    rows = _rows(runners.values())
    return _pieces(model, manifest, runners, rows), rows


def _rows(runners: Iterable[Runner]) -> int | None:
    """The number of rows that files are fixed to; ``None`` where they take any."""
    sizes = {port.shape[0] for runner in runners for port in runner.ports.values() if port.shape}
    return next(iter(sizes)) if len(sizes) == 1 else None


def _pieces(
    model: TransformersModel, manifest: FolderManifest, runners: dict[str, Runner], rows: int | None
) -> list[Piece]:
    of_last = any("logits" in getattr(runner, "of_last", ()) for runner in runners.values())
    word_times = any(name.startswith("cross_attentions.") for runner in runners.values() for name in runner.outputs)
    asked: dict[str, Any] = {"whole_cache": manifest.cache == "shared", "logits": "last" if of_last else "all"}
    asked |= {"word_times": word_times, "for_genai": not {"encoder.onnx", "embedding.onnx"}.isdisjoint(runners)}
    _, pieces = pieces_for(model, manifest.task, rows, proof="sample", **asked)
    missing = sorted({f"{piece.stem}.onnx" for piece in pieces} ^ set(runners))
    if missing:
        raise InvalidArgumentError(
            f"{type(model).__qualname__} is not the model of this folder ({manifest.model}): {missing[0]} is of one of "
            "them only. Name the model that was exported: model=FOLDER"
        )
    return pieces
