"""Run an ExecuTorch file (``.pte``) with the ExecuTorch runtime from Python."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..core.files.document import open_regular, parse_document
from ..errors import DamagedFileError, FlattenError, ForeignFileError, GenerationError, MissingDependencyError, require
from ..errors.failures import first_line, raised_as
from .in_place import CheckedRunner, InPlaceCache, TensorBuffers
from .signature import KEY, Signature

METHOD = "forward"
"""Name of the method of an ExecuTorch file that runs the model."""

SIGNATURE = KEY.replace(".", "_")
"""Name of the method of an ExecuTorch file that returns the names, dtypes and sizes of inputs and outputs."""

ROWS = "yobx_flatten_rows"
"""Name of the method, in ExecuTorch files that update their cache in place, that returns a :class:`Rows` as text."""

_TYPES = {0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16}
_TYPES |= {7: torch.float64, 11: torch.bool, 15: torch.bfloat16}  # by torch's code of the type; 6 is float32
_FITS = {"2.13": "1.5"}  # minor versions of torch and executorch that were tried together


@dataclasses.dataclass(frozen=True)
class Rows:
    """The KV cache inputs and the batch axes of an ExecuTorch file that processes one row of the batch per call."""

    in_place: list[str]  # the inputs that are buffers
    inputs: dict[str, int]  # the axis of rows of each input that has one
    outputs: dict[str, int]  # the axis of rows of each output that is returned

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str, where: str) -> Rows:
        return parse_document(text, cls, f"The list of rows in {where}", failure=DamagedFileError)


def room_for(total: int) -> int:
    """Return the capacity of a KV cache buffer in tokens: ``total``, and a reserve of at least 32 tokens."""
    # a call attends over the whole capacity, with a mask; a full buffer is copied to a larger buffer
    return total + max(32, total // 32)


_OPEN: weakref.WeakSet[ExecuTorchRunner] = weakref.WeakSet()


class ExecuTorchRunner(CheckedRunner):
    # rows: for a file that writes its cache in place
    runtime: ClassVar[str] = "executorch"

    def __init__(self, program: Any, signature: Signature, name: str, rows: Rows | None = None) -> None:
        super().__init__(signature, name, () if rows is None else rows.in_place)
        _OPEN.add(self)
        self._program = program  # owns the memory that the method reads
        self._method = program.load_method(METHOD)
        self._rows = rows

    def _call(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = self._method.execute(tensors)  # copies outputs in planned memory
        return found

    def _written_in_place(self, leaves: Mapping[str, torch.Tensor]) -> InPlaceCache:
        return TensorBuffers(leaves, self.in_place, room_for)

    def _call_in_place(self, tensors: list[torch.Tensor], cache: InPlaceCache, tokens: int) -> Sequence[torch.Tensor]:
        assert isinstance(cache, TensorBuffers)
        assert cache._room is room_for  # not a cache of another runtime, which grows past the bounds of the file
        assert self._rows is not None
        cache.reserve(tokens)
        axes = self._rows.inputs
        given = dict(zip((name for name in self.ports if name not in self.in_place), tensors, strict=True))
        seen = torch.empty(cache.seen, dtype=torch.uint8)
        found = []
        for row in range(len(cache[next(iter(self.in_place))])):
            one = {
                name: tensor.narrow(axes[name], row, 1).contiguous() if name in axes else tensor
                for name, tensor in given.items()
            }
            # (heads, capacity, 1, size): heads are the batch of the attention
            one |= {name: cache[name][row].unsqueeze(2) for name in self.in_place}
            found.append(self._call([*(one[name] for name in self.ports), seen]))
        if len(found) == 1:
            return found[0]
        made = [name for name in self.outputs if name not in self.in_place.values()]
        parts = zip(made, zip(*found, strict=True), strict=True)
        return [torch.cat(rows, self._rows.outputs[name]) for name, rows in parts]


def load_attention() -> None:
    """Load ExecuTorch's operators for language models, such as attention that updates a KV cache in place."""
    # ExecuTorch's own module for these kernels would import torch's compiler, which takes seconds
    found = importlib.util.find_spec("executorch.extension.llm.custom_ops")
    folders = [] if found is None else found.submodule_search_locations or []
    for library in (file for folder in folders for file in pathlib.Path(folder).glob("*custom_ops_aot_lib.*")):
        torch.ops.load_library(str(library))
        return
    raise MissingDependencyError(
        "The installed executorch has no kernels for language models:\n    pip install --force-reinstall executorch"
    )


def require_executorch(caller: str) -> None:
    require("executorch", purpose=caller, extra="executorch")
    try:
        importlib.import_module("executorch.runtime")
    except (ImportError, OSError, AttributeError) as error:  # its libraries depend on those of torch
        found = importlib.metadata.version("executorch")
        fits = ", ".join(f"executorch {theirs} with torch {ours}" for ours, theirs in _FITS.items())
        raise MissingDependencyError(
            f"{caller}: executorch {found} does not load with torch {torch.__version__} ({first_line(error)}). Install "
            f"{fits}:\n    pip install 'executorch=={_FITS['2.13']}.*' 'torch==2.13.*'"
        ) from error


def open_pte(
    path: pathlib.Path, *, caller: str, failure: type[FlattenError], threads: int | None = None
) -> ExecuTorchRunner:
    """Open an ExecuTorch file. The file may be untrusted: it contains no code, and ExecuTorch checks it."""
    # failure: class of the error if the file is missing
    # threads: number of threads of all files in the process; `None` for the present number
    require_executorch(caller)
    pool: Any = None if threads is None else importlib.import_module("executorch.extension.pybindings._C")
    if pool is not None and (found := pool._threadpool_get_thread_count()) != threads:
        gc.collect()
        if _OPEN:  # XNNPACK would continue in the pool that is deleted, and end the process
            raise GenerationError(
                f"All ExecuTorch files of a process share a thread pool, but {next(iter(_OPEN)).name} is open with "
                f"{found} threads. Open the first file with threads={threads}, or open this file in another process."
            )
        pool._unsafe_reset_threadpool(threads)
    from executorch.runtime import Runtime, Verification

    if not path.is_file():
        raise failure(f"There is no file {path}.")
    with open_regular(path, failure=failure) as file:
        head = file.read(8)
    if head[4:6] != b"ET":
        raise ForeignFileError(f"{path} is not a file of ExecuTorch.")
    # the runtime raises RuntimeError with a code of its own
    with (
        raised_as(lambda error: DamagedFileError(f"{path} is damaged: {first_line(error)}")),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # ExecuTorch warns that its interface is experimental
        program = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
        names = program.method_names
    if METHOD not in names:
        raise ForeignFileError(f"{path} has no method {METHOD}; its methods: {', '.join(sorted(names))}.")
    if SIGNATURE not in names:  # another exporter wrote the file; its inputs and outputs have numbers instead of names
        stated = program.load_method(METHOD).metadata
        tensors = [stated.input_tensor_meta(at) for at in range(stated.num_inputs())]
        inputs = [(f"{at}", _TYPES.get(one.dtype(), torch.float32), one.sizes()) for at, one in enumerate(tensors)]
        return ExecuTorchRunner(program, Signature(inputs, [f"{at}" for at in range(stated.num_outputs())]), path.name)
    (text,) = program.load_method(SIGNATURE).execute([])
    signature = Signature.from_json(text, str(path))
    rows = None
    if ROWS in names:
        load_attention()
        (text,) = program.load_method(ROWS).execute([])
        rows = Rows.from_json(text, str(path))
    return ExecuTorchRunner(program, signature, path.name, rows)
