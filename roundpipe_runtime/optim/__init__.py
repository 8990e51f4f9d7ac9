"""Optimizers for parameters on the host, and what steps need: parameters, versions, the scaler."""

from __future__ import annotations

from .adam import Adam

__all__ = [
    "Adam",
]
