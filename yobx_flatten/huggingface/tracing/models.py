"""List the functions of models that are replaced during a trace.

A function is replaced only if its module is imported, and only if it takes what its version knows
(:mod:`.replacement`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from .chunk_scans import CHUNK_SCANS
from .experts import EXPERTS
from .loops import LOOPS
from .positions import POSITIONS
from .recurrences import RECURRENCES
from .replacement import Replacement
from .sparse import SPARSE


def model_replacements() -> Iterator[Replacement]:
    """Yield owner, attribute and replacement for the models that are imported and need one."""
    for models, owner, name, make in (*CHUNK_SCANS, *EXPERTS, *LOOPS, *POSITIONS, *RECURRENCES, *SPARSE):
        for model in models:
            target: Any = sys.modules.get(f"transformers.models.{model}.modeling_{model}")
            target = getattr(target, owner, None) if owner is not None else target
            if target is not None and name in vars(target):
                yield target, name, make
