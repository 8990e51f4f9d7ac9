"""The first tokens of a transcript, as Whisper's own ``generate`` puts them before the text: language, task, no times.

.. code-block:: text

    start ── language ── task ── no times ── text           <|startoftranscript|> <|de|> <|transcribe|> <|notimestamps|>
              stated, or the likeliest after the start
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch

from ..errors import GenerationError

__all__ = ["SpokenPrompt", "spoken_prompt_of"]

_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


@dataclasses.dataclass(frozen=True)
class SpokenPrompt:
    """What comes after the start of a transcript.

    Attributes:
        languages: tokens of languages, of which the likeliest one comes first; empty where none is detected.
        following: the tokens after it.
        longest: positions of the decoder; ``max_length`` does not count the prompt, and these do.
    """

    languages: tuple[int, ...]
    following: tuple[int, ...]
    longest: int

    def with_prompt(self, max_length: int, begun: int) -> int:
        """Return the tokens of a row at most: ``max_length`` does not count those that it begins with.

        Args:
            max_length: as the configuration states it.
            begun: tokens of the prompt.
        """
        return min(max_length + min(self.longest // 2 - 1, begun), self.longest)

    def after(self, start: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        """Return the whole prompt, int64 of shape (batch, length).

        Args:
            start: the start tokens, of shape (batch, 1).
            scores: scores of the token after them, where a language is detected.
        """
        parts = [start]
        if scores is not None:
            languages = torch.tensor(self.languages)
            parts.append(languages[scores[:, languages].argmax(-1)][:, None])
        parts.append(torch.tensor(self.following, dtype=torch.int64).expand(len(start), -1))
        return torch.cat(parts, dim=1)


@dataclasses.dataclass(frozen=True)
class _Stated:
    lang_to_id: dict[str, _Id] | None = None
    task_to_id: dict[str, _Id] | None = None
    language: str | None = None
    task: str | None = None
    no_timestamps_token_id: _Id | None = None
    forced_decoder_ids: list[tuple[int, _Id | None]] | None = None
    max_target_positions: Annotated[int, msgspec.Meta(ge=1)] = 448


def spoken_prompt_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> SpokenPrompt | None:
    """Return what comes after the start of a transcript; ``None`` for models other than Whisper.

    Args:
        config: the configuration of the model.
        generation: the configuration of its generation.

    Raises:
        GenerationError: when it states a language or a task that the model does not have.
    """
    if config.get("model_type") != "whisper":
        return None
    names = [field.name for field in dataclasses.fields(_Stated)]
    given = {name: config.get(name) for name in ("max_target_positions", "forced_decoder_ids")}
    given |= {name: generation[name] for name in names if generation.get(name) is not None}
    stated = msgspec.convert({name: value for name, value in given.items() if value is not None}, _Stated)
    tasks, forced = stated.task_to_id or {}, []
    if stated.task is None and stated.language is None:
        forced = [token for _, token in sorted(stated.forced_decoder_ids or [])]
    has_language = bool(forced) and forced[0] is not None
    detected = () if has_language or stated.language is not None else tuple((stated.lang_to_id or {}).values())
    following = [token for token in forced if token is not None]
    if stated.language is not None:
        following.insert(0, _id_of(stated.language, stated.lang_to_id or {}, "language"))
    if stated.task is not None or (stated.language is not None and tasks):
        following.append(_id_of(stated.task or "transcribe", tasks, "task"))
    no_times = stated.no_timestamps_token_id
    if no_times is not None and following[-1:] != [no_times]:
        following.append(no_times)
    return SpokenPrompt(detected, tuple(following), stated.max_target_positions)


def _id_of(word: str, known: Mapping[str, int], what: str) -> int:
    found = known.get(word, known.get(f"<|{word.lower()}|>"))
    if found is None:
        raise GenerationError(
            f"generation_config.json states the {what} {word!r}, and the model knows {', '.join(known) or 'none'}."
        )
    return found
