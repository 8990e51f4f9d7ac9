"""Open an exported file in the runtime for its suffix, or in a given runtime."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ..errors import FlattenError, GenerationError, InvalidArgumentError
from . import onnx_session
from .aotinductor_runner import is_package, open_package
from .executorch_runner import open_pte
from .onnx_runner import OnnxRunner
from .openvino_runner import open_openvino
from .ports import Runner
from .program_runner import ProgramRunner, open_program

RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": (".onnx",),
    "torch": (".pt2",),
    "aotinductor": (".pt2",),
    "executorch": (".pte",),
    "openvino": (".xml", ".onnx"),
}
"""Suffixes of the files that each runtime runs, the runtime's own format first."""


def check_runtime(runtime: str | None) -> None:
    if runtime is not None and runtime not in RUNTIMES:
        raise InvalidArgumentError(f"There is no runtime {runtime!r}. Choose from {', '.join(RUNTIMES)}.")


def runtime_of(path: pathlib.Path) -> str:
    if path.suffix == ".pt2" and is_package(path):
        return "aotinductor"
    found = next((runtime for runtime, suffixes in RUNTIMES.items() if suffixes[0] == path.suffix), None)
    if found is None:
        known = dict.fromkeys(suffixes[0] for suffixes in RUNTIMES.values())
        raise InvalidArgumentError(f"{path} cannot be run: its suffix must be one of {', '.join(known)}.")
    return found


def open_runner(
    path: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    trust: bool = False,
    caller: str = "open_runner",
    failure: type[FlattenError] = GenerationError,
    threads: int | None = None,
    device: str | None = None,
    providers: onnx_session.Providers | None = None,
    options: Any = None,
) -> Runner:
    # runtime: a key of `RUNTIMES`; `None` for the runtime whose own format the file has
    # trust: whether the caller knows who wrote the file; required for AOTInductor packages, which are machine code, and
    # for programs of `torch.export`, since torch's reader runs code from the file
    # caller: the function that the user called, for the message if the library is missing
    # failure: class of the error if the file is missing, or cannot be loaded
    # threads: number of threads of one operator in onnxruntime and OpenVINO, and of all files in ExecuTorch; other
    # runtimes use torch's threads
    # device, providers, options: for onnxruntime, see `choose_providers` and `open_session`
    file = pathlib.Path(path)
    check_runtime(runtime)
    chosen = runtime_of(file) if runtime is None else runtime
    if file.suffix not in RUNTIMES[chosen]:
        raise InvalidArgumentError(f"{chosen} runs files with the suffix {' or '.join(RUNTIMES[chosen])}, not {file}.")
    onnx_session.only_for_onnxruntime(chosen, device, providers)
    if chosen == "onnxruntime":
        onnx_session.require_onnxruntime(caller)
        options = options or onnx_session.session_options(threads=threads)
        how = {"options": options, "providers": onnx_session.choose_providers(device, providers)}
        return OnnxRunner(onnx_session.open_session(file, caller=caller, failure=failure, **how), file.name)
    if chosen == "torch":
        return ProgramRunner(open_program(file, trust=trust, failure=failure), file.name)
    if chosen == "aotinductor":
        return open_package(file, trust=trust, failure=failure)
    open_file = open_pte if chosen == "executorch" else open_openvino
    return open_file(file, caller=caller, failure=failure, threads=threads)
