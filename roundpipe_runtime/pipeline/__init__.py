"""``RoundPipe``, the pipeline that a user calls."""

from __future__ import annotations

from .layers import layers_of
from .model_proxy import wrapped_model
from .roundpipe import RoundPipe

__all__ = ["RoundPipe", "layers_of", "wrapped_model"]
