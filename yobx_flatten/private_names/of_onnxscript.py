"""Private names of onnxscript."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lookup import Private, lookup_in

if TYPE_CHECKING:
    constant_folding: Any  # a module

__all__ = ["constant_folding"]

_NAMES = {
    "constant_folding": Private(
        "onnxscript.optimizer", "_constant_folding", "onnxscript.optimizer.optimize_ir, which also inlines and rewrites"
    ),
}
if not TYPE_CHECKING:
    __getattr__ = lookup_in("onnxscript", _NAMES)
