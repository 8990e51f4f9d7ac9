"""Folders exported once per run of tests, small models, a tokenizer of words, and other entries for a JSON file."""

import contextlib
import fcntl
import functools
import io
import json
import os
import pathlib
import tempfile
from typing import Any

import numpy
import onnxruntime
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer

from tests.models import SIZES
from yobx_flatten import export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.model_folder.source.configuration import small_model

_ROOT = tempfile.TemporaryDirectory(prefix="exported_folders")


@functools.cache
def saved(name: str) -> tuple[Any, pathlib.Path]:
    model = small_model(name)
    folder = pathlib.Path(_ROOT.name) / f"{name}-saved"
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return model, folder


@functools.cache
def exported(name: str, to: str = "onnx", optimize: str | None = None) -> tuple[Any, pathlib.Path]:
    """Return a small model and its exported folder; ONNX files without options are exported by the command line."""
    model, source = saved(name)
    shared = pathlib.Path(os.environ.get("TESTS_SHARED_FOLDER", _ROOT.name))
    folder = shared / f"{name}-{to}-{optimize}"
    # the processes of a run have the same models: one exports, the others wait and take what it wrote
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock, torch.no_grad():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists() and (to, optimize) == ("onnx", None):
            with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(shown):
                assert main(["export", str(source), "-o", str(folder)]) == 0, shown.getvalue()
        elif not folder.exists():
            export_folder(model, folder, to=to, optimize=optimize)
    return model, folder


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(59))]


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        mask_token="[MASK]",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}word9",
        **names,
    )


def made(kind: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).eval()


def bert_folder(folder: pathlib.Path, kind: str = "BertModel", **settings: Any) -> Any:
    config = transformers.BertConfig(vocab_size=len(WORDS), **SIZES, **settings)
    model = made(getattr(transformers, kind), config)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return model


def mean_embeddings(model: Any, given: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(given["input_ids"], attention_mask=given["attention_mask"])[0]
    weights = given["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def lively(model: Any) -> Any:
    """Draw large weights, so that the tokens of a model differ."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    return model


def run_file(folder: pathlib.Path, given: Any) -> dict[str, torch.Tensor]:
    """What onnxruntime returns for inputs of the one file of a folder, of which it may not take all."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    fed = {one.name: numpy.asarray(given[one.name]) for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return {name: torch.from_numpy(found) for name, found in zip(names, session.run(names, fed), strict=True)}


def restate(file: pathlib.Path, **entries: Any) -> None:
    held = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**held, **entries}), "utf-8")
