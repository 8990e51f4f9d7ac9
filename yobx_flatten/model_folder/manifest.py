"""Read and write ``yobx_flatten.json``, the file in an exported folder that describes the folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping

from ..core.compare import WEIGHT_TYPES, tolerance
from ..core.files.document import inside, open_regular, read_document
from ..core.files.scratch import is_folder
from ..errors import DamagedFileError, FlattenError, ForeignFileError, InvalidArgumentError, describe_class
from ..export.proof.quality import Quality
from ..generate.settings import MANIFEST
from ..runners.open import RUNTIMES

_VERSION = 3


@dataclasses.dataclass(frozen=True)
class StoredAdapter:
    """Test cases and measured quality (of quantized files) for one LoRA adapter; both dicts have file names as keys."""

    cases: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    quality: dict[str, Quality] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FolderManifest:
    """A description of an exported folder: the model, its files, the stored test cases, and how files were checked.

    Attributes:
        model: name of the class of the exported model.
        task: task of the model, such as ``"text-generation"``.
        format: format of the files: ``"onnx"``, ``"program"``, ``"aotinductor"``, ``"executorch"`` or ``"openvino"``.
        dtype: type of the weights, such as ``"float32"``.
        tolerance: largest allowed absolute difference between an output and the eager model's output.
        files: names of the exported files.
        cases: for each exported file, the paths of its test cases; the key ``""`` has the test cases of ``generate``.
        versions: versions of the libraries that wrote the folder, by name.
        proof: which checks ran before the folder was created: ``"full"``, ``"standard"``, ``"sample"`` or ``"none"``.
        quality: the measured quality of each file with quantised weights.
        cache: form of the decoder's key-value cache: ``"growing"``: each call returns a longer cache;
            ``"shared"``: calls may write into one buffer, for the layers that allow it; ``"in_place"``: the library
            that runs the file owns the cache and appends new tokens.
        runtime: the library that runs the files: ``"onnxruntime"``, ``"torch"``, ``"aotinductor"``, ``"executorch"`` or
            ``"openvino"``.
        sha256: SHA-256 digests of the files by name; empty if ``runtime`` is ``"onnxruntime"`` or ``"torch"``.
        rereads_at_switch: for models whose rotary angles change at a certain text length (RoPE types ``longrope`` and
            ``dynamic``), whether ``model.generate`` recomputes the whole KV cache at this length. ``None`` if the
            angles never change, or if this is unknown.
        positions: size of the model's table of position embeddings, in tokens; ``None`` if it has no such table.
        tolerances: for each file and output, the difference that rounding to ``dtype`` can cause; see
            :func:`export_onnx`. :func:`verify_folder` allows this difference up to a limit, which depends on the
            range of the output's values.
        adapters: the LoRA adapters with which the exported files were checked, by name.
    """

    model: str
    task: str
    format: str
    dtype: str
    tolerance: float
    files: list[str]
    cases: dict[str, list[str]]
    versions: dict[str, str]
    proof: str = "full"  # folders of version 1 do not state it
    quality: dict[str, Quality] = dataclasses.field(default_factory=dict)
    cache: str = "growing"
    runtime: str = ""
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    rereads_at_switch: bool | None = None
    positions: int | None = None
    tolerances: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    adapters: dict[str, StoredAdapter] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.runtime:  # folders of versions 1 and 2 name the format only
            object.__setattr__(self, "runtime", "torch" if self.format == "program" else "onnxruntime")


def write_manifest(folder: pathlib.Path, manifest: FolderManifest) -> None:
    text = json.dumps({"format_version": _VERSION, **dataclasses.asdict(manifest)}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def check_folder(folder: object, failure: type[FlattenError] = ForeignFileError) -> pathlib.Path:
    if not isinstance(folder, str | os.PathLike):
        raise InvalidArgumentError(
            f"expected the path of an exported folder, found {describe_class(folder)}. To export a model:\n"
            '    export_folder(model, "folder")'
        )
    path = pathlib.Path(folder)
    if path.is_file():
        raise failure(f"{path} is a file. Name the folder that yobx-flatten export wrote.")
    if not is_folder(path):
        raise failure(f"There is no folder {path}. To export one: yobx-flatten export MODEL -o {path}")
    return path


def read_manifest(folder: str | os.PathLike[str]) -> FolderManifest:
    path = check_folder(folder) / MANIFEST
    if not path.exists():
        raise ForeignFileError(
            f"{folder} contains no {MANIFEST}: yobx-flatten export did not write this folder. To export a model: "
            "yobx-flatten export MODEL -o DIR"
        )
    if read_document(path, _Version, failure=DamagedFileError).format_version > _VERSION:
        raise ForeignFileError(f"{path} needs a newer yobx-flatten:\n    pip install --upgrade yobx-flatten")
    found = read_document(path, FolderManifest, failure=DamagedFileError)
    if found.runtime not in RUNTIMES or found.dtype not in WEIGHT_TYPES:
        raise DamagedFileError(f"{path} is damaged: runtime {found.runtime!r} or dtype {found.dtype!r} is unknown.")
    # with a larger tolerance, the author of a folder could make every check pass
    if not 0 <= found.tolerance <= tolerance("file", found.dtype):
        raise DamagedFileError(
            f"{path} sets tolerance {found.tolerance}, but {found.dtype} allows 0 to {tolerance('file', found.dtype)}."
        )
    if not all(0 <= one < math.inf for outputs in found.tolerances.values() for one in outputs.values()):
        raise DamagedFileError(f"{path} has a tolerance that is not a number of at least 0.")
    return found


@dataclasses.dataclass(frozen=True)
class _Version:
    format_version: int


def digests(folder: pathlib.Path, names: Iterable[str]) -> dict[str, str]:
    # a digest does not replace trust: the author of a file can also write the manifest
    found = {}
    for name in names:
        with open_regular(folder / name, failure=DamagedFileError) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_digests(folder: pathlib.Path, expected: Mapping[str, str]) -> None:
    for name, digest in expected.items():
        inside(folder, name, DamagedFileError)
        if digests(folder, [name]) != {name: digest}:
            raise DamagedFileError(
                f"{folder / name} changed after the export. Copy the exported file again, or export again."
            )
