"""Store cases of a folder: calls of its files, and what the model generates."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import torch

from ..export.proof.quality import SCORES, text_losses
from ..export.proof.replay import Case
from ..export.quantization.text_cases import text_cases
from ..recipe.aliases import TransformersModel
from ..storage.cases import save_case
from .chat_prompts import CHAT_TOKENS, CHATS
from .pieces.text import Piece
from .spoken_case import spoken_case
from .stored_cases import PROMPT, generation_case, stored_calls

__all__ = ["CASES", "store_calls", "store_chats", "store_generation", "store_speech", "store_text"]

CASES = "cases"
"""The folder below an exported one in which cases are stored."""


def store_calls(piece: Piece, cases: Sequence[Case], work: pathlib.Path, below: str = CASES) -> list[str]:
    """Store the example and cases of a piece, with what the model returns; return their paths in the folder."""
    (work / below).mkdir(parents=True, exist_ok=True)
    names = []
    for number, (name, inputs, outputs) in enumerate(stored_calls(piece, cases)):
        # not .onnx: tools look for models by that suffix, also in folders below
        names.append(f"{below}/{piece.stem}-{number}.case")
        save_case(work / names[-1], inputs, outputs, name=name)
    return names


def store_text(piece: Piece, tokens: torch.Tensor, work: pathlib.Path, below: str = CASES) -> list[str]:
    """Store what the model makes of a text: its losses, since the scores are larger than the model."""
    names = []
    texts = tokens.split(len(piece.kwargs["input_ids"]))
    for number, (case, text) in enumerate(zip(text_cases(piece.module, piece.kwargs, tokens), texts, strict=True)):
        ((_, inputs, outputs),) = stored_calls(dataclasses.replace(piece, kwargs=case.kwargs), ())
        names.append(f"{below}/{piece.stem}-text-{number}.case")
        losses = text_losses(outputs[SCORES], inputs["input_ids"])
        save_case(work / names[-1], inputs, {**losses, "text": text}, name=case.name)
    return names


def store_generation(
    model: TransformersModel,
    task: str,
    batch: int | None,
    tokens: int,
    work: pathlib.Path,
    after: int = 0,
    below: str = CASES,
) -> str:
    """Store what the model generates, after a short prompt, or ``after`` so many tokens."""
    case = generation_case(model, task, batch or 3, tokens, after or PROMPT)
    outputs = {"sequences": case.sequences, "new_tokens": case.new_tokens, "margins": case.margins}
    path, text = f"{below}/generate{f'-{after}' if after else ''}.case", f"{case.new_tokens} tokens, greedily"
    save_case(work / path, case.inputs, outputs, name=f"{text}, after {after}" if after else text)
    return path


def store_speech(model: TransformersModel, rows: int, calls: int, work: pathlib.Path) -> str:
    """Store the spectrogram that the model makes."""
    case = spoken_case(model, rows, calls)
    path = "cases/generate.case"
    save_case(work / path, case.inputs, case.outputs, name=f"{calls} calls of the decoder, rows {rows}")
    return path


def store_chats(model: TransformersModel, task: str, prompts: dict[str, torch.Tensor], work: pathlib.Path) -> str:
    """Store what the model answers."""
    case = generation_case(model, task, tokens=CHAT_TOKENS, prompts=prompts)
    outputs = {"sequences": case.sequences, "new_tokens": case.new_tokens, "margins": case.margins}
    name = f"{len(case.sequences)} chats, {case.new_tokens} tokens, greedily"
    save_case(work / CHATS, case.inputs, outputs, name=name)
    return CHATS
