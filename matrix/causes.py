"""Why a type does not pass where the cause lies outside of this package, as far as it is known for certain.

Each entry says what shows it. What is not here is listed in the page with the first line of its error.
"""

from __future__ import annotations

__all__ = ["CAUSES"]

_TIMM = "the vision encoder is one of timm, which the matrix does not install"
_VAR_KEYWORD = (
    "`forward` has no parameter for the cache and hands `**kwargs` on: torch.export takes no dynamic shapes for those "
    '(2.13: "top-level keys must be the arg names", or "Must provide a tree_name" when they stand under `kwargs`)'
)

# name of a type -> what stops it
CAUSES: dict[str, str] = {
    **dict.fromkeys(("gemma3n", "image:fast_vlm", "image:gemma3n", "image:perception_lm"), _TIMM),
    **dict.fromkeys(("image:evolla", "speech:vibevoice"), _VAR_KEYWORD),
}
