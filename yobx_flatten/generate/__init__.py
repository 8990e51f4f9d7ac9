"""Text from exported files: a loop that hands the cache from one call to the next, without copying it."""

from __future__ import annotations

from .onnx_generator import OnnxGenerator
from .program_generator import ProgramGenerator
from .sampling import Sampling
from .settings import GenerationSettings

__all__ = [
    "GenerationSettings",
    "OnnxGenerator",
    "ProgramGenerator",
    "Sampling",
]
