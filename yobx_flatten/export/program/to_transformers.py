"""Return a program as the class that ``transformers.exporters`` returns."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram

from ...declare.scopes import options_in_use, register_flattening_functions
from ...errors import InvalidArgumentError, MissingDependencyError
from ..example.example import Example


def to_hf_exporter(program: ExportedProgram, example: Example) -> Any:
    """Return a program as a ``transformers.exporters.ExportedModel``."""
    if example.args:
        raise InvalidArgumentError(
            "to_transformers: transformers' exporters call a program by keyword, and this one takes positional "
            'arguments. Export it with kwargs:\n    export_program(module, (), {"input_ids": input_ids})'
        )
    try:
        from transformers.exporters.base import ExportedComponent, ExportedModel
        from transformers.exporters.configs import ExportFormat
        from transformers.exporters.metadata import build_export_metadata
    except ImportError as error:
        raise MissingDependencyError(
            "to_transformers needs the exporters of transformers 5.23 or later, and the installed one has none of this "
            "form:\n    pip install 'transformers>=5.23'"
        ) from error
    with register_flattening_functions(**options_in_use()):
        metadata = build_export_metadata(example.module, example.kwargs, program, ["torch"])
    component = ExportedComponent(program, metadata)
    return ExportedModel({"model": component}, ExportFormat.DYNAMO, config=getattr(example.module, "config", None))
