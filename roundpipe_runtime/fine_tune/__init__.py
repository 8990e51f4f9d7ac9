"""Fine-tune a Hugging Face causal language model on text: the functions that ``roundpipe train`` calls.

This program trains a model and saves it; for conversations, call :func:`read_chats` instead of :func:`read_blocks`::

    source = model_source("model")  # a folder, a GGUF file, or a config.json
    tokenizer = load_tokenizer(source)
    blocks = read_blocks(["texts", "more.jsonl"], tokenizer, length=256, eval_share=0.05)
    model = source.load()
    with Training(model, blocks, Settings(batch=8, steps=100)) as training:
        run(training, checkpoints="checkpoints", show=print)
    save_model(model, tokenizer, "trained", source=source)
"""

from __future__ import annotations

from ..errors import FineTuneError
from .adapters import Lora, add_lora, quantize_aware
from .data.chat_rows import ChatRows, Rows, make_chat_rows, read_chats
from .data.conversations import ChatTokens
from .data.text_files import Blocks, make_blocks, read_blocks
from .job import Job, named_error
from .models import ByteTokenizer, ModelSource, Tokenizer, load_tokenizer, model_source
from .records import (
    EvalRecord,
    StepRecord,
    check_curve,
    check_disk,
    check_output,
    check_place,
    model_card,
    replace_card,
    save_curve,
    save_model,
)
from .settings import Settings
from .training import Outcome, Training, run, stored_replicas, timeline_of_rank

__all__ = [  # noqa: RUF022 # in the order of use
    # a model and its tokenizer
    "ModelSource", "model_source", "Tokenizer", "ByteTokenizer", "load_tokenizer", "Lora", "add_lora", "quantize_aware",
    # text and conversations in rows
    "Rows", "Blocks", "make_blocks", "read_blocks", "ChatRows", "ChatTokens", "make_chat_rows", "read_chats",
    # a training, in one or several processes
    "Settings", "Training", "StepRecord", "EvalRecord", "run", "Outcome", "stored_replicas", "timeline_of_rank", "Job",
    "named_error",
    # results
    "check_output", "check_place", "check_disk", "save_model", "model_card", "replace_card", "check_curve",
    "save_curve",
    # what can be wrong
    "FineTuneError",
]  # fmt: skip
