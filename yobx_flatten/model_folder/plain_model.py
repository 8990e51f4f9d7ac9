"""Open a folder of one file as a model of transformers: encoders and their heads.

Imports transformers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..errors import GenerationError, InvalidArgumentError
from ..files.document import read_document
from ..generate.own_class import ModelWithoutWeights, named_class, read_config
from ..generate.slots import typed
from ..runners.folder_adapters import FolderAdapters
from ..runners.runner import Runner

__all__ = ["PlainFileModel", "plain_model"]

# what a model assumes where it is not given: nothing is padded, and there is one text
_ASSUMED = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}
_MASKS = ("attention_mask", "pixel_mask")


class PlainFileModel(ModelWithoutWeights):
    """Not one weight: ``forward`` runs a file."""

    def __init__(self, runner: Runner, stated: dict[str, Any]) -> None:
        super().__init__(read_config(stated, encoder=False))
        self.runner = self._plain = runner
        self.main_input_name = next(iter(runner.ports))
        self.eval()

    def use_adapter(self, name: str | None) -> None:
        """Call the file with an adapter from now on; ``None`` for none."""
        plain = self._plain
        self.runner = plain if name is None else self.of_folder.runners({"model": plain}, name)["model"]

    def forward(self, *args: Any, **given: Any) -> Any:
        """Run the file on what the model's tokenizer or processor returns."""
        # returns: A `ModelOutput` with the outputs of the file, under the names that the model has for them
        ports = self.runner.ports
        given = {**dict(zip(ports, args, strict=False)), **given}
        feeds = {name: given.pop(name) for name in list(given) if name in ports and given[name] is not None}
        for name, make in _ASSUMED.items():
            tokens = feeds.get("input_ids")
            if name in ports and name not in feeds and tokens is not None and len(ports[name].shape) == tokens.ndim:
                feeds[name] = make(tokens)
        missing = [name for name in ports if name not in feeds]
        if missing:
            raise InvalidArgumentError(f"{self.runner.name} takes {', '.join(ports)}: pass {', '.join(missing)}.")
        self._check_rest(given)
        found = self.runner.run(typed(self.runner, {name: value.detach().cpu() for name, value in feeds.items()}))
        made = ModelOutput()
        for name, value in found.items():
            made[name] = value
        return made if given.get("return_dict", True) is not False else made.to_tuple()

    def _check_rest(self, given: Mapping[str, Any]) -> None:
        """Refuse what a file cannot do, and would leave out silently."""
        for name, value in given.items():
            needless = value is None or value is False or name in ("return_dict", "use_cache")
            if needless or (name in _MASKS and bool(value.all())):
                continue
            raise InvalidArgumentError(
                f"{self.runner.name} takes {', '.join(self.runner.ports)}, and no {name}. The outputs would be others "
                "than the model's: leave it out, or pass rows of one size where it is a mask."
            )


class VocoderOfFile(PlainFileModel):
    """Takes one spectrogram or several, and returns the sound itself, as loops of transformers ask a vocoder."""

    def forward(self, spectrogram: torch.Tensor, **given: Any) -> torch.Tensor:
        """Return sound of shape (samples,), or (batch, samples)."""
        rows = spectrogram if spectrogram.ndim == 3 else spectrogram.unsqueeze(0)
        found: torch.Tensor
        (found,) = super().forward(spectrogram=rows, **given).values()
        return found if spectrogram.ndim == 3 else found[0]


def plain_model(runner: Runner, folder: pathlib.Path, base: type) -> Any:
    """Return a model of transformers over one file."""
    stated = read_document(folder / "config.json", dict[str, Any], failure=GenerationError, finite=False)
    kind = VocoderOfFile if list(runner.ports) == ["spectrogram"] else PlainFileModel
    found = named_class(stated, (base, kind))(runner, stated)
    found.of_folder = FolderAdapters(folder)
    return found
