"""Private names of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import Private, lookup_in

if TYPE_CHECKING:  # transformers counts as untyped
    export_patches: Any
    onnx_translations: Any

_NAMES = {
    "export_patches": Private("transformers.exporters.utils", "_PATCHES", "the model as it is"),
    "onnx_translations": Private(
        "transformers.exporters.exporter_onnx", "_ONNX_TRANSLATION_TABLE", "grouped products written out"
    ),
}
if not TYPE_CHECKING:
    __getattr__ = lookup_in("transformers", _NAMES)
