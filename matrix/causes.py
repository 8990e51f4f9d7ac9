"""Why a type does not pass where the cause lies outside of this package, as far as it is known for certain.

Each entry states what shows it. What is not here is listed in the page with the first line of its error.
"""

from __future__ import annotations

__all__ = ["CAUSES"]

_TIMM = "the vision encoder is one of timm, which the matrix does not install"
_VAR_KEYWORD = (
    "`forward` has no parameter for the cache and hands `**kwargs` on: torch.export takes no dynamic shapes for those "
    '(2.13: "top-level keys must be the arg names", or "Must provide a tree_name" when they stand under `kwargs`)'
)

_DRAFTS = (
    "drafts for a main model, whose keys and values its layers read: the small configuration has no main model, and "
    'transformers refuses it ("The set of layer types producing a cache is different ..." up to 5.23, '
    '"inputs_embeds and shared_kv_states cannot be None" from 5.24 on)'
)

# name of a type -> what stops it
CAUSES: dict[str, str] = {
    **dict.fromkeys(("gemma3n", "image:fast_vlm", "image:gemma3n", "image:perception_lm"), _TIMM),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    "blt": (
        "cuts the text into patches where the entropy of its next byte is high: `Categorical(...).entropy()` looks at "
        "values (modeling_blt.py, 5.23), and the number of patches depends on them"
    ),
    "cpmant": (
        "`forward` takes the whole text in every call and cuts off what the cache holds (modeling_cpmant.py, "
        "`prepare_inputs_for_generation`): there is no decode call of the new tokens alone"
    ),
    "image:llama4": (
        "its forward fails in eager PyTorch: it reads `image_outputs` of an output class that has none "
        "(modeling_llama4.py, 5.24; `llama4` without pictures passes)"
    ),
    "rwkv": "its kernel for the CPU loops over the tokens of a call (modeling_rwkv.py), which the program unrolls",
    "speech:moonshine_streaming": (
        "its decoder adds positions in place to what the encoder returned (modeling_moonshine_streaming.py, "
        "`encoder_hidden_states += position_embeddings`), so that a call changes the caller's tensor and returns it as "
        "`encoder_last_hidden_state`; a program changes nothing, and returns what it was given. The logits agree"
    ),
    **dict.fromkeys(("image:evolla", "speech:vibevoice"), _VAR_KEYWORD),
}
