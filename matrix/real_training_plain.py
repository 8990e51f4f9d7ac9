"""Train a task of `real_training_cases` as a script without a pipeline does: the Trainer on text, TRL's SFT on chats.

``python -m matrix.real_training_plain TASK FILE`` prints losses, seconds and answers as JSON, in a separate process.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from roundpipe_runtime.fine_tune import (
    Lora,
    add_lora,
    load_tokenizer,
    model_source,
    read_blocks,
    read_chats,
)
from roundpipe_runtime.fine_tune.trainer import Order

from .real_model import MODEL
from .real_training_cases import STEPS, TASKS, Task, generated, prompt_of
from .worker import be_quiet

__all__ = ["main"]


def main() -> int:
    """Train one task; print what came out as JSON."""
    be_quiet()
    name, file = sys.argv[1:]
    sys.stdout.write(json.dumps(_trained(TASKS[name], pathlib.Path(file))) + "\n")
    return 0


def _trained(task: Task, file: pathlib.Path) -> dict[str, Any]:
    import transformers

    source = model_source(MODEL)
    split: dict[str, Any] = {"length": task.length, "eval_share": 0.1, "vocab_size": source.vocab_size}
    rows = (read_chats if task.chat else read_blocks)([file], load_tokenizer(source), **split)
    model: Any = source.load(dtype=torch.float32)
    if task.lora is not None:
        model = add_lora(model, Lora.parse(task.lora))
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    before = _held_out(model, rows), _answer(model, tokenizer, task)
    order = Order(rows.training, seed=0, count=STEPS * task.batch, lengths=rows.lengths, batch=task.batch)
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc] # transformers counts as untyped
        def on_step_begin(self, *args: Any, **options: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)

    with tempfile.TemporaryDirectory() as folder:
        trainer = (_of_chats if task.chat else _of_text)(model, task, rows, order, tokenizer, file, folder)
        trainer.add_callback(Clock())
        trainer.train()
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "seconds": statistics.median(seconds),
        "held_out_before": before[0],
        "held_out": _held_out(model, rows),
        "answer_before": before[1],
        "answer": _answer(model, tokenizer, task),
    }


def _options(task: Task, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": task.batch, "learning_rate": task.lr,
        "lr_scheduler_type": "constant", "weight_decay": 0.01, "max_grad_norm": 1.0, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip


def _of_text(model: Any, task: Task, rows: Any, order: Any, tokenizer: Any, file: pathlib.Path, folder: str) -> Any:
    import transformers

    class InOurOrder(transformers.Trainer):  # type: ignore[misc] # as above
        def _get_train_sampler(self, *args: Any) -> Any:
            return order

    args = transformers.TrainingArguments(**_options(task, folder))
    data = [{"input_ids": row.long(), "labels": row.long()} for row in rows.tokens]
    return InOurOrder(model=model, args=args, train_dataset=data)


def _of_chats(model: Any, task: Task, rows: Any, order: Any, tokenizer: Any, file: pathlib.Path, folder: str) -> Any:
    import trl
    from datasets import Dataset

    class InOurOrder(trl.SFTTrainer):  # type: ignore[misc] # TRL counts as untyped
        def _get_train_sampler(self, *args: Any) -> Any:
            return order

    args = trl.SFTConfig(**_options(task, folder), max_length=task.length, bf16=False)
    data = Dataset.from_list([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()])
    return InOurOrder(model=model, args=args, train_dataset=data, processing_class=tokenizer)


@torch.no_grad()
def _held_out(model: Any, rows: Any) -> float:
    """The mean over the tokens that count of the held-out rows, one row at a time."""
    model.eval()
    losses, counts = [], []
    for number in rows.held_out.tolist():
        row = rows[number]
        labels = row["labels"][None]
        counts.append(int((labels[:, 1:] != -100).sum()))
        losses.append(float(model(input_ids=row["input_ids"][None], labels=labels).loss) * counts[-1])
    model.train()
    return math.fsum(losses) / sum(counts)


def _answer(model: Any, tokenizer: Any, task: Task) -> str:
    model.eval()
    found = str(tokenizer.decode(generated(model, prompt_of(tokenizer, task)), skip_special_tokens=True)).strip()
    model.train()
    return found


if __name__ == "__main__":
    sys.exit(main())
