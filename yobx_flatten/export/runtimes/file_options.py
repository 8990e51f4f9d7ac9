"""Options of the file of a runtime, checked before anything is traced."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from ...errors import InvalidArgumentError
from ...errors.dependencies import require
from ...runners.executorch_runner import require_executorch
from ...runners.open import RUNTIMES, check_runtime
from ..example.example import Example
from ..free_space import check_room
from ..model_facts import ModelFacts
from ..onnx.file import check_opset, check_translations
from ..onnx.kernels import check_kernels
from ..quantization.options import Quantization, WeightBits, choose_quantization
from ..quantization.text_cases import check_text
from ..room import Adapter
from .aotinductor import check_compiler
from .executorch import Backend, check_backend

CacheForm = Literal["in_place", "returned"]
"""Where the cache of a file is: in memory of the library, or among the inputs and outputs of a call."""


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """Options of the file for a runtime."""

    runtime: str  # one of `open.RUNTIMES`, other than `"torch"`
    path: pathlib.Path
    caller: str  # the function that the user called, for messages
    quantize: WeightBits | Quantization | None = None  # weights in fewer bits; `None`, the default, for none
    opset_version: int | None = None  # version of ONNX's operators; `None`, the default, for the newest that passes
    optimize: Literal["onnxruntime"] | None = None  # operators that only onnxruntime has; `None`, the default, without
    translations: Mapping[Any, Callable[..., Any]] | None = None  # functions of onnxscript by operator
    backend: Backend = "auto"  # kernels of ExecuTorch
    # whether a cache that grows is written in place by the library, where that replays, or taken and returned by calls
    cache: CacheForm = "in_place"
    counter_input: bool = False  # whether a cache that slides has its counter as an input; `False` by default
    keep_failed: pathlib.Path | None = None  # a folder for a file that failed; `None`, the default, removes it
    adapters: Sequence[Adapter] = ()  # what the file is also replayed with; none by default

    def checked(self, facts: ModelFacts, *, proof: str) -> FileOptions:
        """Refuse what this runtime or this module cannot do; return them with the quantisation that is meant."""
        # proof: what will be replayed
        if self.path.is_dir():
            raise InvalidArgumentError(f"{self.path} is a folder. Name a file: path={str(self.path / 'model.onnx')!r}")
        if self.optimize not in (None, "onnxruntime"):
            raise InvalidArgumentError(f'optimize must be "onnxruntime" or None, found {self.optimize!r}.')
        folder = self.keep_failed
        if folder is not None and folder.absolute() == self.path.parent.absolute():
            raise InvalidArgumentError(
                f"keep_failed={os.fspath(folder)!r} is the folder of the file itself, where a failed file would "
                "replace a good one. Name another folder."
            )
        quantization = choose_quantization(self.quantize, facts, self.caller, self.runtime)
        is_onnx = self.runtime == "onnxruntime"
        if is_onnx and proof != "none" and folder is None:
            check_kernels(facts.kernel_types, self.caller)
        check_opset(self.opset_version)
        check_translations(self.translations)
        check_backend(self.backend)
        if self.cache not in get_args(CacheForm):
            raise InvalidArgumentError(f'cache must be "in_place" or "returned", found {self.cache!r}.')
        # other runtimes write the file in float first, also where nothing is replayed
        written = proof if is_onnx else "full"
        in_memory = 0 if proof == "none" else 1
        check_room(facts, self.path, in_memory=in_memory, quantization=quantization, proof=written)
        return dataclasses.replace(self, quantize=quantization)

    def check_example(self, example: Example) -> None:
        """Refuse an example without data, or one that cannot read the text of the quantisation."""
        if example.no_data:
            without = "; export_program works without." if self.caller == "export_onnx" else "."
            raise InvalidArgumentError(
                f"{self.caller} writes the weights, and {example.no_data}. Load them first{without}"
            )
        check_text(example, self.quantization)

    @property
    def quantization(self) -> Quantization | None:
        """How the weights are stored in fewer bits, once the options are checked."""
        assert not isinstance(self.quantize, str)
        return self.quantize

    def check_suffix(self) -> None:
        """Refuse a path that has not the suffix of the runtime's files."""
        if self.path.suffix != RUNTIMES[self.runtime][0]:
            raise InvalidArgumentError(
                f"{self.caller} writes files with the suffix {RUNTIMES[self.runtime][0]}, not {self.path}."
            )


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
