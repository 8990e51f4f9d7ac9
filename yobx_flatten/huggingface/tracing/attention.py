"""Trace attention as one operator, with as many key heads as the cache has.

Where there is a mask, transformers repeats keys and values for every query head before it calls
``scaled_dot_product_attention``, since some kernels of accelerators need that. In a file the repetition copies the
whole cache at every token. The operator takes them as they are (``enable_gqa``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from .replacement import Function, Replacement


def attention_replacements() -> Iterator[Replacement]:
    """Yield module, function and replacement for the attention of the installed transformers, if it is imported."""
    sdpa = sys.modules.get("transformers.integrations.sdpa_attention")
    if sdpa is not None and "use_gqa_in_sdpa" in vars(sdpa):
        yield sdpa, "use_gqa_in_sdpa", _always


def _always(original: Function) -> Function:
    def use_gqa_in_sdpa(*args: object, **kwargs: object) -> bool:
        return True

    return use_gqa_in_sdpa
