"""Generate with programs of ``torch.export``."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from torch.export import ExportedProgram

from ..errors import InvalidArgumentError, describe_class
from ..export.exported_model import ExportedModel
from ..runners.folder_adapters import FolderAdapters
from ..runners.program_runner import ProgramRunner, open_program
from .generator import Generator
from .layout import find_parts, folder_of
from .settings import GenerationSettings, read_settings
from .steps import Parts


class ProgramGenerator(Generator):
    """Generates tokens with programs of ``torch.export``.

    Args:
        model: what :func:`export_program` returned for a decoder, a ``torch.export.ExportedProgram``, the file that
            ``save`` wrote, or a folder as :func:`export_folder` writes it.
        prefill: a program or file for the first call, which takes no cache; needed where ``model`` does not take an
            empty cache.
        trust: whether you know who wrote the files, see :func:`.program_runner.open_program`; ``False`` by default.
        settings: special tokens; by default read from ``config.json`` and ``generation_config.json`` next to the file.

    Raises:
        GenerationError: when a file is missing, cannot be loaded, or is not made for generation.
        InvalidArgumentError: when ``model`` is something else.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import DecodeSizes, GenerationSettings, decode_inputs, export_program
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> found = ProgramGenerator(exported, settings=GenerationSettings()).generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """

    def __init__(
        self,
        model: ExportedModel | ExportedProgram | str | os.PathLike[str],
        *,
        prefill: ExportedModel | ExportedProgram | str | os.PathLike[str] | None = None,
        settings: GenerationSettings | None = None,
        trust: bool = False,
    ) -> None:
        given = {"decoder": model, **({} if prefill is None else {"prefill": prefill})}
        adapters = None
        if isinstance(model, (str, os.PathLike)):
            found: dict[str, Any] = {**find_parts(pathlib.Path(model), ".pt2", None)}
            folder = folder_of(found["decoder"])
            settings, adapters = settings or read_settings(folder), FolderAdapters(folder)
            given = {**found, **{part: value for part, value in given.items() if part != "decoder"}}
        runners: dict[str, Any] = {part: _runner(value, part, trust) for part, value in given.items()}
        super().__init__(Parts(**runners), settings or GenerationSettings(), adapters=adapters)


def _runner(value: Any, part: str, trust: bool) -> ProgramRunner:
    if isinstance(value, (str, os.PathLike)):
        return ProgramRunner(open_program(value, trust=trust), pathlib.Path(value).name)
    program = value.program if isinstance(value, ExportedModel) else value
    if not isinstance(program, ExportedProgram):
        raise InvalidArgumentError(
            f"ProgramGenerator takes an ExportedModel, an ExportedProgram or a path, found {describe_class(value)}."
        )
    return ProgramRunner(program, f"the {part}")
