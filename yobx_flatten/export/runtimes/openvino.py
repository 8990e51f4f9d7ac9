"""Write a program as OpenVINO files, by way of ONNX, which OpenVINO reads better."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

from ...errors import FlattenError
from ...runners.openvino_runner import import_openvino, read_model
from ...runners.ports import present_of
from ...runners.signature import KEY
from ..example.example import Example
from ..onnx.file import UnprovenFile, convert
from ..onnx.opset import ATTENTION_OPSET
from ..program.flat_program import signature_of
from ..program.traced import Traced
from .openvino_cache import copied_states, keep_in_state
from .openvino_masks import with_added_masks


def has_growing_cache(traced: Traced) -> bool:
    """Whether a program takes keys and values and returns them with those of new tokens."""
    return any(
        present_of(name) in traced.output_names and name.endswith((".key", ".value")) for name in traced.input_names
    )


def write_openvino(traced: Traced, example: Example, path: pathlib.Path) -> None:
    """Convert a program and write the files. The block must be open.

    The program itself is not converted: OpenVINO 2026.4 has no rule for ``sym_min``, which sliding layers use.
    """
    # path: the `.xml` file to write; the weights get the suffix `.bin` next to it
    with _converted(traced, example, path) as model:
        _save(model, traced, path)


def write_openvino_in_place(traced: Traced, example: Example, path: pathlib.Path) -> list[str]:
    """Convert a program and write the files, with the cache as the state of the model. The block must be open."""
    # returns: the inputs that are in the state
    pairs = {name: present_of(name) for name in traced.input_names}
    presents = {name: present for name, present in pairs.items() if present in traced.output_names}
    # attention as one operator, which OpenVINO finds the cache by
    with _converted(traced, example, path, opset=ATTENTION_OPSET, fuse=True) as model:
        kept = keep_in_state(model, presents)
        if not kept:
            raise FlattenError("no output is its input with those of new tokens after it, since layers slide.")
        with_added_masks(model)
        _save(model, traced, path)
    copied = copied_states(path)
    if copied:
        raise FlattenError(f"OpenVINO does not know the attention of {len(copied)} of {len(kept)} parts of the cache.")
    return list(kept)


@contextlib.contextmanager
def _converted(
    traced: Traced, example: Example, path: pathlib.Path, opset: int | None = None, *, fuse: bool = False
) -> Iterator[Any]:
    """The model, read from an ONNX file that is there meanwhile."""
    names = (traced.input_names, traced.output_names)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx-") as folder:
        file = UnprovenFile(pathlib.Path("model.onnx"), pathlib.Path(folder))
        file.save(convert(traced.program, *names, opset, example.axis_names, fuse=fuse))
        yield read_model(file.path)


def _save(model: Any, traced: Traced, path: pathlib.Path) -> None:
    model.set_rt_info(signature_of(traced, ("openvino", "onnx")).to_json(), [KEY])
    import_openvino().save_model(model, str(path), compress_to_fp16=False)
