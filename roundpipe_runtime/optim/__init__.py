"""Run optimizer steps on the host, with master weights, versions of parameters, and a gradient scaler."""

from __future__ import annotations

from .torch_steps import Adam

__all__ = ["Adam"]
