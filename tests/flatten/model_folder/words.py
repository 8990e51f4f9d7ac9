"""A tokenizer of words, made without files of other projects, small models, and other entries for a JSON file."""

import json
import pathlib
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

__all__ = ["WORDS", "made", "restate", "word_tokenizer"]

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


def restate(file: pathlib.Path, **entries: Any) -> None:
    held = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**held, **entries}), "utf-8")
