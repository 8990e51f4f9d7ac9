"""The columns of the table of onnxruntime-genai: is a folder proven, and what does the library generate with it.

Models are those of `yobx-flatten export TYPE`: small, with random weights and a window of eight tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .cases import DifferenceError, SkipColumnError
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "NEEDS", "TYPES", "GenaiTrial", "generate", "run_type"]

TYPES = (
    *("llama", "qwen2", "mistral", "phi3", "phi", "gpt2", "gpt_neox", "gpt_bigcode", "gptj", "opt", "bloom", "falcon"),
    *("gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe", "mixtral", "olmo2", "olmoe", "granite", "starcoder2"),
    *("stablelm", "smollm3", "cohere", "cohere2", "glm4", "gpt_oss", "llama4_text", "ministral", "nemotron", "exaone4"),
)
"""Decoders that transformers and onnxruntime-genai both know, and some of each way to attend."""

NEW = 30  # with nine of the prompt several times the window


@dataclasses.dataclass
class GenaiTrial:
    """One type on its way through the columns."""

    name: str
    place: pathlib.Path

    @functools.cached_property
    def model(self) -> Any:
        """The model, in float32."""
        from yobx_flatten.model_folder.source.tiny_models import small_model

        return small_model(self.name)

    def exported(self, optimize: str | None) -> dict[str, Any]:
        """Export the folder; return what was written."""
        from yobx_flatten import export_folder

        done = export_folder(self.model, self._folder(optimize), optimize=optimize, proof="sample")
        return {"cache": done.verified.manifest.cache, "operators": done.reports["model.onnx"].operators}

    def opened(self, optimize: str | None) -> dict[str, Any]:
        """Let the library generate; return how many tokens were compared."""
        folder = self._folder(optimize)
        if not (folder / "genai_config.json").exists():
            raise SkipColumnError("no genai_config.json: the library cannot provide such a cache")
        prompt = torch.randint(4, 259, (1, 9), generator=torch.Generator().manual_seed(7))
        wanted = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, num_beams=1
        )[0].tolist()
        if (
            wanted[-1]
            == json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["eos_token_id"]
        ):
            wanted.pop()  # a token that the library leaves away
        found = generate(folder, prompt[0].tolist(), NEW)[: len(wanted)]
        if found != wanted:
            pairs = zip(found, wanted, strict=False)
            same = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), len(found))
            raise DifferenceError(f"tokens differ from place {same} of {len(wanted)} on")
        return {"tokens": len(wanted) - prompt.shape[1]}

    def _folder(self, optimize: str | None) -> pathlib.Path:
        return self.place / (optimize or "growing")


def generate(folder: pathlib.Path, prompt: list[int], new: int) -> list[int]:
    """Return the prompt and the tokens that onnxruntime-genai adds to it, greedily.

    Args:
        folder: with a ``genai_config.json``.
        prompt: token ids.
        new: how many to add at most.
    """
    import numpy
    import onnxruntime_genai as genai

    params = genai.GeneratorParams(model := genai.Model(str(folder)))
    params.set_search_options(max_length=len(prompt) + new, do_sample=False)
    generator = genai.Generator(model, params)
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
