"""Write a program as OpenVINO files, by way of ONNX, which OpenVINO reads better."""

from __future__ import annotations

import pathlib
import tempfile

from ...runners.openvino_runner import import_openvino, read_model
from ...runners.signature import KEY
from ..example.example import Example
from ..onnx.file import UnprovenFile, convert
from ..program.flat_program import signature_of
from ..program.traced import Traced

__all__ = ["write_openvino"]


def write_openvino(traced: Traced, example: Example, path: pathlib.Path) -> None:
    """Convert a program and write the files. The block must be open.

    The program itself is not converted: OpenVINO 2026.4 has no rule for ``sym_min``, which sliding layers use.
    """
    # path: the `.xml` file to write; the weights get the suffix `.bin` next to it
    openvino = import_openvino()
    names = (traced.input_names, traced.output_names)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".onnx-") as folder:
        file = UnprovenFile(pathlib.Path("model.onnx"), pathlib.Path(folder))
        file.save(convert(traced.program, *names, None, example.axis_names))
        model = read_model(file.path)
        model.set_rt_info(signature_of(traced, ("openvino", "onnx")).to_json(), [KEY])
        openvino.save_model(model, str(path), compress_to_fp16=False)
