"""Generate text with exported files, whose KV cache is passed from call to call without a copy."""

from __future__ import annotations

from .generator import OnnxGenerator, ProgramGenerator
from .sampling import Sampling
from .settings import GenerationSettings

__all__ = ["GenerationSettings", "OnnxGenerator", "ProgramGenerator", "Sampling"]
