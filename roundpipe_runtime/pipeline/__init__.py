"""``RoundPipe``, the pipeline that a user calls, and the model behind it."""

from __future__ import annotations

from .model_proxy import wrapped_model
from .roundpipe import RoundPipe, layers_of

__all__ = ["RoundPipe", "layers_of", "wrapped_model"]
