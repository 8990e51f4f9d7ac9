"""The ways to flatten and export that are compared: this package, and the code of transformers.

onnx-diagnostic, the third one that is known, does not import with transformers 5.23.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["WAYS", "Way"]


class Way:
    """How this package does it."""

    name = "yobx_flatten"
    is_ours = True
    deferred = False  # whether what is assumed of sizes is checked when the program runs, not when it is called

    @contextlib.contextmanager
    def block(self, model: Any) -> Iterator[None]:
        """Where caches are flattened. ``model`` is ``None`` in a process that only loads a program."""
        from yobx_flatten import register_flattening_functions

        with register_flattening_functions(patch_transformers=True):
            yield

    def export(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """Export a program for all sizes; called inside the block."""
        from yobx_flatten import dynamic_shapes

        with torch.no_grad():
            return torch.export.export(
                model,
                (),
                copy.deepcopy(kwargs),
                dynamic_shapes=dynamic_shapes(kwargs),
                prefer_deferred_runtime_asserts_over_guards=self.deferred,
            )


class Deferred(Way):
    """The same with ``prefer_deferred_runtime_asserts_over_guards=True``, as `export_program` does."""

    name = "yobx_flatten-deferred"
    deferred = True


def _with_contiguous_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy in which layers hold no slices: strides would be part of the program, and refuse every other cache."""
    given = copy.deepcopy(kwargs)
    given.pop("use_cache", None)
    for cache in given.values():
        for inner in (
            cache,
            getattr(cache, "self_attention_cache", None),
            getattr(cache, "cross_attention_cache", None),
        ):
            for layer in getattr(inner, "layers", ()):
                for name, value in vars(layer).items():
                    if isinstance(value, torch.Tensor):
                        setattr(layer, name, value.contiguous())
    return given


class TransformersExporters(Way):
    """How ``transformers.exporters`` does it: patches for its models, every axis ``Dim.AUTO``."""

    name = "transformers-exporters"
    is_ours = False

    @contextlib.contextmanager
    def block(self, model: Any) -> Iterator[None]:
        """Register permanently: that module cannot unregister."""
        from transformers.cache_utils import Cache
        from transformers.exporters import exporter_dynamo

        if model is not None:
            exporter_dynamo.register_cache_pytrees_for_model(model)
        else:
            for cls in exporter_dynamo._iter_subclasses(Cache):
                exporter_dynamo.register_pytree_node(cls)
        yield

    def export(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """Export with its exporter, dynamic."""
        from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter

        given = _with_contiguous_caches(kwargs)
        program, _ = DynamoExporter().export_program(model, given, DynamoConfig(dynamic=True))
        return program


class Executorch(Way):
    """How transformers registers its cache for ExecuTorch, with the shapes of its exporter."""

    name = "executorch"
    is_ours = False

    @contextlib.contextmanager
    def block(self, model: Any) -> Iterator[None]:
        """Register permanently: that module cannot unregister."""
        from transformers.integrations.executorch import register_dynamic_cache_export_support

        register_dynamic_cache_export_support()
        yield

    def export(self, model: Any, kwargs: dict[str, Any]) -> Any:
        """Export with ``torch.export``, every axis ``Dim.AUTO``."""
        from transformers.exporters.exporter_dynamo import get_auto_dynamic_shapes

        given = _with_contiguous_caches(kwargs)
        with torch.no_grad():
            return torch.export.export(model, (), given, dynamic_shapes=get_auto_dynamic_shapes(given))


WAYS: dict[str, Way] = {way.name: way for way in (Way(), Deferred(), TransformersExporters(), Executorch())}
