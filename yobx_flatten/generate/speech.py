"""Transcribe with the files of Whisper through transformers' own ``generate``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import FlattenError, InvalidArgumentError
from ..errors.dependencies import require
from .sampling import Sampling
from .steps import Steps


@dataclasses.dataclass(frozen=True)
class SpeechCall:
    """What a call asks of the loop, in addition to the sound."""

    # spoken language, as `"de"`; one for each row, or one for all; `None` to detect it
    language: str | list[str] | None = None
    task: str | None = None  # `"transcribe"` or `"translate"`; `None` for what the model does by itself
    return_timestamps: bool | None = None  # whether tokens of times stand around each segment; `None` for as configured

    def __post_init__(self) -> None:
        if self.return_timestamps not in (None, True, False):
            raise InvalidArgumentError(
                f"return_timestamps must be True or False, found {self.return_timestamps!r}. Times of words, of a "
                "folder that was exported with word_times=True, are\n    generate(..., return_token_timestamps=True)"
            )

    @property
    def asks(self) -> bool:
        """Whether anything is asked."""
        return any(value is not None for value in dataclasses.astuple(self))


def transcribe(
    steps: Steps,
    sound: torch.Tensor,
    mask: torch.Tensor | None,
    call: SpeechCall,
    sampling: Sampling | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Return the tokens of ``model.generate``, without those that begin every text."""
    # sound: features of shape (batch, bins, frames), of any number of frames
    # mask: a mask of (batch, frames), 0 where a row is padded; `None` without padding
    # sampling: how tokens are drawn; `None` for the likeliest
    # options: further arguments of `model.generate`
    require("transformers", purpose="transcription", extra="transformers")
    asked: dict[str, Any] = {**dataclasses.asdict(call), **options, "attention_mask": mask}
    draws = sampling is not None and sampling.do_sample
    if sampling is not None and draws:
        names = ("temperature", "top_p", "min_p", "typical_p")
        asked |= {name: getattr(sampling, name) for name in names} | {"top_k": sampling.top_k or 0}
    seed = sampling.seed if sampling is not None and draws else None
    from .model_of_files import model_of_files

    model = model_of_files(steps)
    with torch.no_grad(), contextlib.nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        given = {name: value for name, value in asked.items() if value is not None}
        found = refusals_named("Whisper's generate", lambda: model.generate(sound, **given))
    assert isinstance(found, torch.Tensor)
    return found


def refusals_named(what: str, call: Callable[[], Any]) -> Any:
    """Return what a call of transformers returns, with its refusals as errors of this package."""
    try:
        return call()
    except FlattenError:
        raise
    except ValueError as error:
        raise InvalidArgumentError(f"{what} refuses this call: {error}") from error
