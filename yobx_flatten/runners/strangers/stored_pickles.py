"""Restrict the pickles of a stored program: example inputs, and tensor subclasses.

torch reads it with its restricted unpickler first, and with the whole of ``pickle`` where that refuses, as it does a
cache. For a file that is not trusted the second is left out, and the first also knows the classes that are registered.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...errors import UntrustedFileError
from ...errors.failures import raised_as
from ...errors.messages import first_line
from ...huggingface.loaded import subclasses_of
from ...private_names.of_torch import pytree
from ...registry.patches import AttributePatch
from .stored_code import REMEDY

__all__ = ["known_pickles_only"]


class _Reading(threading.local):
    is_restricted = False


_READING = _Reading()
_ONE_AT_A_TIME = threading.Lock()


@contextlib.contextmanager
def known_pickles_only() -> Iterator[None]:
    """Let ``torch.load`` read tensors, containers and registered classes only, in this thread."""
    with _ONE_AT_A_TIME:
        patch = AttributePatch(torch, "load", _restricted(torch.load))
        patch.acquire()
        _READING.is_restricted = True
        try:
            yield
        finally:
            _READING.is_restricted = False
            patch.release()


def _restricted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        if not _READING.is_restricted:
            return original(*args, **kwargs)
        kwargs.pop("weights_only", None)
        # whatever the unpickler raises for a class that it does not know
        with raised_as(_untrusted), torch.serialization.safe_globals(_known_classes()):
            return original(*args, weights_only=True, **kwargs)

    return load


def _untrusted(error: BaseException) -> UntrustedFileError:
    return UntrustedFileError(
        "The program holds a pickle with more than tensors and registered classes, which runs code when it is "
        f"loaded ({first_line(error)[:160]}). {REMEDY}"
    )


def _known_classes() -> list[Any]:
    """The classes that are registered, and the layers of caches, which their caches hold."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    bases = [getattr(cache_utils, name, None) for name in ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")]
    layers = [cls for base in bases if base is not None for cls in subclasses_of(base)]
    # torch keeps one entry for all named tuples, under a function
    return [*(cls for cls in pytree.SUPPORTED_NODES.copy() if inspect.isclass(cls)), *layers]
