"""Does a fine-tuning on conversations through the pipeline learn what TRL's does, with a real model?

    python -m benchmarks.bench_chat MODEL TEXT [--steps 12] [--json FILE]

MODEL is a folder with weights and a chat template, TEXT a file of English. A chat set is made of it: each paragraph is
asked for by its first words. The same rows, in the same order, go through `SFTTrainer` of TRL and through the pipeline,
whose virtual devices have a limited memory; all weights are trained, and adapters of rank 8. Every run has a process of
its own, of which the peak of memory is stated.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.bench_flatten import machine  # found there only
from roundpipe_runtime import VirtualDevice
from roundpipe_runtime.fine_tune import (
    ChatRows,
    EvalRecord,
    Lora,
    Settings,
    StepRecord,
    Training,
    add_lora,
    load_tokenizer,
    model_source,
    read_chats,
    run,
)
from roundpipe_runtime.fine_tune.order import Order

LENGTH, ROWS, RATES = 64, 4, {"full": 2e-5, "lora": 2e-4}
QUESTION = "Continue this paragraph: {}"


def chat_set(text: pathlib.Path, file: pathlib.Path) -> None:
    """Write a question and an answer for each paragraph of more than twelve words."""
    paragraphs = [" ".join(part.split()) for part in text.read_text(encoding="utf-8").split("\n\n")]
    with open(file, "w", encoding="utf-8") as out:
        for paragraph in paragraphs:
            words = paragraph.split()
            if len(words) > 12:
                asked = {"role": "user", "content": QUESTION.format(" ".join(words[:6]))}
                answer = {"role": "assistant", "content": " ".join(words[6:30])}
                out.write(json.dumps({"prompt": [asked], "completion": [answer]}) + "\n")


def rows_of(model: str, file: pathlib.Path) -> ChatRows:
    return read_chats([file], load_tokenizer(model_source(model)), length=LENGTH)


def learner(model: str, way: str) -> Any:
    loaded = model_source(model).load(dtype=torch.float32)
    return add_lora(loaded, Lora.parse("8")) if way == "lora" else loaded


def piped(model: str, file: pathlib.Path, way: str, steps: int, memory: int) -> dict[str, Any]:
    """Losses of the pipeline, and seconds of a step."""
    devices = [VirtualDevice(f"virtual:{number}", memory_limit=memory) for number in range(2)]
    records: list[StepRecord | EvalRecord] = []
    settings = Settings(
        batch=ROWS, microbatches=2, steps=steps, lr=RATES[way], warmup=0, schedule="constant", devices=devices,
        check=False,
    )  # fmt: skip
    with Training(learner(model, way), rows_of(model, file), settings) as training:
        run(training, show=records.append)
    found = [record for record in records if isinstance(record, StepRecord)]
    return {"losses": [one.loss for one in found], "seconds": [one.seconds for one in found]}


def plain(model: str, file: pathlib.Path, way: str, steps: int) -> dict[str, Any]:
    """Losses of TRL's trainer, and seconds of a step."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    rows = rows_of(model, file)

    class InOurOrder(trl.SFTTrainer):  # type: ignore[misc] # TRL counts as untyped
        def _get_train_sampler(self, *args: Any) -> Any:
            return Order(rows.training, seed=0, count=steps * ROWS, lengths=rows.lengths, batch=ROWS)

    class Clock(TrainerCallback):  # type: ignore[misc] # as above
        def on_step_begin(self, *args: Any, **options: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            seconds.append(time.perf_counter() - self.begin)

    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        args = trl.SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=RATES[way],
            lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, max_length=LENGTH, gradient_checkpointing=False, bf16=False,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = InOurOrder(
            model=learner(model, way),
            args=args,
            train_dataset=Dataset.from_list([json.loads(line) for line in file.read_text().splitlines()]),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    return {"losses": [row["loss"] for row in trainer.state.log_history if "loss" in row], "seconds": seconds}


def measure(model: str, text: pathlib.Path, steps: int, memory: int) -> dict[str, Any]:
    sizes = {"steps": steps, "rows": ROWS, "length": LENGTH, "device memory": memory}
    made_of = {"model": pathlib.Path(model).name, "text": text.name}
    found: dict[str, Any] = {**made_of, **sizes, "torch": torch.__version__, "machine": machine()}
    for way in RATES:
        for side in ("plain", "piped"):
            words = [sys.executable, "-m", "benchmarks.bench_chat", model, str(text), "--steps", str(steps),
                     "--memory", str(memory), "--only", f"{way} {side}"]  # fmt: skip
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found[f"{way} {side}"] = json.loads(done.stdout.splitlines()[-1])
            print(way, side, found[f"{way} {side}"], flush=True)
        one, other = (found[f"{way} {side}"]["losses"] for side in ("plain", "piped"))
        found[f"{way}: largest relative difference"] = max(abs(a - b) / a for a, b in zip(one, other, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("text", nargs="?", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory", type=int, default=800_000_000, help="bytes of each virtual device")
    parser.add_argument("--only", help="one run, in this process: full piped")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    if given.text is None:
        print("name a folder with weights and a chat template, and a text: none of them is part of this project")
        return
    if not given.only:
        found = measure(given.model, given.text, given.steps, given.memory)
        print(json.dumps({name: value for name, value in found.items() if "difference" in name}))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    way, side = given.only.split()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "chats.jsonl"
        chat_set(given.text, file)
        if side == "piped":
            result = piped(given.model, file, way, given.steps, given.memory)
        else:
            result = plain(given.model, file, way, given.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({**result, "peak bytes": peak}) + os.linesep)


if __name__ == "__main__":
    main()
