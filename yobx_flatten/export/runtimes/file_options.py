"""Check the options for writing a file, and the free memory and disk, before anything is traced."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from ...errors import InvalidArgumentError, NoRoomError
from ...errors.dependencies import require
from ...errors.failures import format_bytes
from ...runners.adapters import Adapter
from ...runners.executorch_runner import require_executorch
from ...runners.open import RUNTIMES, check_runtime
from ..example import Example
from ..model_facts import ModelFacts, memory_available
from ..onnx.file import check_opset, check_translations
from ..quantization import Quantization, WeightBits, choose_quantization
from ..quantized_answers import check_text
from .aotinductor import check_compiler
from .executorch import Backend, check_backend

CacheForm = Literal["in_place", "returned"]
"""Where the cache of a file is stored: in the runtime's memory, or in the inputs and outputs of each call."""


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """The options for writing a file of one runtime."""

    runtime: str  # one of `open.RUNTIMES`, except `"torch"`
    path: pathlib.Path
    caller: str  # the function that the user called, for messages
    quantize: WeightBits | Quantization | None = None
    opset_version: int | None = None  # version of ONNX's operators; `None` for the newest that passes the replay
    optimize: Literal["onnxruntime"] | None = None  # whether to use operators that only onnxruntime has
    translations: Mapping[Any, Callable[..., Any]] | None = None  # onnxscript functions by operator
    backend: Backend = "auto"  # kernels of ExecuTorch
    cache: CacheForm = "in_place"
    counter_input: bool = False  # whether the token counter of sliding layers is an input
    keep_failed: pathlib.Path | None = None  # a folder for a file that failed; `None` removes the file
    adapters: Sequence[Adapter] = ()  # adapters that the file is also replayed with

    def checked(self, facts: ModelFacts, *, proof: str) -> FileOptions:
        """Refuse options that the runtime or module does not support; return the options with their quantization."""
        if self.path.is_dir():
            raise InvalidArgumentError(f"{self.path} is a folder. Name a file: path={str(self.path / 'model.onnx')!r}")
        if self.optimize not in (None, "onnxruntime"):
            raise InvalidArgumentError(f'optimize must be "onnxruntime" or None, found {self.optimize!r}.')
        folder = self.keep_failed
        if folder is not None and folder.absolute() == self.path.parent.absolute():
            raise InvalidArgumentError(
                f"keep_failed={os.fspath(folder)!r} is the folder of the file itself: a failed file would replace a "
                "good one. Name another folder."
            )
        check_backend(self.backend, quantized=self.quantize is not None)
        quantization = choose_quantization(self.quantize, facts, self.caller, self.runtime)
        is_onnx = self.runtime == "onnxruntime"
        check_opset(self.opset_version)
        check_translations(self.translations)
        if self.cache not in get_args(CacheForm):
            raise InvalidArgumentError(f'cache must be "in_place" or "returned", found {self.cache!r}.')
        if is_onnx and proof != "none" and folder is None:
            check_kernels(facts.kernel_types, self.caller)
        # for other runtimes, a file in float is written first, also if nothing is replayed
        written = proof if is_onnx else "full"
        check_room(facts, self.path, in_memory=int(proof != "none"), quantization=quantization, proof=written)
        return dataclasses.replace(self, quantize=quantization)

    def check_example(self, example: Example) -> None:
        """Refuse an example without data, and a calibration text that the model cannot read."""
        if example.no_data:
            without = "; export_program works without." if self.caller == "export_onnx" else "."
            raise InvalidArgumentError(
                f"{self.caller} writes the weights, but {example.no_data}. Load them first{without}"
            )
        check_text(example, self.quantization)

    @property
    def quantization(self) -> Quantization | None:
        """The quantization of the weights; valid only after :meth:`checked`."""
        assert not isinstance(self.quantize, str)
        return self.quantize

    def check_suffix(self) -> None:
        """Refuse a path without the file suffix of the runtime."""
        suffix = RUNTIMES[self.runtime][0]
        if self.path.suffix != suffix:
            raise InvalidArgumentError(f"{self.caller} writes files with the suffix {suffix}, not {self.path}.")


def check_libraries(runtime: str, caller: str) -> None:
    """Check that the libraries that write and run the files of a runtime are installed."""
    check_runtime(runtime)
    if runtime == "onnxruntime":
        require("onnx", "onnxscript", "onnxruntime", purpose=caller, extra="onnx")
    elif runtime == "openvino":
        require("openvino", "onnx", "onnxscript", purpose=caller, extra="openvino")
    elif runtime == "executorch":
        require_executorch(caller)
    elif runtime == "aotinductor":
        check_compiler(caller)


_BESIDE = 2**29  # bytes of libraries, graph and activations; measured on models of at least 135 million parameters
_TRIFLE = 2**28  # smaller weights are not checked, since the libraries need more memory


def check_room(
    facts: ModelFacts,
    path: pathlib.Path,
    *,
    in_memory: int = 1,
    quantization: Quantization | None = None,
    proof: str = "full",
) -> None:
    """Refuse an export that would fill the disk or the memory."""
    # in_memory: number of copies of the weights in memory
    # proof: with `"none"`, no file in float is written before a quantized file
    weights, largest = facts.weight_bytes, facts.layer_bytes
    few = 0 if quantization is None else facts.bytes_in(quantization.bits)
    written = weights if quantization is None else few if proof == "none" else weights + few
    there = next(folder for folder in (path.absolute().parent, *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < written:
        raise NoRoomError(
            f"The disk of {there} is too small: the weights take {format_bytes(written)}, and {format_bytes(free)} "
            "are free. Free some space, or name a folder on another disk."
        )
    # if the weights are read layer by layer, memory contains copies of the largest layer, and the file is mapped
    needed = (4 * largest if largest else in_memory * weights) + _BESIDE
    left = memory_available()
    if weights >= _TRIFLE and left < needed:
        raise NoRoomError(
            f"The export needs {format_bytes(needed)} of memory in addition to the model, and {format_bytes(left)} "
            "are available. Close other programs, export in float16, or skip the checks, which need the most "
            'memory:\n    proof="none"'
        )


_WITH_KERNELS = ("float32", "float16", "float64")
"""Weight dtypes for which onnxruntime has matrix products on the CPU; there are none for bfloat16."""


def has_kernels(dtype: str) -> bool:
    """Return whether onnxruntime multiplies tensors of a dtype, such as ``"float16"``, on the CPU."""
    return dtype in _WITH_KERNELS


def check_kernels(types: Iterable[str], caller: str) -> None:
    """Refuse weights in a dtype that onnxruntime cannot run on the CPU, before anything is traced."""
    for dtype in types:
        if not has_kernels(dtype):
            raise InvalidArgumentError(
                f"{caller}: onnxruntime has no kernels for weights of {dtype} on the CPU, so the file cannot be "
                "checked there. Use float32 or float16 (model.half()), or skip the check for another provider:\n"
                '    proof="none"'
            )
