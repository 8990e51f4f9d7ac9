"""Export a model with trained weights in each form, and measure its answers, and how near they are."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch

from yobx_flatten.export import Quantization

from .cases import DifferenceError
from .real_model import GGUF, MODEL
from .real_texts import QUESTIONS, text_tokens
from .worker import be_quiet, run_columns

__all__ = ["COLUMNS", "FORMS", "NEEDS", "RealTrial", "build_peer", "divergence", "open_peer", "perplexity", "run_type"]


@dataclasses.dataclass(frozen=True)
class Form:
    """How the model is exported, and how near its answers have to be."""

    options: Mapping[str, Any]
    tokens: float  # least share of greedy tokens that are the model's, after its own text
    perplexity: float  # largest perplexity, relative to the model's
    source: str = "model"  # the GGUF file, or weights that were moved off the integers that they are
    genai: str | None = None  # precision for its builder, where that writes the folder
    is_right: bool = True  # whether the first answer has to be


_FUSED = {"optimize": "onnxruntime"}


def _in_int8(weights: str, activations: str = "int8") -> dict[str, Any]:
    """Options for the fastest file, which rounds what is multiplied with its weights."""
    return {**_FUSED, "quantize": Quantization(weights, activations=activations)}


_SIZES = {"bounds": {"batch": 1, "length": 4352}}  # 4,096 tokens in the cache, and an answer
FORMS: dict[str, Form] = {
    "float32": Form({}, 1.0, 1.0001),
    "float32 fused": Form(_FUSED, 1.0, 1.0001),
    "float16 fused": Form({**_FUSED, "dtype": "float16"}, 0.98, 1.005),
    "int8 fused": Form({**_FUSED, "quantize": "int8"}, 0.97, 1.01),
    "int4 fused": Form({**_FUSED, "quantize": "int4"}, 0.97, 1.01),
    "GGUF fused": Form(_FUSED, 0.99, 1.001, source="gguf"),
    "other weights int8 fused": Form({**_FUSED, "quantize": "int8"}, 0.97, 1.01, source="moved"),
    "other weights int4 fused": Form({**_FUSED, "quantize": "int4"}, 0.95, 1.05, source="moved"),
    "int4 fused split inputs": Form(_in_int8("int4", "split"), 0.98, 1.01),
    "int4 fused rounded inputs": Form(_in_int8("int4"), 0.95, 1.01, is_right=False),
    "other weights int8 fused rounded inputs": Form(_in_int8("int8"), 0.95, 1.02, source="moved", is_right=False),
    "OpenVINO": Form({"target": "openvino"}, 1.0, 1.0001),
    "AOTInductor": Form({"target": "aotinductor"}, 1.0, 1.0001),
    "ExecuTorch": Form({"target": "executorch", **_SIZES}, 1.0, 1.0001),
    "genai builder float32": Form({}, 1.0, 1.0001, genai="fp32"),
    "genai builder int4": Form({}, 0.0, 2.0, genai="int4"),
}
"""By name: what is measured. Other weights are those of the model, each moved by up to a 2000th."""

_NEW = 50


@dataclasses.dataclass
class RealTrial:
    """One form on its way through the columns."""

    name: str
    place: pathlib.Path

    @property
    def form(self) -> Form:
        """How it is exported."""
        return FORMS[self.name]

    @property
    def folder(self) -> pathlib.Path:
        """Where its files are."""
        return self.place / "folder"

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's own."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(MODEL)

    @functools.cached_property
    def model(self) -> Any:
        """The model in float32, which everything is compared with."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
        if self.form.source == "moved":
            draw = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():
                    weight *= 1 + (torch.rand(weight.shape, generator=draw) - 0.5) * 1e-3
        return model

    @functools.cached_property
    def scores(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Scores of the files for tokens of shape (length,): float32 of shape (length, vocabulary)."""
        if self.form.genai is not None:
            return _genai_scores(self.folder)
        from yobx_flatten import open_model

        opened = open_model(self.folder, threads=1, trust=True)  # as `generate`: ExecuTorch has one pool

        def scores(tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = opened(input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None]).logits
            return found[0].float()

        return scores

    @functools.cached_property
    def generate(self) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """Add greedy tokens to a prompt of shape (1, length), in one thread."""
        if self.form.genai is not None:
            return functools.partial(_genai_tokens, self.folder)
        from yobx_flatten import open_generator

        generator = open_generator(self.folder, threads=1, trust=True)
        return lambda prompt, new: generator.generate(prompt, max_new_tokens=new)

    def exported(self) -> dict[str, Any]:
        """Write the folder; return CPU seconds, bytes and peak memory."""
        from yobx_flatten import export_folder

        if self.form.source == "moved":
            self.model.save_pretrained(self.place / "moved")
            self.tokenizer.save_pretrained(self.place / "moved")
        source = {"model": MODEL, "gguf": GGUF, "moved": self.place / "moved"}[self.form.source]
        start = time.process_time(), _children()
        if self.form.genai is not None:
            build_peer(source, self.folder, self.form.genai)
        else:
            export_folder(source, self.folder, **self.form.options)
        sizes = [file.stat().st_size for file in self.folder.iterdir() if _holds_weights(file)]
        return {
            "processor_seconds": round(time.process_time() - start[0] + _children() - start[1], 1),
            "bytes": sum(sizes),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    @functools.cached_property
    def chats(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Prompts in the template, and the model's own answers."""
        found = []
        for question in QUESTIONS:
            prompt = self._prompt([{"role": "user", "content": question}])
            found.append((prompt, self._answer(prompt)))
        return found

    def answered(self) -> dict[str, Any]:
        """Ask ten questions; return the share of greedy tokens, the divergence, and an answer to read."""
        equal = compared = 0
        divergences = []
        for prompt, answer in self.chats:
            whole = torch.cat([prompt, answer])
            span = slice(len(prompt) - 1, len(whole) - 1)
            found, wanted = self.scores(whole)[span], self._own_scores(whole)[span]
            equal += int((found.argmax(-1) == answer).sum())
            compared += len(answer)
            divergences.append(divergence(wanted, found))
        prompt, _ = self.chats[0]
        text = self.tokenizer.decode(self.generate(prompt[None], 20)[0][len(prompt) :], skip_special_tokens=True)
        if self.form.is_right and "Paris" not in text:
            raise DifferenceError(f"{QUESTIONS[0]} {text}")
        return self.near({"tokens": equal / compared, "compared": compared}) | {
            "divergence": sum(divergences) / len(divergences),
            "answer": text.strip(),
        }

    def talked(self) -> dict[str, Any]:
        """Ask twice in one conversation, and once with a text of more than 1,000 tokens."""
        turns = [
            {"role": "user", "content": "My name is Ada. What is 2 plus 2?"},
            {"role": "assistant", "content": "Hello Ada, 2 plus 2 is 4."},
            {"role": "user", "content": "And what is my name?"},
        ]
        article = self.tokenizer.decode(text_tokens(self.tokenizer, "help topics", 1000))
        long = [{"role": "user", "content": f"{article}\n\nWhat is this text about?"}]
        equal = compared = 0
        for messages in (turns, long):
            prompt = self._prompt(messages)
            answer = self._answer(prompt)
            whole = torch.cat([prompt, answer])
            found = self.scores(whole)[len(prompt) - 1 : len(whole) - 1].argmax(-1)
            equal, compared = equal + int((found == answer).sum()), compared + len(answer)
        few = 0.0 if self.form.tokens == 1 else 0.05  # a token is more than a hundredth of these
        return self.near({"tokens": equal / compared, "compared": compared}, few)

    def read(self) -> dict[str, Any]:
        """Read three texts of 1,024 tokens; return the perplexities relative to the model's."""
        found = {}
        for name in ("help topics", "source of Python", "licences"):
            tokens = text_tokens(self.tokenizer, name, 1024)
            own, files = (perplexity(of(tokens), tokens) for of in (self._own_scores, self.scores))
            found[name] = {"model": own, "ratio": files / own}
        worst = max(float(one["ratio"]) for one in found.values())
        if worst > self.form.perplexity:
            raise DifferenceError(f"perplexity {worst:.4f} of the model's; at most {self.form.perplexity}")
        return {"texts": found}

    def near(self, found: dict[str, Any], margin: float = 0.0) -> dict[str, Any]:
        """Return a result, unless fewer tokens are the model's than the form promises, less a margin."""
        least = self.form.tokens - margin
        if found["tokens"] < least:
            shown = f"{found['tokens']:.1%} of {found['compared']} tokens are the model's"
            raise DifferenceError(f"{shown}; at least {least:.0%}")
        return found

    def _prompt(self, messages: list[dict[str, str]]) -> torch.Tensor:
        found = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        return torch.as_tensor(found["input_ids"])[0]

    def _answer(self, prompt: torch.Tensor) -> torch.Tensor:
        ids = prompt[None]
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW, do_sample=False)
        return torch.as_tensor(made)[0, len(prompt) :]

    def _own_scores(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(self.model(input_ids=tokens[None]).logits)[0]


def perplexity(scores: torch.Tensor, tokens: torch.Tensor) -> float:
    """Return the perplexity of tokens of shape (length,) under scores of shape (length, vocabulary)."""
    return math.exp(float(torch.nn.functional.cross_entropy(scores[:-1], tokens[1:])))


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of scores of shape (length, vocabulary) from others, in nats."""
    logs = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def _holds_weights(file: pathlib.Path) -> bool:
    return file.name.startswith("model") and not file.name.endswith(".json")


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build_peer(source: pathlib.Path, folder: pathlib.Path, precision: str) -> None:
    """Let the builder of onnxruntime-genai write a folder."""
    import subprocess
    import sys

    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(folder)]
    options = ["-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
    subprocess.run([*builder, *options], check=True, capture_output=True)


def open_peer(folder: pathlib.Path) -> Any:
    """Open a folder with onnxruntime-genai, in one thread."""
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    config.overlay('{"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}')
    return genai.Model(config)


def _genai_tokens(folder: pathlib.Path, prompt: torch.Tensor, new: int) -> torch.Tensor:
    import onnxruntime_genai as genai

    model = _opened_by_genai(folder)
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=prompt.shape[1] + new, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(prompt.int().numpy())
    while not generator.is_done():
        generator.generate_next_token()
    return torch.tensor([[int(token) for token in generator.get_sequence(0)]])


@functools.cache
def _opened_by_genai(folder: pathlib.Path) -> Any:
    return open_peer(folder)


def _genai_scores(folder: pathlib.Path) -> Callable[[torch.Tensor], torch.Tensor]:
    import onnxruntime_genai as genai

    def scores(tokens: torch.Tensor) -> torch.Tensor:
        params = genai.GeneratorParams(model := _opened_by_genai(folder))
        params.set_search_options(max_length=len(tokens) + 1, do_sample=False)
        generator, found = genai.Generator(model, params), []
        for token in tokens:  # it states the scores of the last token alone
            generator.append_tokens(token.int().reshape(1, 1).numpy())
            found.append(torch.as_tensor(generator.get_logits()).reshape(-1).float().clone())
        return torch.stack(found)

    return scores


COLUMNS: dict[str, Callable[[RealTrial], dict[str, Any]]] = {
    "folder": RealTrial.exported,
    "chats": RealTrial.answered,
    "talks": RealTrial.talked,
    "texts": RealTrial.read,
}
NEEDS = dict.fromkeys(("chats", "talks", "texts"), "folder")


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run columns of one form in this process; see `worker.run_type`."""
    be_quiet()
    run_columns(RealTrial(name, folder), columns, known, events, (COLUMNS, NEEDS))
