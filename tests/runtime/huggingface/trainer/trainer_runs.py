"""Fine-tuning scripts for small models of six kinds: bytes of source files, rows of unequal length, padded batches."""

import functools
import json
import os
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer

MODELS = ["llama", "gemma3", "mixtral", "gpt2", "t5", "bert"]
# What a value of the log may differ by: transformers 4 rounds losses to four digits.
TOLERANCE = 1e-5 if int(transformers.__version__.partition(".")[0]) >= 5 else 1.1e-4
_PAD, _SEPARATOR, _BYTES = 0, 1, 2  # a byte b is the token b + 2
_VOCABULARY = 258
_COMMON = {"vocab_size": _VOCABULARY, "pad_token_id": _PAD, "bos_token_id": _SEPARATOR, "eos_token_id": _SEPARATOR}
_DECODER = {
    **_COMMON, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def make_model(name: str, *, dropout: float = 0.0, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, attention_dropout=dropout))
    if name == "gemma3":
        config = transformers.Gemma3TextConfig(**_DECODER, sliding_window=8, layer_types=None, query_pre_attn_scalar=8)
        return transformers.Gemma3ForCausalLM(config)
    if name == "mixtral":
        config = transformers.MixtralConfig(**_DECODER, num_local_experts=4, output_router_logits=True)
        return transformers.MixtralForCausalLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            **_COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=64,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "t5":
        config = transformers.T5Config(
            **_COMMON, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, dropout_rate=dropout,
            decoder_start_token_id=_PAD,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY, pad_token_id=_PAD, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=64, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@functools.cache
def _text() -> bytes:
    return Path(json.decoder.__file__).read_bytes()


def make_rows(name: str, count: int, start: int = 0) -> list[dict]:
    """Rows of 9 to 40 tokens: text to continue, to repeat from the middle, or to classify by its first letter."""
    rows, position = [], start
    for number in range(count):
        length = 9 + (number * 13) % 32
        tokens = [byte + _BYTES for byte in _text()[position : position + length]]
        position += length
        if name == "bert":
            rows.append({"input_ids": tokens, "labels": tokens[0] % 3})
        elif name == "t5":
            rows.append({"input_ids": tokens, "labels": tokens[length // 2 :]})
        else:
            rows.append({"input_ids": tokens, "labels": tokens})
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Rows padded on the right; what is padded is masked, and ignored by the loss."""
    ids = _padded([row["input_ids"] for row in rows], _PAD)
    labels = [row["labels"] for row in rows]
    labels = torch.tensor(labels) if isinstance(labels[0], int) else _padded(labels, -100)
    return {"input_ids": ids, "attention_mask": (ids != _PAD).long(), "labels": labels}


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def arguments(folder: Path, steps: int, *, kind: type[TrainingArguments] | None = None, **changes) -> TrainingArguments:
    """A schedule with warm-up, accumulation, clipping that clips, evaluation, and every loss in the log."""
    options = {
        "max_steps": steps, "learning_rate": 3e-3, "weight_decay": 0.01, "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 3, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": max(1, steps // 2), "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "seed": 7,
    }  # fmt: skip
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves it behind after ``bf16=True``
    return (kind or TrainingArguments)(output_dir=str(folder), **{**options, **changes})


def make_trainer(name: str, args: TrainingArguments, kind: type[Trainer] = Trainer, **options) -> Trainer:
    """The script: a plain Trainer, or with ``kind`` the one whose model runs through a pipeline of two devices."""
    if issubclass(kind, RoundPipeTrainer):
        options = {"devices": "virtual:2", "microbatches": 3, **options}
    options.setdefault("model", make_model(name) if "model_init" not in options else None)
    rows = {"train_dataset": make_rows(name, 37), "eval_dataset": make_rows(name, 7, start=3000)}
    trainer = kind(args=args, **{"data_collator": collate, **rows, **options})
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def history(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]
