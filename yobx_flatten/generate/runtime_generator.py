"""Generate with files of any runtime, in one loop."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from ..errors import GenerationError
from ..runners.devices import Providers, only_for_onnxruntime
from ..runners.folder_adapters import FolderAdapters
from ..runners.open import RUNTIMES, check_runtime, open_runner, thread_options
from .generator import Generator
from .layout import find_parts, folder_of
from .onnx_generator import OnnxGenerator, ProgramGenerator
from .settings import read_settings
from .steps import Parts


def generator_for(
    model: str | os.PathLike[str],
    runtime: str,
    *,
    threads: int | None = None,
    pack: bool = True,
    trust: bool = False,
    device: str | None = None,
    providers: Providers | None = None,
) -> Generator:
    """Open files for generation with the generator of their runtime."""
    # threads: see `OnnxGenerator`; of onnxruntime, OpenVINO and ExecuTorch
    # pack: see `OnnxGenerator`; of onnxruntime only
    # device: see `OnnxGenerator`; of onnxruntime only
    # providers: see `OnnxGenerator`; of onnxruntime only
    only_for_onnxruntime(runtime, device, providers)
    if runtime == "onnxruntime":
        return OnnxGenerator(model, threads=threads, pack=pack, device=device, providers=providers)
    if runtime == "torch":
        return ProgramGenerator(model, trust=trust)
    check_runtime(runtime)
    found, options = _find(pathlib.Path(model), runtime), thread_options(runtime, threads)
    parts: dict[str, Any] = {
        part: open_runner(file, runtime=runtime, trust=trust, caller="open_generator", **options)
        for part, file in found.items()
    }
    folder = folder_of(found["decoder"])
    return Generator(Parts(**parts), read_settings(folder), adapters=FolderAdapters(folder))


def _find(path: pathlib.Path, runtime: str) -> dict[str, pathlib.Path]:
    """The files of the runtime itself, else those of another that it also reads."""
    own, *others = RUNTIMES[runtime]
    for suffix in others:
        try:
            return find_parts(path, own, None)
        except GenerationError:
            return find_parts(path, suffix, None)
    return find_parts(path, own, None)
