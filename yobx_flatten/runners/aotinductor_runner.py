"""Run an AOTInductor package, which contains machine code, and is only loaded if the caller trusts it."""

from __future__ import annotations

import pathlib
import platform
import sys
import zipfile
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch

from ..core.files.document import parse_document
from ..core.private_names.of_torch import aot_load, has_instructions
from ..errors import DamagedFileError, FlattenError, ForeignFileError, UntrustedFileError
from ..errors.failures import first_line, raised_as
from .in_place import CheckedRunner, InPlaceCache, TensorBuffers
from .onnx_session import in_huge_pages
from .signature import KEY, Signature

IN_PLACE = "yobx_flatten.in_place"
"""Metadata key of a package; the value lists, separated by commas, the cache inputs that it updates in place."""

_INSIDE = "/data/aotinductor/"


class AOTInductorRunner(CheckedRunner):
    # package: a `torch._inductor.package.AOTICompiledModel`
    # written: cache inputs that the package writes in place
    runtime: ClassVar[str] = "aotinductor"

    def __init__(self, package: Any, signature: Signature, name: str, written: Collection[str] = ()) -> None:
        super().__init__(signature, name, written)
        self._package = package

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self._package.loader.run(tensors)
        # an output can be an input tensor, which the caller may change
        return [out.clone() if any(out is tensor for tensor in tensors) else out for out in found]

    def _call_in_place(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> Sequence[torch.Tensor]:
        assert isinstance(cache, TensorBuffers)
        cache.reserve(tokens)
        others = iter(tensors)
        given = [cache[name] if name in self.in_place else next(others) for name in self.ports]
        return self._call([*given, torch.empty(cache.seen, dtype=torch.uint8)])


def is_package(path: pathlib.Path) -> bool:
    """Return whether a file is an AOTInductor package, without loading it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(_INSIDE in name for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def open_package(path: pathlib.Path, *, trust: bool, failure: type[FlattenError]) -> AOTInductorRunner:
    # failure: class of the error if the file is missing, or torch cannot load the file
    if not path.is_file():
        raise failure(f"There is no file {path}.")
    # read the signature and the metadata without loading any code
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            names = [n for n in archive.namelist() if _INSIDE in n and n.endswith(".wrapper_metadata.json")]
            if broken is not None or not names or archive.getinfo(names[0]).file_size > 2**20:
                what = broken or "its metadata"
                raise DamagedFileError(f"{path} is damaged: {what}. Copy the file again, or export the model again.")
            metadata = parse_document(archive.read(names[0]), dict[str, Any], str(path), failure=DamagedFileError)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(metadata.get(KEY), str):
        raise ForeignFileError(f"{path} was not written by to_aotinductor: its metadata does not name its inputs.")
    signature = Signature.from_json(metadata[KEY], str(path))
    # instructions that the processor lacks would end the process
    isa = str(metadata.get("AOTI_CPU_ISA", ""))
    lacks = [name for name in ("AVX512", "AVX2") if name in isa.upper().split() and not has_instructions(name)]
    compiled_for = [
        ("the system", str(metadata.get("AOTI_PLATFORM", "")), sys.platform),
        ("the processor", str(metadata.get("AOTI_MACHINE", "")), platform.machine()),
        ("a processor with", isa, f"one without {lacks[0]}" if lacks else isa),
        ("torch", signature.versions.get("torch", ""), torch.__version__.split("+")[0]),
    ]
    for what, made, here in compiled_for:
        if made != here:
            raise ForeignFileError(f"{path} was compiled for {what} {made}, not {here}. Export again on this machine.")
    if not trust:
        raise UntrustedFileError(
            f"{path} holds machine code, which runs as soon as it is loaded. Pass trust=True (--trust) if you made the "
            "file, or know who did."
        )
    # torch passes on all errors of the loader of shared libraries
    with raised_as(lambda error: failure(f"torch cannot load {path}: {first_line(error)}")), in_huge_pages():
        package = aot_load(str(path))
    return AOTInductorRunner(package, signature, path.name, str(metadata.get(IN_PLACE, "")).split(","))
