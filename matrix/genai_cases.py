"""The columns of the table of onnxruntime-genai: does a folder pass its checks, and what does the library generate.

Models are those of `yobx-flatten export TYPE`: small, with random weights and a window of eight tokens. Those that read
sound or pictures are split as the library runs them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch

from .cases import DifferenceError, SkipColumnError
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "NEEDS", "SPLIT", "TYPES", "GenaiTrial", "generate", "run_type"]

SPLIT = ("whisper", "llava")
"""Models that read sound or a picture: folders with `layout="genai"`."""

TYPES = (
    *("llama", "qwen2", "mistral", "phi3", "phi", "gpt2", "gpt_neox", "gpt_bigcode", "gptj", "opt", "bloom", "falcon"),
    *("gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe", "mixtral", "olmo2", "olmoe", "granite", "starcoder2"),
    *("stablelm", "smollm3", "cohere", "cohere2", "glm4", "gpt_oss", "llama4_text", "ministral", "nemotron", "exaone4"),
    *SPLIT,
)
"""Decoders that transformers and onnxruntime-genai both know, some of each way to attend, and two that do not read text
alone."""

NEW = 30  # with nine of the prompt several times the window


@dataclasses.dataclass
class GenaiTrial:
    """One type on its way through the columns."""

    name: str
    place: pathlib.Path

    @functools.cached_property
    def model(self) -> Any:
        """The model, in float32."""
        from yobx_flatten.model_folder.source.configuration import small_config, small_model

        if self.name != "whisper":
            return small_model(self.name)
        from transformers import WhisperForConditionalGeneration

        config = small_config(self.name)
        config.max_source_positions = 1500  # the library hands over 30 seconds
        torch.manual_seed(0)
        return WhisperForConditionalGeneration(config).eval()

    def exported(self, optimize: str | None) -> dict[str, Any]:
        """Export the folder; return what was written."""
        from yobx_flatten import export_folder

        how: dict[str, Any] = {"layout": "genai"} if self.name in SPLIT else {}
        done = export_folder(self.model, self._folder(optimize), optimize=optimize, proof="sample", **how)
        (decoder,) = (report for file, report in done.reports.items() if file in _DECODERS)
        return {"cache": done.verified.manifest.cache, "operators": decoder.operators}

    def opened(self, optimize: str | None) -> dict[str, Any]:
        """Let the library generate; return how many tokens were compared."""
        import transformers

        folder = self._folder(optimize)
        if not (folder / "genai_config.json").exists():
            raise SkipColumnError("no genai_config.json: the library cannot provide such a cache")
        prompt, given, read = self._given()
        wanted = transformers.GenerationMixin.generate(
            self.model, **given, max_new_tokens=NEW, max_length=None, do_sample=False, num_beams=1
        )[0].tolist()
        if (
            wanted[-1]
            == json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["eos_token_id"]
        ):
            wanted.pop()  # a token that the library leaves away
        found = generate(folder, prompt[0].tolist(), NEW, read)[: len(wanted)]
        if found != wanted:
            pairs = zip(found, wanted, strict=False)
            same = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), len(found))
            raise DifferenceError(f"tokens differ from place {same} of {len(wanted)} on")
        return {"tokens": len(wanted) - prompt.shape[1]}

    def _given(self) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The tokens of a prompt, the arguments of the model, and what the library is handed over besides."""
        from yobx_flatten.model_folder.pieces.text import encoder_input
        from yobx_flatten.model_folder.pieces.vision_language import image_token_of, images_for, vision_modules

        prompt = torch.randint(4, 259, (1, 9), generator=torch.Generator().manual_seed(7))
        if self.name == "whisper":
            sound = {"input_features": encoder_input(self.model, 1, 0)}
            return prompt, {**sound, "decoder_input_ids": prompt}, sound
        if self.name not in SPLIT:
            return prompt, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, {}
        picture, token = images_for(self.model, 1), image_token_of(self.model)
        with torch.no_grad():
            count = vision_modules(self.model)[0](self.model)(picture)["image_features"].shape[-2]
        prompt[prompt == token] = token + 1
        prompt = torch.cat([prompt[:, :2], prompt.new_full((1, count), token), prompt[:, 2:]], dim=1)
        given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "pixel_values": picture}
        return prompt, given, {"pixel_values": picture, "num_image_tokens": torch.tensor([count])}

    def _folder(self, optimize: str | None) -> pathlib.Path:
        return self.place / (optimize or "growing")


_DECODERS = ("model.onnx", "decoder.onnx", "decoder_model_merged.onnx")


def generate(
    folder: pathlib.Path, prompt: list[int], new: int, read: Mapping[str, torch.Tensor] | None = None
) -> list[int]:
    """Return the prompt and the tokens that onnxruntime-genai adds to it, greedily.

    Args:
        folder: with a ``genai_config.json``.
        prompt: token ids.
        new: how many to add at most.
        read: sound or a picture, by the names of inputs; ``None``, the default, for text alone.
    """
    import numpy
    import onnxruntime_genai as genai

    params = genai.GeneratorParams(model := genai.Model(str(folder)))
    params.set_search_options(max_length=len(prompt) + new, do_sample=False)
    generator = genai.Generator(model, params)
    arrays = {name: tensor.numpy() for name, tensor in (read or {}).items()}  # not copied: they live until the end
    for name, array in arrays.items():
        generator.set_model_input(name, array)
    generator.append_tokens(numpy.array([prompt], numpy.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


COLUMNS: dict[str, Callable[[GenaiTrial], dict[str, Any]]] = {
    "folder": lambda trial: trial.exported(None),
    "opened": lambda trial: trial.opened(None),
    "folder for onnxruntime": lambda trial: trial.exported("onnxruntime"),
    "opened, shared cache": lambda trial: trial.opened("onnxruntime"),
}
NEEDS = {"opened": "folder", "opened, shared cache": "folder for onnxruntime"}


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run columns of one type in this process; see `worker.run_type`."""
    be_quiet()
    run_columns(GenaiTrial(name, folder), columns, known, events, (COLUMNS, NEEDS))
