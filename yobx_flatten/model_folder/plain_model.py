"""Open an exported folder as a Hugging Face model that generates no text: an encoder or a speech model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..errors import InvalidArgumentError
from ..generate.generator import Generator
from ..generate.pictures import typed
from ..generate.stand_ins import ModelWithoutWeights, config_from
from ..runners.ports import Runner

# defaults of models for inputs that the caller leaves out: no padding, and one text
_ASSUMED = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}


class PlainFileModel(ModelWithoutWeights):
    """A Hugging Face model without weights, whose ``forward`` runs one exported file."""

    def __init__(self, runner: Runner, stated: dict[str, Any]) -> None:
        super().__init__(config_from(stated, encoder=False))
        self.runner = self._plain = runner
        self.main_input_name = next(iter(runner.ports))
        self.eval()

    def use_adapter(self, name: str | None) -> None:
        plain = self._plain
        self.runner = plain if name is None else self.of_folder.runners({"model": plain}, name)["model"]

    def run_files(self, **given: Any) -> Any:
        """Run the file on inputs that a tokenizer or processor made; outputs have the model's output names."""
        ports = self.runner.ports
        feeds = {name: value for name, value in given.items() if value is not None}
        for name, make in _ASSUMED.items():
            tokens = feeds.get("input_ids")
            if name in ports and name not in feeds and tokens is not None and len(ports[name].shape) == tokens.ndim:
                feeds[name] = make(tokens)
        missing = [name for name in ports if name not in feeds]
        if missing:
            raise InvalidArgumentError(f"{self.runner.name} takes {', '.join(ports)}: pass {', '.join(missing)}.")
        found = self.runner.run(typed(self.runner, {name: value.detach().cpu() for name, value in feeds.items()}))
        return ModelOutput(found)


class VocoderOfFile(PlainFileModel):
    """A vocoder that runs an exported file: it converts one spectrogram or a batch to audio samples."""

    def run_files(self, **given: torch.Tensor) -> torch.Tensor:
        spectrogram = given["spectrogram"]
        rows = spectrogram if spectrogram.ndim == 3 else spectrogram.unsqueeze(0)
        found: torch.Tensor
        (found,) = super().run_files(spectrogram=rows).values()
        return found if spectrogram.ndim == 3 else found[0]


class SpeakingFileModel(ModelWithoutWeights):
    """A Hugging Face model without weights, whose ``generate_speech`` runs exported files of SpeechT5."""

    def __init__(self, generator: Generator, stated: Mapping[str, Any]) -> None:
        super().__init__(config_from(stated, encoder=True))
        self.generator = generator
        encoder = generator.parts.encoder
        assert encoder is not None
        self.main_input_name = next(name for name in ("input_ids", "input_values") if name in encoder.ports)
        self.eval()

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def generate_speech(self, read: Any, speaker_embeddings: torch.Tensor | None = None, **options: Any) -> Any:
        return self.generator.generate_speech(read, speaker_embeddings, **options)

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        """Generate speech; the method has this name because transformers' pipelines call ``generate``."""
        return self.generator.generate_speech(input_ids, attention_mask=attention_mask, **options)
