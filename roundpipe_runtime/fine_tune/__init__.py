"""Fine-tune a Hugging Face causal language model on text: the functions that ``roundpipe train`` calls.

::

    source = model_source("model")                       # a folder, a GGUF file, or a config.json
    tokenizer = load_tokenizer(source)                   # its own, or bytes
    blocks = read_blocks(["texts", "more.jsonl"], tokenizer, length=256, eval_share=0.05)
    model = source.load()
    # or conversations: blocks = read_chats(["chats.jsonl"], tokenizer, length=512)
    with Training(model, blocks, Settings(batch=8, steps=100)) as training:
        run(training, checkpoints="checkpoints", show=print)
    save_model(model, tokenizer, "trained", source=source)
"""

from __future__ import annotations

from .adapters import Lora, add_lora
from .data.blocks import Blocks, make_blocks, read_blocks
from .data.chat_rows import ChatRows, make_chat_rows, read_chats
from .data.chat_tokens import ChatTokens
from .data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from .errors import FineTuneError
from .job import Job, named_error
from .model_card import check_curve, model_card, replace_card, save_curve, sparkline
from .models import ModelSource, model_source
from .quantize_aware import quantize_aware
from .records import EvalRecord, StepRecord
from .rows import Rows
from .run import Outcome, run, timeline_of_rank
from .saved_model import check_disk, check_output, check_place, save_model
from .settings import BatchSettings, LearningSettings, Settings
from .training import Training, stored_replicas

__all__ = [  # noqa: RUF022 # in the order of use
    # a model and its tokenizer
    "ModelSource",
    "model_source",
    "Tokenizer",
    "ByteTokenizer",
    "load_tokenizer",
    "Lora",
    "add_lora",
    "quantize_aware",
    # text and conversations in rows
    "Rows",
    "Blocks",
    "make_blocks",
    "read_blocks",
    "ChatRows",
    "ChatTokens",
    "make_chat_rows",
    "read_chats",
    # the training
    "Settings",
    "BatchSettings",
    "LearningSettings",
    "Training",
    "StepRecord",
    "EvalRecord",
    "run",
    "Outcome",
    "stored_replicas",
    "timeline_of_rank",
    # several processes
    "Job",
    "named_error",
    # what came of it
    "check_output",
    "check_place",
    "check_disk",
    "save_model",
    "model_card",
    "replace_card",
    "check_curve",
    "save_curve",
    "sparkline",
    # what can be wrong
    "FineTuneError",
]
