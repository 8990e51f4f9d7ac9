"""Declare the entries of ``config.json`` and ``generation_config.json`` that generation reads, with their types."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

_Id = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Beams = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # each beam is a row with its own cache
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    bos_token_id: _Id | list[_Id] | None = None
    eos_token_id: _Id | list[_Id] | None = None
    pad_token_id: _Id | None = None
    decoder_start_token_id: _Id | None = None


@dataclasses.dataclass(frozen=True)
class _Vision:
    spatial_merge_size: Annotated[int, msgspec.Meta(ge=1, lt=2**16)] | None = None
    tokens_per_second: _Rate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entries(_Tokens):
    """Entries that generation reads from ``config.json`` and ``generation_config.json``; other entries are ignored."""

    max_new_tokens: _Count | None = None
    image_token_id: _Id | None = None
    image_token_index: _Id | None = None
    video_token_id: _Id | None = None
    video_token_index: _Id | None = None
    forced_bos_token_id: _Id | None = None
    forced_eos_token_id: _Id | list[_Id] | None = None
    repetition_penalty: _Rate | None = None
    encoder_repetition_penalty: _Rate | None = None
    no_repeat_ngram_size: _Count | None = None
    encoder_no_repeat_ngram_size: _Count | None = None
    bad_words_ids: list[list[_Id]] | None = None
    min_length: _Count | None = None
    min_new_tokens: _Count | None = None
    remove_invalid_values: bool | None = None
    suppress_tokens: list[_Id] | None = None
    begin_suppress_tokens: list[_Id] | None = None
    lang_to_id: dict[str, _Id] | None = None
    task_to_id: dict[str, _Id] | None = None
    is_multilingual: bool | None = None
    return_timestamps: bool | None = None
    no_timestamps_token_id: _Id | None = None
    prev_sot_token_id: _Id | None = None
    max_initial_timestamp_index: _Count | None = None
    max_source_positions: _Count | None = None
    model_type: str | None = None
    text_config: _Tokens | None = None
    vision_config: _Vision | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices(Entries):
    """Entries read from ``generation_config.json`` only, since in ``config.json`` a name may have another meaning."""

    max_length: _Count | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: _Count | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    num_beams: _Beams | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    num_return_sequences: _Beams | None = None


@dataclasses.dataclass(frozen=True)
class Described:
    """Entries that generation reads from the file ``yobx_flatten.json`` of an exported folder."""

    positions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    rereads_at_switch: bool | None = None
