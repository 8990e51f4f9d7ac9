"""ONNX files of the models of `tests.models`, exported once per process; the program is with them."""

import functools
import pathlib
import tempfile

from tests.models import make_model
from yobx_flatten import DecodeSizes, ExportedModel, decode_inputs, export_onnx

__all__ = ["exported_file"]
_ROOT = tempfile.TemporaryDirectory(prefix="exported_files")


@functools.cache
def exported_file(name: str) -> ExportedModel:
    """Return what `export_onnx` returns for a decode call of the usual sizes, replayed in others; do not change it."""
    model = make_model(name)
    path = pathlib.Path(_ROOT.name) / f"{name}.onnx"
    return export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=path)
