"""What every process of the cut matrix needs next to `matrix.preload`, imported once: no models."""

import importlib

for name in ("matrix.preload", "matrix.cut_cases", "roundpipe_runtime.huggingface"):
    importlib.import_module(name)
