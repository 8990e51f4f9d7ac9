"""Open an ONNX file with onnxruntime, on a named device or with a list of execution providers."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import math
import os
import pathlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ..core.files.document import read_onnx
from ..errors import (
    DamagedFileError,
    FlattenError,
    GenerationError,
    InvalidArgumentError,
    MissingDependencyError,
    ReplayError,
    describe_class,
    require,
)
from ..errors.failures import first_line, raised_as


def require_onnxruntime(caller: str) -> Any:
    require("onnxruntime", purpose=caller, extra="onnx")
    import onnxruntime

    return onnxruntime


def has_mapped_weights(path: str | os.PathLike[str]) -> bool:
    """Return whether an ONNX file stores its weights in a second file, which ends with ``.data`` or ``_data``."""
    return any(os.path.isfile(os.fspath(path) + end) for end in (".data", "_data"))  # our suffix, and transformers.js's


_SPINS = contextvars.ContextVar("_SPINS", default=True)  # whether threads of a session spin while they wait


@contextlib.contextmanager
def without_spinning() -> Iterator[None]:
    """In a ``with`` block, threads of new onnxruntime sessions sleep while they wait, and do not spin."""
    token = _SPINS.set(False)
    try:
        yield
    finally:
        _SPINS.reset(token)


def session_options(*, threads: int | None = None, pack: bool = True) -> Any:
    # threads: number of threads that one operator can use; `None` for onnxruntime's own choice
    # pack: whether onnxruntime copies the weights into the order in which its kernels read them. Otherwise it computes
    # with the weights of the mapped file, more slowly.
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and not also printed to the terminal
    if threads is not None:
        options.intra_op_num_threads = threads
    if not _SPINS.get():
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not pack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def mapped_options(path: str | os.PathLike[str], *, threads: int | None = None) -> Any:
    """Return session options with which onnxruntime memory-maps the weights of a file, and does not copy them."""
    import onnxruntime
    import psutil

    options = session_options(threads=threads, pack=False)
    # On the CPU onnxruntime multiplies in single precision. It converts weights of half precision when it loads the
    # file, and they take twice their size in memory. If the free memory is smaller, each call converts the weights.
    half = 0  # bytes of weights in half precision
    if has_mapped_weights(path):
        import onnx

        model = read_onnx(pathlib.Path(path), failure=DamagedFileError)
        types = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        half = sum(2 * math.prod(tensor.dims) for tensor in model.graph.initializer if tensor.data_type in types)
    if not half:  # folding would copy the embedding table to transpose it for a tied head
        options.add_session_config_entry("optimization.disable_specified_optimizers", "ConstantFolding")
    elif 2 * half > psutil.virtual_memory().available:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # do not fold conversions
        # the default order runs all conversions first
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.enable_cpu_mem_arena = False
    return options


def open_session(
    model: str | os.PathLike[str] | bytes,
    *,
    caller: str,
    options: Any = None,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    failure: type[FlattenError] = ReplayError,
) -> Any:
    # caller: the function that the user called, for the message if onnxruntime is missing
    # failure: class of the error if the file is missing, or onnxruntime cannot load the file
    # options: an `onnxruntime.SessionOptions`; by default a result of `session_options`
    runtime = require_onnxruntime(caller)
    given = model if isinstance(model, bytes) else os.fspath(model)
    shown = "the model" if isinstance(given, bytes) else given
    if not isinstance(given, bytes) and not os.path.isfile(given):
        raise failure(f"There is no file {shown}.")
    before = _anonymous()
    # onnxruntime has no base class for its errors
    with raised_as(lambda error: failure(f"onnxruntime cannot load {shown}: {first_line(error)}")):
        session = runtime.InferenceSession(given, options or session_options(), providers=list(providers))
    check_runs_on(session, providers, shown, failure)
    _MEMORY[session] = list(_without(_anonymous(), before))
    return session


_MAPS = pathlib.Path("/proc/self/maps")

_MEMORY: weakref.WeakKeyDictionary[Any, list[tuple[int, int]]] = weakref.WeakKeyDictionary()
"""By onnxruntime session: the address ranges of memory that was allocated while the session was opened."""


def use_huge_pages(session: Any) -> None:
    """Ask Linux to move the weights of an onnxruntime session to huge memory pages; do nothing on other systems."""
    # afterwards each token takes 4 to 9 % less time; the request takes as long as 20 tokens, so it is for long loops
    for start, end in _MEMORY.pop(session, ()):
        _advise(start, end)


@contextlib.contextmanager
def in_huge_pages() -> Iterator[None]:
    """Ask Linux to use huge pages for memory allocated in the ``with`` block; do nothing on other systems."""
    before = _anonymous()
    yield
    for start, end in _without(_anonymous(), before):
        _advise(start, end)


def _anonymous() -> list[tuple[int, int]]:
    """Return the address ranges of this process that map no file; an empty list on systems other than Linux."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return []
    found = []
    for line in lines:
        range_, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and (not name or name[0] == "[heap]"):
            start, end = (int(part, 16) for part in range_.split("-"))
            found.append((start, end))
    return found


def _without(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield those parts of the address ranges ``ranges`` that no address range of ``others`` overlaps."""
    for start, end in ranges:
        for low, high in sorted(others):
            if low >= end or high <= start:
                continue
            if low > start:
                yield start, low
            start = max(start, high)
        if start < end:
            yield start, end


def _advise(start: int, end: int) -> None:
    if end - start < 32 * 2**20:  # smaller weights fit into the caches of the processor
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for advice in (14, 25):  # MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1; Linux may ignore both hints
        advise(start, end - start, advice)


Providers: TypeAlias = Sequence[str | tuple[str, dict[str, Any]]]

CPU = "CPUExecutionProvider"

DEVICES = {
    "cpu": (CPU, "", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "device_id", "onnxruntime-gpu"),
    "tensorrt": ("TensorrtExecutionProvider", "device_id", "onnxruntime-gpu"),
    "migraphx": ("MIGraphXExecutionProvider", "device_id", "onnxruntime-migraphx"),
    "directml": ("DmlExecutionProvider", "device_id", "onnxruntime-directml"),
    "coreml": ("CoreMLExecutionProvider", "", "onnxruntime"),
    "webgpu": ("WebGpuExecutionProvider", "", "onnxruntime-webgpu"),
    "openvino": ("OpenVINOExecutionProvider", "device_type", "onnxruntime-openvino"),
    "xnnpack": ("XnnpackExecutionProvider", "", "onnxruntime"),
    "qnn": ("QNNExecutionProvider", "", "onnxruntime-qnn"),
}
"""By device name: the onnxruntime provider, the provider's option for the text after a colon, and the pip package."""


def choose_providers(device: str | None, providers: Providers | None) -> list[str | tuple[str, dict[str, Any]]]:
    """Return onnxruntime's execution providers for a device, always including the CPU provider.

    >>> choose_providers(None, None)
    ['CPUExecutionProvider']
    """
    # device: a key of `DEVICES`, with an option after a colon: `"cuda:1"`, `"openvino:GPU"`
    # providers: execution providers, in the form that `onnxruntime.InferenceSession` accepts
    if device is not None and providers is not None:
        raise InvalidArgumentError(
            f"device={device!r} and providers= both choose execution providers. Pass device= or providers=, not both."
        )
    if providers is not None:
        chosen = list(providers)
        if isinstance(providers, str) or not chosen:
            raise InvalidArgumentError(f"providers must be a list of names, found {describe_class(providers)}.")
    else:
        kind, colon, part = ("cpu" if device is None else device).partition(":")
        if kind not in DEVICES:
            raise InvalidArgumentError(f"There is no device {device!r}. Choose from {', '.join(DEVICES)}.")
        provider, option, _ = DEVICES[kind]
        if colon and not (option and part):
            raise InvalidArgumentError(f"There is no {device!r}: {kind} has no numbered devices. Pass {kind!r}.")
        chosen = [(provider, {option: part}) if colon else provider]
    import onnxruntime

    there = onnxruntime.get_available_providers()
    for lacking in (name for name in map(_name, chosen) if name not in there):
        package = next((package for name, _, package in DEVICES.values() if name == lacking), "onnxruntime")
        build = f" Install the build that has it, instead of onnxruntime:\n    pip install {package}"
        remedy = "" if package == "onnxruntime" else build
        raise MissingDependencyError(f"The installed onnxruntime has no {lacking}; it has {', '.join(there)}.{remedy}")
    return chosen if CPU in map(_name, chosen) else [*chosen, CPU]  # for operators that the others lack


def is_on_cpu(providers: Providers) -> bool:
    return [*map(_name, providers)] == [CPU]


def check_runs_on(session: Any, providers: Providers, file: str, failure: type[FlattenError] = GenerationError) -> None:
    """Raise an error if an execution provider did not start; onnxruntime would use the next provider silently."""
    lost = [name for name in map(_name, providers) if name not in session.get_providers()]
    if lost:
        raise failure(
            f"{', '.join(lost)} did not start for {file}, so onnxruntime would run the file with "
            f"{', '.join(session.get_providers())}. The log of onnxruntime names the missing library or driver."
        )


def only_for_onnxruntime(runtime: str, device: str | None, providers: Providers | None) -> None:
    if runtime != "onnxruntime" and (device not in (None, "cpu") or providers is not None):
        raise InvalidArgumentError(
            f"device= and providers= need ONNX files, but {runtime} runs these files. Leave the arguments out."
        )


def _name(provider: str | tuple[str, dict[str, Any]]) -> str:
    return provider if isinstance(provider, str) else provider[0]
