"""Check before a training that its files can be written, and save the model once it has been loaded for a check."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.messages import format_bytes
from yobx_flatten.files.scratch import check_writable, publish_folder, scratch_for, settle
from yobx_flatten.model_folder.source.configuration import FILES_ONLY
from yobx_flatten.model_folder.source.find import find_model

from ..device.composite import is_composite
from ..device.disk import disk_folder, disk_of
from ..huggingface.adapters import is_adapted, model_inside
from .adapters import quiet_peft
from .data.tokenizer import Tokenizer
from .errors import FineTuneError
from .model_card import CARD
from .models import ModelSource
from .quantize_aware import packed_state, rounded_layers, unrounded_state
from .settings import Settings


def check_output(folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Check before a training that its output folder can be written.

    Args:
        folder: folder in which a model is to be saved.
        overwrite: whether the folder may exist.

    Raises:
        FineTuneError: the folder exists, or it cannot be created.
    """
    path = pathlib.Path(folder)
    settle(path.absolute())  # what a killed process was about to replace is there again
    if path.exists() and not overwrite:
        raise FineTuneError(f"{path} exists. Name another folder, or replace it: --overwrite")
    check_place(path, "--output DIR")


def check_place(path: str | os.PathLike[str], option: str, *, in_parent: bool = True) -> None:
    """Check before a training that something can be written under a name; nothing stays there.

    Args:
        path: file or folder.
        option: option that names it.
        in_parent: whether its folder is what is written to: it gets its name when it is complete.

    Raises:
        FineTuneError: it cannot be written.
    """
    try:
        check_writable(path, in_parent=in_parent)
    except OSError as error:
        raise FineTuneError(f"{path}: {error.strerror or error}. Name another place: {option}") from error


def _state_bytes(parameter: nn.Parameter, dtype: torch.dtype) -> int:
    """Two moments, and a master weight where the parameter is not as wide."""
    return parameter.numel() * dtype.itemsize * (2 if dtype == parameter.dtype else 3)


def check_disk(
    model: nn.Module, settings: Settings, output: pathlib.Path, checkpoints: pathlib.Path, kept: int
) -> None:
    """Refuse a training whose results would not fit on the disk.

    Args:
        model: model that is trained.
        settings: settings of the training; checkpoints hold moments and master weights in ``optim_dtype``.
        output: folder in which the model is saved.
        checkpoints: folder of the checkpoints.
        kept: number of checkpoints that are there at the same time.

    Raises:
        FineTuneError: naming the folder, what is needed and what is free.
    """
    # of a model with adapters, only these are saved
    parameters = [p for p in model.parameters() if p.requires_grad or not is_adapted(model)]
    of_model = sum(p.nbytes for p in parameters) + (0 if is_adapted(model) else sum(b.nbytes for b in model.buffers()))
    trained = [p for p in model.parameters() if p.requires_grad]
    of_state = sum(_state_bytes(p, settings.optim_dtype or p.dtype) for p in trained)
    needed: dict[int, int] = defaultdict(int)
    places: dict[int, pathlib.Path] = {}
    written = [(output, of_model), (checkpoints, kept * (of_model + of_state))]
    if (home := disk_folder(settings.host)) is not None:
        here = sum(p.nbytes for p in model.parameters() if disk_of(p) is None)
        gradients = sum(p.numel() * (settings.optim_dtype or p.dtype).itemsize for p in trained)
        written.append((home, here + of_state + gradients))
    for folder, size in written:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        disk = there.stat().st_dev
        needed[disk] += size
        places.setdefault(disk, there)
    for disk, size in needed.items():
        free = shutil.disk_usage(places[disk]).free
        if free < size:
            first = "the model" if home is None else "the training, the model"
            held = f"{first} and {kept} checkpoints take" if kept or home is not None else "the model takes"
            host = "" if home is None else ", --host disk:DIR"
            raise FineTuneError(
                f"The disk of {places[disk]} is too small: {held} {format_bytes(size)} there, and {format_bytes(free)} "
                f"are free. Make room, or name a folder on another disk: --output DIR, --checkpoint DIR{host}"
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
    """Save a trained model with its tokenizer, and check that it loads bitwise identical.

    Args:
        model: Hugging Face model, or PEFT's model around one, of which only the adapters are saved.
        tokenizer: tokenizer, saved with the model.
        folder: folder that appears when it is complete and the model loaded from it is bitwise identical.
        source: source of the model, into which adapters are loaded for the check.
        overwrite: whether the folder may exist; it is replaced then.
        card: text of ``README.md``. Default: none, or that of PEFT.

    Returns:
        The folder.

    Raises:
        FineTuneError: the folder exists, or the loaded model differs.
        OSError: the folder could not be written; what was there before is unchanged.
    """
    path = pathlib.Path(folder)
    check_output(path, overwrite=overwrite)
    with scratch_for(path.absolute()) as half:
        if tokenizer.eos_token_id is not None and not source.has_weights:
            _tell_end(model, tokenizer.eos_token_id)
        _write_weights(model, half)
        tokenizer.save_pretrained(half)
        if card is not None:
            (half / CARD).write_text(card, encoding="utf-8")
        _verify(model, half, source)
        publish_folder(half, path.absolute())
    return path


def _write_weights(model: Any, folder: pathlib.Path) -> None:
    """Save a model; what was trained in integers is saved as these."""
    if not rounded_layers(model):
        model.save_pretrained(folder)
        return
    state, model.config.quantization_config = packed_state(model)
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        del model.config.quantization_config


def _tell_end(model: nn.Module, end: int) -> None:
    """A model that was random has learnt where a text ends; its configuration is of another vocabulary."""
    configs: list[Any] = [getattr(model, "config", None), getattr(model, "generation_config", None)]
    for config in configs:
        if config is not None:
            config.eos_token_id = end


def _verify(model: nn.Module, folder: pathlib.Path, source: ModelSource) -> None:
    import transformers

    dtype = next(parameter.dtype for parameter in model.parameters())
    if is_adapted(model) and any(is_composite(parameter) for parameter in model.parameters()):
        import peft
        from peft.utils.save_and_load import load_peft_weights

        expected = peft.get_peft_model_state_dict(model)
        found = load_peft_weights(str(folder), device="cpu")  # its base would be whole in memory, in floating point
    elif is_adapted(model):
        import peft

        base: Any = source.load(dtype=model_inside(model).dtype)  # type: ignore[arg-type] # as above
        with quiet_peft():
            loaded = peft.PeftModel.from_pretrained(base, folder)
        expected = peft.get_peft_model_state_dict(model)
        found = peft.get_peft_model_state_dict(loaded)
    elif rounded_layers(model):
        found = find_model(str(folder)).load().state_dict()
        expected = unrounded_state(model)
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **FILES_ONLY)
        expected, found = model.state_dict(), loaded.state_dict()
    for name, value in expected.items():
        if name not in found or not torch.equal(found[name].cpu(), value.cpu()):
            raise FineTuneError(
                f"{name} differs from what was saved. The model was not written; its checkpoint is kept."
            )
