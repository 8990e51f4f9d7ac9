"""Blocks over the caches of transformers, entered and left as a test says, and what is in force meanwhile."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch.fx.experimental._config as fx_config
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from yobx_flatten import Undo, register_cache_flattening, register_flattening_functions

CACHES = (DynamicCache, StaticCache, EncoderDecoderCache)


class SomethingWrongError(Exception):
    """What a test raises inside a block."""


def in_force(cls: type = DynamicCache) -> Callable[..., Any] | None:
    node = pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else node.flatten_fn


def block() -> contextlib.AbstractContextManager[Undo]:
    return register_flattening_functions(patch_transformers=True)


def enter() -> Undo:
    return register_cache_flattening(patch_transformers=True)


def everything_patched() -> list[Any]:
    import torch.export._trace

    return [
        vars(ExportedProgram)["__init__"],
        vars(torch.export._trace)["_export"],
        vars(DynamicSlidingWindowLayer)["update"],
        vars(DynamicSlidingWindowLayer)["get_mask_sizes"],
        vars(DynamicLayer)["lazy_initialization"],
        *sys.meta_path,
        fx_config.use_duck_shape,
    ]
