"""The two configurations of a model, as its folder has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["Documents"]

# entries of a generation_config.json that Whisper's own loop reads
_OF_SPEECH = ("lang_to_id", "no_timestamps_token_id")


@dataclasses.dataclass(frozen=True)
class Documents:
    """What ``config.json`` and ``generation_config.json`` hold."""

    config: Mapping[str, Any] = dataclasses.field(repr=False)  # the configuration of the model
    # the configuration of its generation; empty where there is none
    generation: Mapping[str, Any] = dataclasses.field(repr=False)

    @property
    def is_speech(self) -> bool:
        """Whether they are of a Whisper, with languages and times that its own loop finds out."""
        stated = any(self.generation.get(name) is not None for name in _OF_SPEECH)
        return stated and bool(self.config.get("max_source_positions"))
