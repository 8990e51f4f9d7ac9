"""Apply the reversible patches of transformers' own exporters to the imported models.

transformers 5.17 and later bring versions of some methods that a trace can follow, most of them of attention over
pictures: one product instead of a loop over pictures of several sizes. They are put in place as ours are, by owner and
attribute, so that blocks can nest and each original comes back. Without them the encoders of pictures of `glm4v`,
`qwen2_vl`, `qwen3_vl` and their like stop the trace (column "picture" of the matrix).

Of ``transformers.exporters.utils.apply_patches`` itself two things are in the way. It imports all 40 models that it
knows. And it replaces what is not of one model: the sliding layers of caches by full ones, which keep every token
(:mod:`.layers` has versions that keep the window), and functions of torch, which models that run in other
threads would also call.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from .replacement import Function, Make, Replacement

_MODULE = "transformers.exporters.exporter_dynamo"
_MODELS = "transformers.models."


def upstream_replacements() -> Iterator[Replacement]:
    """Yield owner, attribute and replacement, for the models that are imported."""
    if _modules_named() & sys.modules.keys():
        for owner, name, make in _patches():
            target = _imported(owner) if isinstance(owner, str) else owner
            module = str(getattr(target, "__module__", None) or getattr(target, "__name__", ""))
            if module.startswith(_MODELS) and name in vars(target):
                yield target, name, _CORRECTED.get((target.__name__, name), make)


@functools.cache
def _modules_named() -> frozenset[str]:
    """The model modules that the installed exporters patch, read off their source: importing 5.17's takes 2 seconds."""
    package, _, file = _MODULE.rpartition(".")
    spec = importlib.util.find_spec(package)  # of the package: to find the module in it would import 5.17's package
    folders = [] if spec is None else list(spec.submodule_search_locations or ())  # there is none in 4.56 to 5.16
    sources = [path for path in (pathlib.Path(folder, f"{file}.py") for folder in folders) if path.exists()]
    source = "".join(path.read_text(encoding="utf-8") for path in sources)
    return frozenset(re.findall(r'"(transformers\.models\.\w+\.\w+)\.', source))


@functools.cache
def _patches() -> list[tuple[ModuleType | type | str, str, Make]]:
    try:
        with warnings.catch_warnings():
            # 5.17 imports every model that it patches, and some use torch.jit.script
            warnings.filterwarnings("ignore", r".torch\.jit\.script. is deprecated", DeprecationWarning)
            importlib.import_module(_MODULE)
            from ...private_names.of_transformers import export_patches
    except ImportError:  # a private name
        return []
    return list(export_patches.get("dynamo", ()))


def _imported(path: str) -> Any:
    """The module, or the class of a module, at a dotted path; ``None`` if it is not imported."""
    module, _, name = path.rpartition(".")
    return sys.modules.get(path) or getattr(sys.modules.get(module), name, None)


def _masked_attention(original: Function) -> Function:
    # Upstream's version (5.23) leaves out the norms of queries and keys where both come from one projection, and
    # computes something else without a word. It also wants pictures, and windows, of one size; a mask does not.
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: object,
    ) -> torch.Tensor:
        count = hidden_states.shape[0]
        query, key, value = self.qkv(hidden_states).reshape(count, 3, self.num_heads, -1).unbind(1)
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_vision
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, key, *position_embeddings)
        picture = (torch.arange(count, device=cu_seqlens.device)[:, None] >= cu_seqlens[1:]).sum(-1)
        query, key, value = (states.transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        seen = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=picture[:, None] == picture, scale=self.scaling
        )
        found: torch.Tensor = self.proj(seen.squeeze(0).transpose(0, 1).reshape(count, -1))
        return found

    return forward


# class and attribute -> ours, where upstream's does not compute what the model does
_CORRECTED: dict[tuple[str, str], Make] = {
    ("Dots3NoteVisionAttention", "forward"): _masked_attention,
    ("GlmOcrVisionAttention", "forward"): _masked_attention,
    ("Qwen2_5_VLVisionAttention", "forward"): _masked_attention,
}
