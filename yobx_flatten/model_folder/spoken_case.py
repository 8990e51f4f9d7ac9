"""Store the spectrogram that a model makes, and compare that of its files."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..core.effects import undisturbed
from ..generate.generator import Generator
from ..generate.spectrogram import drawn_masks, speak
from ..recipe.aliases import TransformersModel
from ..storage.cases import StoredCase
from .pieces.spoken import spoken_input

FRAMES = 12
"""How many calls of its decoder the case of a folder has."""

SAMPLED_FRAMES = 3
"""How many it has in a sample."""

_LENGTH = 9  # tokens of the text
_NEVER = math.inf  # a threshold that no frame reaches: the number of calls decides


@dataclasses.dataclass(frozen=True)
class SpokenCase:
    """A text, a speaker, masks of dropout, and the spectrogram that the model makes of them."""

    inputs: dict[str, torch.Tensor]  # `dropout_masks` has shape (calls, layers, width)
    outputs: dict[str, Any]


@torch.no_grad()
def spoken_case(model: TransformersModel, rows: int, calls: int) -> SpokenCase:
    """Let the eager model speak; one of several rows is padded."""
    config = model.config
    read = spoken_input(model, rows, _LENGTH)
    speaker = torch.randn(rows, config.speaker_embedding_dim, generator=torch.Generator().manual_seed(rows))
    speaker = speaker.to(model.dtype)
    first = read.get("input_ids", read.get("input_values"))
    with undisturbed(model=model):
        length = model.speecht5.encoder(first, attention_mask=read["attention_mask"])[0].shape[1]
        ratio = (calls + 0.5) * config.reduction_factor / length
        asked = {"threshold": _NEVER, "maxlenratio": ratio, "return_output_lengths": True}
        with undisturbed(seed=0):
            found = model.generate_speech(first, speaker, read["attention_mask"], **asked)[0]
    with undisturbed(seed=0):
        masks = torch.stack([drawn_masks(config, count, model.dtype) for count in range(1, calls + 1)])
    inputs = {**read, "speaker_embeddings": speaker, "dropout_masks": masks}
    return SpokenCase(inputs, {"spectrogram": found, "maxlenratio": ratio})


def difference_of_speech(generator: Generator, case: StoredCase) -> float:
    """Return the largest difference of a spectrogram to the stored one."""
    given, wanted = dict(case.inputs), case.outputs["spectrogram"]
    read = given.pop("input_ids", None)
    read = given.pop("input_values") if read is None else read
    masks = iter(given.pop("dropout_masks"))
    asked = {**given, "threshold": _NEVER, "maxlenratio": case.outputs["maxlenratio"], "return_output_lengths": True}
    found = speak(generator.parts, generator.settings, read, asked, masks)[0]
    if found.shape != wanted.shape:
        return math.inf
    return float((found.float() - wanted.float()).abs().max())
