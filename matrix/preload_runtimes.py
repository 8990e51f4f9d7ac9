"""What every process of the matrix of runtimes needs, imported once; what the processor can do is tried once."""

import importlib
import importlib.util
import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # processes that compile would each import torch
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # what calls the kernels; these stay at O3

importlib.import_module("matrix.preload")

for name in (
    "torch._inductor.compile_fx",
    "torch._inductor.graph",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch.onnx._internal.exporter._core",
    "onnxruntime",
    "onnxscript",
    "openvino",
    "executorch.exir",
    "executorch.runtime",
    "yobx_flatten.export.runtimes.write",
    "matrix.runtimes_programs",
):
    try:
        importlib.import_module(name)
    except ImportError:
        continue

# which instructions work is tried by compiling and loading a library for each; the answer stays in the process
importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()
