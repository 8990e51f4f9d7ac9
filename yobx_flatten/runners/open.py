"""Open an exported file by its suffix, or with a given runtime."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import FlattenError, GenerationError, InvalidArgumentError
from .aotinductor_runner import is_package, open_package
from .executorch_runner import open_pte
from .onnx_runner import OnnxRunner
from .onnx_session import open_session
from .openvino_runner import open_openvino
from .ports import Runner
from .program_runner import ProgramRunner, open_program


def _onnx(path: pathlib.Path, caller: str, failure: type[FlattenError], **options: Any) -> Runner:
    return OnnxRunner(open_session(path, caller=caller, failure=failure, **options), path.name)


def _program(path: pathlib.Path, caller: str, failure: type[FlattenError], *, trust: bool) -> Runner:
    return ProgramRunner(open_program(path, trust=trust, failure=failure), path.name)


def _package(path: pathlib.Path, caller: str, failure: type[FlattenError], *, trust: bool) -> Runner:
    return open_package(path, trust=trust, failure=failure)


def _pte(path: pathlib.Path, caller: str, failure: type[FlattenError], *, threads: int | None = None) -> Runner:
    return open_pte(path, caller=caller, failure=failure, threads=threads)


def _openvino(path: pathlib.Path, caller: str, failure: type[FlattenError], *, threads: int | None = None) -> Runner:
    return open_openvino(path, caller=caller, failure=failure, threads=threads)


RUNNERS: Mapping[str, Callable[..., Runner]] = {
    "onnxruntime": _onnx,
    "torch": _program,
    "aotinductor": _package,
    "executorch": _pte,
    "openvino": _openvino,
}
"""The function that opens a file in each runtime: takes path, ``caller``, ``failure`` and options of the library."""

RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": (".onnx",),
    "torch": (".pt2",),
    "aotinductor": (".pt2",),
    "executorch": (".pte",),
    "openvino": (".xml", ".onnx"),
}
"""Suffixes of the files that each runtime runs, its own format first."""


def check_runtime(runtime: str) -> None:
    """Refuse a runtime that is not known."""
    if runtime not in RUNTIMES:
        raise InvalidArgumentError(f"There is no runtime {runtime!r}. There are {', '.join(RUNTIMES)}.")


def thread_options(runtime: str, threads: int | None) -> dict[str, Any]:
    """Return the options of :func:`open_runner` that set the number of threads of a runtime."""
    # AOTInductor and programs run in the threads of torch, which `torch.set_num_threads` states for the process
    return {"threads": threads} if runtime in ("openvino", "executorch") and threads is not None else {}


def runtime_of(path: pathlib.Path) -> str:
    """Return the runtime of a file: by its suffix, and for ``.pt2`` by its contents."""
    if path.suffix == ".pt2" and is_package(path):
        return "aotinductor"
    found = next((runtime for runtime, suffixes in RUNTIMES.items() if suffixes[0] == path.suffix), None)
    if found is None:
        known = dict.fromkeys(suffixes[0] for suffixes in RUNTIMES.values())
        raise InvalidArgumentError(f"{path} has none of the suffixes {', '.join(known)} of files that can be run.")
    return found


def open_runner(
    path: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    trust: bool = False,
    caller: str = "open_runner",
    failure: type[FlattenError] = GenerationError,
    **options: Any,
) -> Runner:
    """Open an exported file."""
    # runtime: the library that runs it, one of `RUNTIMES`; `None`, the default, for that of the file
    # trust: whether the caller knows who wrote the file; asked for a package of AOTInductor, which holds machine code,
    # and for a program of `torch.export`, whose reader runs code of the file. `False` by default.
    # caller: the function that the user called, for the message where the library is missing
    # failure: class of the error where there is no such file, or it cannot be loaded
    # options: options of the library: for an ONNX file in onnxruntime `options` and `providers`, see
    # `onnx_session.open_session`; `threads` for OpenVINO and ExecuTorch, see `thread_options`
    file = pathlib.Path(path)
    if runtime is not None:
        check_runtime(runtime)
    chosen = runtime_of(file) if runtime is None else runtime
    if file.suffix not in RUNTIMES[chosen]:
        raise InvalidArgumentError(f"{chosen} runs files with the suffix {' or '.join(RUNTIMES[chosen])}, not {file}.")
    if chosen in ("aotinductor", "torch"):
        options["trust"] = trust
    return RUNNERS[chosen](file, caller, failure, **options)
