"""The class :class:`RoundPipe`, which wraps a model in a pipeline."""

from .engine_handle import layers_of, wrapped_model
from .roundpipe import RoundPipe

__all__ = ["RoundPipe", "layers_of", "wrapped_model"]
