"""What every process of the matrix of trainings needs next to `matrix.preload_cut`, imported once: no models."""

import importlib

for name in ("matrix.preload_cut", "matrix.trainings_cases"):
    importlib.import_module(name)
