"""What every process of the table of exporters needs next to `matrix.preload`, imported once: no models."""

import importlib

for name in (
    *("matrix.preload", "onnxruntime", "onnxscript", "torch.onnx._internal.exporter._core"),
    *("yobx_flatten.model_folder.write", "yobx_flatten.verify", "matrix.oracle_cases"),
):
    importlib.import_module(name)
