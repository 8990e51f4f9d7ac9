"""Optimizers for parameters on the host, master weights, versions of parameters, and the gradient scaler."""

from __future__ import annotations

from .torch_steps import Adam

__all__ = ["Adam"]
