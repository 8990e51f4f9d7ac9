"""Pad sound by zeros to the window that an encoder reads."""

from __future__ import annotations

import torch

from ..errors import InvalidArgumentError
from ..runners.runner import Runner

__all__ = ["padded_sound"]


def padded_sound(encoder: Runner, sound: torch.Tensor) -> torch.Tensor:
    """Pad sound by zeros to the window that an encoder reads, as Whisper pads it."""
    # sound: features of shape (batch, bins, frames)
    _, bins, frames = encoder.ports["input_features"].shape
    if bins is not None and sound.shape[1] != bins:
        raise InvalidArgumentError(
            f"input_features has {sound.shape[1]} bins, and {encoder.name} reads {bins}. Pass features of shape "
            f"(batch, {bins}, frames)."
        )
    if frames is None or sound.shape[2] == frames:
        return sound
    if sound.shape[2] > frames:
        raise InvalidArgumentError(
            f"input_features has {sound.shape[2]} frames, and {encoder.name} reads windows of {frames}. Longer sound "
            "takes several, which Whisper's own loop cuts:\n    generate(input_features=sound, return_timestamps=True)"
        )
    return torch.nn.functional.pad(sound, (0, frames - sound.shape[2]))
