"""Train a model with trained weights by one command, compare with the plain Trainer, and use the trained model."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch

from .cases import DifferenceError, SkipColumnError
from .real_model import MODEL
from .real_texts import write_chats, write_text
from .worker import be_quiet, run_columns

__all__ = [
    "COLUMNS",
    "KILLED_AFTER",
    "NEEDS",
    "STEPS",
    "TASKS",
    "Task",
    "TrainingTrial",
    "generated",
    "prompt_of",
    "run_type",
]

STEPS = 12
BAR = 1e-5
KILLED_AFTER = 6
_NEW = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One training: the data, the way, and the size of the device."""

    chat: bool = False
    lora: str | None = None
    memory: str  # of the device; the next size below has room for the head in slices only
    lr: float
    length: int = 128
    batch: int = 4
    prompt: str = "Class definitions"

    @property
    def option(self) -> str:
        """The option that names the data."""
        return "--chat" if self.chat else "--text"


_ASKED = 'What does the help of Python say about "The "assert" statement"?'
TASKS: dict[str, Task] = {
    "text": Task(memory="760MB", lr=2e-5),
    "text with adapters": Task(memory="380MB", lr=2e-4, lora="8"),
    "chat": Task(chat=True, memory="760MB", lr=2e-5, prompt=_ASKED),
    "chat with adapters": Task(chat=True, memory="380MB", lr=2e-4, lora="8", prompt=_ASKED),
}
"""By name: what is measured."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """A process that has ended."""

    status: int
    output: str
    peak_bytes: int


@dataclasses.dataclass
class TrainingTrial:
    """One task on its way through the columns."""

    name: str
    place: pathlib.Path

    @property
    def task(self) -> Task:
        """The training that this trial runs."""
        return TASKS[self.name]

    @functools.cached_property
    def data(self) -> pathlib.Path:
        """The file of the text, or of the conversations."""
        file = self.place / ("chats.jsonl" if self.task.chat else "text.txt")
        (write_chats if self.task.chat else write_text)(file)
        return file

    @functools.cached_property
    def whole(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What the command took, and its metrics."""
        ran = _run(self._command("whole"))
        if ran.status:
            raise DifferenceError(ran.output.strip().splitlines()[-1])
        metrics = _metrics(self.place / "whole.jsonl")
        return {"peak_bytes": ran.peak_bytes, "seconds": _typical(metrics)}, metrics

    def refused(self) -> dict[str, Any]:
        """Ask for a device of a tenth of the model, with whole tables; return what is said."""
        tenth = f"{sum(file.stat().st_size for file in MODEL.glob('*.safetensors')) // 10_000_000}MB"
        ran = _run([*self._command("tenth"), "--memory", tenth, "--large-tables", "whole"])
        return {"memory": tenth, "trains": ran.status == 0, "said": ran.output.strip().splitlines()[-1]}

    def trained(self) -> dict[str, Any]:
        """Train plainly and through the pipeline; compare the losses of all steps, and what is written afterwards."""
        plain = _run([sys.executable, "-m", "matrix.real_training_plain", self.name, str(self.data)])
        if plain.status:
            raise DifferenceError(plain.output.strip().splitlines()[-1])
        other = json.loads(plain.output.strip().splitlines()[-1])
        taken, metrics = self.whole
        losses = [row["loss"] for row in metrics if "loss" in row]
        (held_out,) = (row["eval_loss"] for row in metrics if "eval_loss" in row)
        pairs = zip([*losses, held_out], [*other["losses"], other["held_out"]], strict=True)
        difference = max(abs(one - two) / two for one, two in pairs)
        if difference > BAR:
            raise DifferenceError(f"losses differ by {difference:.1e} of their size; at most {BAR:.0e}")
        return {
            "memory": self.task.memory,
            "difference": difference,
            "pipeline": {**taken, "losses": losses, "held_out": held_out, "answer": self._answer("whole")},
            "plain": {**other, "peak_bytes": plain.peak_bytes},
        }

    def resumed(self) -> dict[str, Any]:
        """Kill the command half-way and resume it; metrics and weights are those of a whole run."""
        if not self.task.chat:
            raise SkipColumnError("those of conversations are")
        _, metrics = self.whole
        command = [*self._command("killed"), "--every", "4", "--keep", "1"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            file = self.place / "killed.jsonl"
            while process.poll() is None and (not file.exists() or file.read_text().count('"loss"') < KILLED_AFTER):
                time.sleep(0.2)
            process.send_signal(signal.SIGKILL)
        if process.returncode != -signal.SIGKILL:
            raise DifferenceError(f"the command ended with {process.returncode} before it was killed")
        ran = _run([*command, "--resume"])
        if ran.status:
            raise DifferenceError(ran.output.strip().splitlines()[-1])
        found = [_numbers(rows) for rows in (metrics, _metrics(file))]
        if found[0] != found[1]:
            raise DifferenceError("the losses after a kill are others")
        if self._weights("whole") != self._weights("killed"):
            raise DifferenceError("the weights after a kill are others")
        return {"killed_after": KILLED_AFTER, "steps": len(found[0])}

    def exported(self) -> dict[str, Any]:
        """Export the trained folder in 4 bits by one line, and ask it."""
        if not self.task.chat:
            raise SkipColumnError("those of conversations are")
        from yobx_flatten import open_generator, open_model

        assert self.whole  # the folder is there
        folder = self.place / "int4"
        words = ["export", str(self.place / "whole"), "-o", str(folder), "--quantize", "int4"]
        ran = _run([sys.executable, "-m", "yobx_flatten", *words, "--optimize", "onnxruntime"])
        if ran.status:
            raise DifferenceError(ran.output.strip().splitlines()[-1])
        trained, tokenizer = self._model("whole"), self._tokenizer
        prompt = prompt_of(tokenizer, self.task)
        answer = generated(trained, prompt)
        whole = torch.cat([prompt, answer])
        scores = open_model(folder, trust=True)(input_ids=whole[None], attention_mask=torch.ones_like(whole)[None])
        found = scores.logits[0, len(prompt) - 1 : -1].argmax(-1)
        own = open_generator(folder, threads=1, trust=True).generate(prompt[None], max_new_tokens=_NEW)
        return {
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "peak_bytes": ran.peak_bytes,
            "tokens": float((found == answer).double().mean()),
            "answer": tokenizer.decode(torch.as_tensor(own)[0, len(prompt) :], skip_special_tokens=True).strip(),
        }

    def _command(self, name: str) -> list[str]:
        """The one command, whose last options win."""
        task = self.task
        words = ["train", str(MODEL), task.option, str(self.data), "-o", str(self.place / name)]
        words += ["--metrics", str(self.place / f"{name}.jsonl"), "--length", str(task.length), "--steps", str(STEPS)]
        words += ["--batch", str(task.batch), "--microbatches", str(task.batch), "--eval-share", "0.1"]
        words += ["--lr", str(task.lr), "--schedule", "constant", "--warmup", "0", "--dtype", "float32", "--no-check"]
        words += ["--devices", "virtual:1", "--memory", task.memory, *(["--lora", task.lora] if task.lora else [])]
        return [sys.executable, "-m", "roundpipe_runtime", *words]

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(MODEL)

    def _model(self, name: str) -> Any:
        from transformers import AutoModelForCausalLM

        if self.task.lora is None:
            return AutoModelForCausalLM.from_pretrained(self.place / name).eval()
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(self.place / name).eval()

    def _answer(self, name: str) -> str:
        answer = generated(self._model(name), prompt_of(self._tokenizer, self.task))
        return str(self._tokenizer.decode(answer, skip_special_tokens=True)).strip()

    def _weights(self, name: str) -> list[bytes]:
        return [file.read_bytes() for file in sorted((self.place / name).glob("*.safetensors"))]


def prompt_of(tokenizer: Any, task: Task) -> torch.Tensor:
    """Return the tokens of what a task's model is asked, int64 of shape (length,)."""
    if not task.chat:
        return torch.tensor(tokenizer(task.prompt, add_special_tokens=False)["input_ids"])
    messages = [{"role": "user", "content": task.prompt}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    return torch.as_tensor(found["input_ids"])[0]


def generated(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Return the greedy tokens of a model after a prompt, int64 of shape (length,)."""
    ids = prompt[None]
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW, do_sample=False)
    return torch.as_tensor(made)[0, len(prompt) :]


def _run(command: list[str]) -> Ran:
    """Run a command to its end, with its own peak of memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        output = process.stdout.read() if process.stdout is not None else b""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return Ran(process.returncode, output.decode(errors="replace"), used.ru_maxrss * 1024)


def _metrics(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _numbers(metrics: list[dict[str, Any]]) -> list[tuple[int, float, float | None]]:
    """Return the metrics without times, which differ from run to run."""
    return [(row["step"], row.get("loss", row.get("eval_loss")), row.get("grad_norm")) for row in metrics]


def _typical(metrics: list[dict[str, Any]]) -> float:
    return statistics.median(row["seconds"] for row in metrics if "loss" in row)


COLUMNS: dict[str, Callable[[TrainingTrial], dict[str, Any]]] = {
    "a tenth": TrainingTrial.refused,
    "trained": TrainingTrial.trained,
    "resumed": TrainingTrial.resumed,
    "exported": TrainingTrial.exported,
}
NEEDS = {"resumed": "trained", "exported": "trained"}


def run_type(
    name: str, way: str, columns: list[str], known: dict[str, bool | None], folder: pathlib.Path, events: TextIO
) -> None:
    """Run columns of one task in this process; see `worker.run_type`."""
    be_quiet()
    run_columns(TrainingTrial(name, folder), columns, known, events, (COLUMNS, NEEDS))
