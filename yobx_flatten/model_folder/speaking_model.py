"""A model of transformers whose ``generate_speech`` runs files. Imports transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..generate.generator import Generator
from ..generate.own_class import ModelWithoutWeights, config_from, named_class

__all__ = ["SpeakingFileModel", "speaking_model"]


class SpeakingFileModel(ModelWithoutWeights):
    """Not one weight: the loop is transformers' own, over the files."""

    def __init__(self, generator: Generator, stated: Mapping[str, Any]) -> None:
        super().__init__(config_from(stated, encoder=True))
        self.generator = generator
        encoder = generator.parts.encoder
        assert encoder is not None
        self.main_input_name = next(name for name in ("input_ids", "input_values") if name in encoder.ports)
        self.eval()

    @classmethod
    def can_generate(cls) -> bool:
        """Return ``True``: the files speak."""
        return True

    def generate_speech(self, read: Any, speaker_embeddings: torch.Tensor | None = None, **options: Any) -> Any:
        """Speak; see :meth:`.Generator.generate_speech`."""
        return self.generator.generate_speech(read, speaker_embeddings, **options)

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        """Speak, as pipelines ask for it."""
        return self.generator.generate_speech(input_ids, attention_mask=attention_mask, **options)


def speaking_model(generator: Generator, base: type) -> Any:
    """Return a model of transformers over the files of a generator."""
    documents = generator.settings.documents
    stated: Mapping[str, Any] = {} if documents is None else documents.config
    return named_class(stated, (base, SpeakingFileModel), {})(generator, stated)
