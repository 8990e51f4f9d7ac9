"""Explain the inputs and errors of ``torch.export``, and check flatten functions, without changing any object."""

from __future__ import annotations

from .checks import Finding, Findings, check_inputs, check_recipe
from .comparison import Difference, compare_specs
from .export_errors import explain_error
from .opaque import Drawing, DrawingRow, Unregistered, explain, find_unregistered
from .size_errors import Explanation

__all__ = [
    "Difference", "Drawing", "DrawingRow", "Explanation", "Finding", "Findings", "Unregistered", "check_inputs",
    "check_recipe", "compare_specs", "explain", "explain_error", "find_unregistered",
]  # fmt: skip
