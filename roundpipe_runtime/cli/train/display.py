"""What ``roundpipe train`` shows: before it begins, a bar on a terminal or plain lines elsewhere."""

from __future__ import annotations

import itertools
import sys
import time
from types import TracebackType
from typing import Any

from torch import nn

from yobx_flatten.errors.messages import format_bytes
from yobx_flatten.terminal.output import console, printable, say

from ...device.composite import is_composite, stored_bytes
from ...fine_tune import Blocks, ChatRows, EvalRecord, ModelSource, StepRecord, Tokenizer, Training, sparkline
from ...huggingface.quantize import count_weights

# Between two lines of an evaluation, where there is no terminal.
_SECONDS = 30


class Display:
    """Shows records while a training runs."""

    # log_every: steps between two plain lines; the first and the last one are always shown
    # is_shown: whether this process shows a bar; of several, one does

    def __init__(self, steps: int, *, first: int = 0, log_every: int | None = None, is_shown: bool = True) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.steps = steps
        self.first = first
        self.log_every = log_every or max(1, min(100, steps // 20))
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(12),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        shown_on = console(stderr=True)
        is_bar = is_shown and shown_on.is_terminal
        self._bar: Any = Progress(*columns, console=shown_on, refresh_per_second=4, disable=not is_bar)
        self._task = self._bar.add_task("", total=steps, completed=first)
        self._shows_lines = self._bar.disable or not sys.stdout.isatty()
        self._losses: list[float] = []
        self._of_step = ""
        self._said = time.monotonic()

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, record: StepRecord | EvalRecord) -> None:
        """Show a step or an evaluation."""
        if isinstance(record, EvalRecord):
            self._line(f"step {record.step}/{self.steps}  held-out loss {record.eval_loss:.4f}")
            return
        words = format_step(record)
        self._losses.append(record.loss)
        self._of_step = "  ".join([sparkline(self._losses), *words[:3]])
        self._bar.update(self._task, completed=record.step, description=self._of_step)
        if self._shows_lines and (record.step in (self.first + 1, self.steps) or record.step % self.log_every == 0):
            say("  ".join([f"step {record.step}/{self.steps}", *words]))

    def show_evaluation(self, done: int, total: int) -> None:
        """Show how far an evaluation is; as lines one in half a minute."""
        text = f"evaluating: {done} of {total} batches"
        self._bar.update(self._task, description=text if done < total else self._of_step)
        if done == 1:
            self._said = time.monotonic()
        if done < total and self._shows_lines and time.monotonic() - self._said > _SECONDS:
            self._said = time.monotonic()
            say(text)

    def _line(self, text: str) -> None:
        if self._shows_lines:
            say(text)
        else:
            self._bar.console.print(text)


def format_step(record: StepRecord) -> list[str]:
    """Return what is known of a step in words, the most important first."""
    memory = "" if record.process_bytes is None else format_bytes(record.process_bytes)
    device = "" if record.device_bytes is None else f"device {format_bytes(record.device_bytes)}"
    return [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_s:,.0f} tokens/s",
        ", ".join(word for word in (memory, device) if word),
        f"lr {record.lr:.2e}",
        f"gradient {record.grad_norm:.3g}",
    ]


def format_text(blocks: Blocks, tokenizer: Tokenizer) -> str:
    """Return how much text there is."""
    rows, held_out = len(blocks.tokens), len(blocks.held_out)
    read = "bytes" if tokenizer.name == "bytes" else f"tokens of {tokenizer.name}"
    return (
        f"text: {rows * blocks.length + blocks.left_over:,} {read}, {rows:,} rows of {blocks.length}; "
        f"{held_out:,} rows are held out"
    )


def format_chats(rows: ChatRows, tokenizer: Tokenizer) -> str:
    """Return how many conversations there are, and how many of their tokens count."""
    total, packed = rows.tokens_in(range(len(rows))), f" in {len(rows):,} rows" if rows.positions else ""
    notes = [f"held out: {len(rows.held_out):,}"]
    if rows.cut:
        notes.append(f"{rows.cut:,} were cut to {rows.length} tokens")
    if rows.left_out:
        notes.append(f"{rows.left_out:,} more have no answer in their first {rows.length} tokens and are left out")
    return (
        f"chat: {rows.conversations:,} conversations{packed}, {total:,} tokens of {tokenizer.name}, of which "
        f"{rows.counted:,} count; " + "; ".join(notes)
    )


def show_rows(rows: ChatRows, tokenizer: Tokenizer, count: int) -> None:
    """Show the first training rows as the model sees them: what counts is green, or between « and »."""
    from rich.text import Text

    shown_on = console()
    has_colour = shown_on.is_terminal and not shown_on.no_color
    for row in rows.training[:count].tolist():
        text = Text()
        for part, counts in _runs(rows.ids[row].tolist(), rows.labels[row].tolist()):
            words = printable(tokenizer.decode(part, special=True))
            text.append(words if has_colour or not counts else f"«{words}»", style="green" if counts else "dim")
        if has_colour:
            shown_on.print(text)
        else:
            say(text.plain.rstrip("\n"))


def _runs(ids: list[int], labels: list[int]) -> list[tuple[list[int], bool]]:
    """Tokens next to each other that count, or do not."""
    pairs = itertools.groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] == pair[0])
    return [([token for token, _ in run], counts) for counts, run in pairs]


def format_model(model: nn.Module, source: ModelSource) -> str:
    """Return the number of parameters, and how many are trainable."""
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    total = count_weights(model)
    frozen = [p for p in parameters if is_composite(p)]
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    some = "" if trainable == total else f", of which {trainable:,} are trainable"
    weights = "" if source.has_weights else " with random weights"
    packed = f"; linear layers are frozen in {format_bytes(sum(map(stored_bytes, frozen)))}" if frozen else ""
    return f"model: {source.name}{weights}, {total:,} parameters in {dtype}{some}{packed}"


def format_training(training: Training) -> str:
    """Return how it goes."""
    report = training.pipeline.cut.report
    exact = report.equivalence
    proof = ""
    if exact is not None:
        proof = f"; its gradients differ from those of the reference model by {exact.gradients:.0e}"
    devices = ", ".join(device.name for device in training.pipeline.devices)
    settings = training.settings
    batches = f"{settings.accumulate} batches of " if settings.accumulate > 1 else ""
    replicas, size = training.pipeline.replicas, training.job.size
    groups = f"{replicas} groups of " if replicas > 1 else ""
    processes = f"{size} processes, each on " if size > 1 else ""
    return (
        f"cut: {len(report.pieces)} pieces{proof}\n"
        f"steps: {training.steps:,} of {batches}{settings.batch} rows in {groups}{training.microbatches} microbatches "
        f"{'in ' if processes else 'on '}{processes}{devices}"
    )
