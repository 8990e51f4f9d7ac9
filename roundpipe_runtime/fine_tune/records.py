"""Write the results of a training (metrics, model, card, plot), and check all paths before the training.

::

    {"step": 1, "loss": 5.58, "tokens": 2048, "tokens_per_s": 9120.4, "lr": 3e-05, "grad_norm": 2.9, ...}
    {"step": 20, "eval_loss": 3.31, "eval_tokens": 4096, "seconds": 0.19}
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import torch
from torch import nn

from yobx_flatten.core.files.document import read_text
from yobx_flatten.core.files.scratch import check_writable, publish_folder, scratch_for, settle, whole_file, write_text
from yobx_flatten.errors import require
from yobx_flatten.errors.failures import format_bytes
from yobx_flatten.model_folder.source.configuration import FILES_ONLY
from yobx_flatten.model_folder.source.find import find_model

from ..device.accelerator import AcceleratorDevice
from ..device.composite import is_composite
from ..device.disk import disk_folder, disk_of
from ..device.protocol import Device
from ..errors import FineTuneError
from ..huggingface.adapters import is_adapted, model_inside
from .adapters import packed_state, quiet_peft, rounded_layers, unrounded_state
from .models import ModelSource, Tokenizer
from .settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one training step.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean loss over the tokens of the step, before the update.
        tokens: number of tokens of the step.
        tokens_per_s: tokens per second of this step, including copies and optimizer.
        lr: learning rate.
        grad_norm: total norm of all gradients before clipping; ``None`` with ``update="in_backward"``.
        seconds: duration of the step.
        process_bytes: bytes of memory that the process uses after the step.
        device_bytes: peak bytes of tensors on one accelerator so far; ``None`` without accelerators.
    """

    step: int
    loss: float
    tokens: int
    tokens_per_s: float
    lr: float
    grad_norm: float | None
    seconds: float
    process_bytes: int | None
    device_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class EvalRecord:
    """Metrics of one evaluation.

    Attributes:
        step: number of training steps before the evaluation.
        eval_loss: mean loss over the tokens of the held-out rows.
        eval_tokens: number of tokens of the held-out rows.
        seconds: duration of the evaluation.
    """

    step: int
    eval_loss: float
    eval_tokens: int
    seconds: float


def record_of(logs: Mapping[str, float], step: int) -> StepRecord | EvalRecord | None:
    """Convert an entry of a Trainer's log; ``None`` if the entry is not about a step or an evaluation.

    >>> record_of({"eval_loss": 2.5, "eval_tokens": 64, "eval_runtime": 0.5}, 3)
    EvalRecord(step=3, eval_loss=2.5, eval_tokens=64, seconds=0.5)
    """
    if "eval_loss" in logs:
        return EvalRecord(step, logs["eval_loss"], int(logs["eval_tokens"]), logs["eval_runtime"])
    if "loss" not in logs:
        return None
    known: dict[str, Any] = {"grad_norm": None, "device_bytes": None, **logs}  # the others must be there
    names = {field.name for field in dataclasses.fields(StepRecord)} - {"step", "lr"}
    return StepRecord(step=step, lr=logs["learning_rate"], **{name: known[name] for name in names})


def process_memory() -> int:
    """Return the bytes of memory that the process holds now (resident set size)."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def device_peak(devices: Iterable[Device]) -> int | None:
    """Return the peak bytes of tensors on the accelerator that used the most memory; ``None`` without accelerators."""
    accelerators = [device.torch_device for device in devices if isinstance(device, AcceleratorDevice)]
    return max((torch.accelerator.max_memory_allocated(device) for device in accelerators), default=None)


class MetricsFile:
    """A JSON lines file to which one line is added after each step and each evaluation."""

    # path: path of the file; lines up to `step` are kept, later ones are overwritten
    # step: last step whose line is kept; a run that was killed can have written more lines than its checkpoint knows

    def __init__(self, path: str | os.PathLike[str], *, step: int = 0) -> None:
        self.path = pathlib.Path(path)
        kept: list[str] = []
        if step and self.path.is_file():
            lines = read_text(self.path, failure=FineTuneError).split("\n")[:-1]  # the last is empty or incomplete
            kept = [f"{line}\n" for line in lines if _step_of(line) <= step]
        write_text(self.path, "".join(kept))
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 # open as long as the object

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: StepRecord | EvalRecord) -> None:
        values = dataclasses.asdict(record).items()
        wrong = [name for name, value in values if isinstance(value, float) and not math.isfinite(value)]
        self._file.write(json.dumps({**dict(values), **dict.fromkeys(wrong)}) + "\n")
        self._file.flush()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # not a record, so the line is dropped


def check_output(folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Check before a training that its output folder can be written.

    Args:
        folder: folder in which a model is to be saved.
        overwrite: whether the folder may exist.

    Raises:
        FineTuneError: the folder exists, or it cannot be created.
    """
    path = pathlib.Path(folder)
    settle(path.absolute())  # restore a folder that a killed process was replacing
    if path.exists() and not overwrite:
        raise FineTuneError(f"{path} exists. Name another folder, or replace it: --overwrite")
    check_place(path, "--output DIR")


def check_place(path: str | os.PathLike[str], option: str, *, in_parent: bool = True) -> None:
    """Check before a training that a file or folder can be written at ``path``, without creating the file or folder.

    Args:
        path: file or folder.
        option: command line option that sets ``path``, named in the error message.
        in_parent: whether the parent folder must be writable, because the file is written there and renamed at the end.

    Raises:
        FineTuneError: the file or folder cannot be written.
    """
    try:
        check_writable(path, in_parent=in_parent)
    except OSError as error:
        raise FineTuneError(f"{path}: {error.strerror or error}. Name another place: {option}") from error


def check_disk(
    model: nn.Module, settings: Settings, output: pathlib.Path, checkpoints: pathlib.Path, kept: int
) -> None:
    """Raise an error if the results of a training would not fit on the disk.

    Args:
        model: model that is trained.
        settings: settings of the training. ``optim_dtype`` is the dtype of moments and master weights in checkpoints.
        output: folder in which the model is saved.
        checkpoints: folder of the checkpoints.
        kept: number of checkpoints that exist at the same time.

    Raises:
        FineTuneError: the disk is too small; the message states the folder, the needed space and the free space.
    """
    parameters = list(model.parameters())
    saved = [*parameters, *model.buffers()]
    if is_adapted(model):  # only the adapters are saved
        saved = [p for p in parameters if p.requires_grad]
    of_model = sum(tensor.nbytes for tensor in saved)
    trained = [(p, settings.optim_dtype or p.dtype) for p in parameters if p.requires_grad]
    # two moments, and a master weight if the dtypes differ
    of_state = sum(p.numel() * dtype.itemsize * (2 if dtype == p.dtype else 3) for p, dtype in trained)
    written = [(output, of_model), (checkpoints, kept * (of_model + of_state))]
    if (home := disk_folder(settings.host)) is not None:
        here = sum(p.nbytes for p in parameters if disk_of(p) is None)
        gradients = sum(p.numel() * dtype.itemsize for p, dtype in trained)
        written.append((home, here + of_state + gradients))
    needed: dict[int, tuple[pathlib.Path, int]] = {}  # a folder on each disk, and the bytes
    for folder, size in written:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        place, before = needed.get(there.stat().st_dev, (there, 0))
        needed[there.stat().st_dev] = place, before + size
    for place, size in needed.values():
        free = shutil.disk_usage(place).free
        if free < size:
            first = "the model" if home is None else "the training, the model"
            held = f"{first} and {kept} checkpoints take" if kept or home is not None else "the model takes"
            host = "" if home is None else ", --host disk:DIR"
            raise FineTuneError(
                f"The disk of {place} is too small: {held} {format_bytes(size)} there, and {format_bytes(free)} are "
                f"free. Make room, or name a folder on another disk: --output DIR, --checkpoint DIR{host}"
            )


def save_model(
    model: nn.Module,
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    *,
    source: ModelSource,
    overwrite: bool = False,
    card: str | None = None,
) -> pathlib.Path:
    """Save a trained model with its tokenizer, and check that the loaded model is bitwise identical.

    Args:
        model: Hugging Face model, or PEFT's wrapper of a model, of which only the adapters are saved.
        tokenizer: tokenizer, saved with the model.
        folder: new folder. It appears only if a model loaded from the saved files is bitwise identical to ``model``.
        source: source of the base model, into which the saved adapters are loaded for the check.
        overwrite: whether to replace an existing folder.
        card: text of ``README.md``. Default: PEFT's card for adapters, and no card for other models.

    Returns:
        The folder.

    Raises:
        FineTuneError: the folder exists and ``overwrite`` is false, or the loaded model differs from the saved model.
        OSError: the folder could not be written; an existing folder is unchanged.
    """
    path = pathlib.Path(folder)
    check_output(path, overwrite=overwrite)
    with scratch_for(path.absolute()) as half, quiet_peft():
        if tokenizer.eos_token_id is not None and not source.has_weights:  # its configuration has another vocabulary
            configs: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
            for config in filter(None, configs):
                config.eos_token_id = tokenizer.eos_token_id
        saved: Any = model
        if rounded_layers(model):  # trained quantization-aware, so the weights are saved as integers
            state, saved.config.quantization_config = packed_state(model)
            try:
                saved.save_pretrained(half, state_dict=state)
            finally:
                del saved.config.quantization_config
        else:
            saved.save_pretrained(half)
        tokenizer.save_pretrained(half)
        if card is not None:
            (half / CARD).write_text(card, encoding="utf-8")
        _verify(model, half, source)
        publish_folder(half, path.absolute())
    return path


def _verify(model: nn.Module, folder: pathlib.Path, source: ModelSource) -> None:
    if is_adapted(model):
        import peft
        from peft.utils.save_and_load import load_peft_weights

        expected = peft.get_peft_model_state_dict(model)
        if any(is_composite(parameter) for parameter in model.parameters()):
            found = load_peft_weights(str(folder), device="cpu")  # the dequantized base model may not fit in memory
        else:
            base: Any = source.load(dtype=model_inside(model).dtype)  # type: ignore[arg-type] # a module has no dtype
            found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, folder))
    elif rounded_layers(model):
        expected, found = unrounded_state(model), find_model(str(folder)).load().state_dict()
    else:
        import transformers

        dtype = next(parameter.dtype for parameter in model.parameters())
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **FILES_ONLY)
        expected, found = model.state_dict(), loaded.state_dict()
    for name, value in expected.items():
        if name not in found or not torch.equal(found[name].cpu(), value.cpu()):
            raise FineTuneError(
                f"The saved weight {name} differs from the trained weight, so the output folder was not written."
            )


CARD = "README.md"
_LIBRARIES = ("yobx-flatten", "torch", "transformers", "peft", "accelerate")
_LINES = 12  # of the table of losses


def model_card(
    source: ModelSource,
    records: Sequence[StepRecord | EvalRecord],
    *,
    data: str,
    options: Mapping[str, object],
    is_adapter: bool = False,
) -> str:
    """Return the text of a model card: the data, losses, options and versions of a training.

    Args:
        source: the trained model, as :func:`model_source` returned it.
        records: records of the steps and evaluations of the training.
        data: description of the training data.
        options: options of the training by name; options with the value ``None`` are omitted.
        is_adapter: whether only adapters were saved.

    Returns:
        The card in Markdown, with the metadata that model hubs read.
    """
    base = pathlib.Path(source.name).name  # readers of the card do not have this path
    steps = [record for record in records if isinstance(record, StepRecord)]
    held_out = {record.step: record.eval_loss for record in records if isinstance(record, EvalRecord)}
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"base_model: {base}"] if source.has_weights else []
    lines += ["tags:", "- roundpipe", *(["- lora"] if is_adapter else []), "---", ""]
    kind = "Adapters of" if is_adapter else "Trained from" if source.has_weights else "Trained from random weights of"
    lines += [f"# {kind} {base}", "", f"Trained with `roundpipe train`, {len(steps)} steps.", ""]
    lines += ["## Data", "", data, "", "## Losses", ""]
    if steps:
        losses = [record.loss for record in steps]
        lines += [f"{losses[0]:.4f} to {losses[-1]:.4f}", "", "| step | loss | held out |", "|---|---|---|"]
        stride = -(-len(steps) // _LINES)
        for one in [record for record in steps if record.step % stride == 0 or record is steps[-1]]:
            of_eval = f"{held_out[one.step]:.4f}" if one.step in held_out else ""
            lines.append(f"| {one.step} | {one.loss:.4f} | {of_eval} |")
        lines.append("")
    found = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in _LIBRARIES}
    versions = {name: one.version for name, one in found.items() if one is not None}
    for heading, values in (("Options", options), ("Versions", {"python": platform.python_version(), **versions})):
        lines += [f"## {heading}", "", *(f"- {name}: {value}" for name, value in values.items() if value is not None)]
        lines.append("")
    return "\n".join(lines)


def replace_card(folder: pathlib.Path, text: str) -> None:
    """Replace the model card (``README.md``) of a saved model atomically.

    Args:
        folder: folder of the model.
        text: new text of the card.
    """
    write_text(folder.absolute() / CARD, text)


def check_curve(path: str | os.PathLike[str]) -> None:
    """Check before a training that its losses can be plotted.

    Args:
        path: path of the image.

    Raises:
        FineTuneError: the path does not end in .png, .svg or .pdf.
        MissingDependencyError: matplotlib is not installed.
    """
    if pathlib.Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise FineTuneError(f"{path} does not end in .png, .svg or .pdf. Change the ending: --plot losses.svg")
    require("matplotlib", purpose="--plot")


def save_curve(records: Sequence[StepRecord | EvalRecord], path: str | os.PathLike[str]) -> None:
    """Plot the losses of steps and evaluations into an image file.

    Args:
        records: records of the steps and evaluations of a training, as :func:`run` passes them to ``show``.
        path: path of the image; its suffix determines the format: ``.png``, ``.svg``, ``.pdf``.

    Raises:
        FineTuneError: the path does not end in .png, .svg or .pdf.
        MissingDependencyError: matplotlib is not installed.
    """
    check_curve(path)
    from matplotlib.figure import Figure

    steps = [record for record in records if isinstance(record, StepRecord)]
    held_out = [record for record in records if isinstance(record, EvalRecord)]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    axes.plot([one.step for one in steps], [one.loss for one in steps], label="training")
    if held_out:
        axes.plot([one.step for one in held_out], [one.eval_loss for one in held_out], "o-", label="held out")
    axes.legend()
    with whole_file(path) as file:
        figure.savefig(file)
