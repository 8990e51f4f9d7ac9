"""Wrap a Hugging Face model, so that it trains through a pipeline with its own interface."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from ..device.composite import check_copyable, stored_bytes
from ..engine.config import RoundPipeRunConfig
from ..errors import REPLACED_FORWARD, ConfigError, CutError, CutRefusedWarning, warn
from ..pipeline import RoundPipe
from .adapters import model_inside
from .cutting.cut import Cut, cut, whole
from .wrapped_model import WrappedModel

# Modules below this many bytes gain nothing from microbatches.
_LOWER_THRESHOLD = 16 * 1024


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = _LOWER_THRESHOLD,
    upper_threshold: int | None = None,
    skip_modules: Container[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig | None = None,
    name: str | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    check: bool = True,
    **roundpipe_kwargs: Any,
) -> WrappedModel:
    """Wrap a Hugging Face model so that it trains through a pipeline.

    The model is split by a run of its forward on a small batch (:func:`cut`), and the pieces are compared with the
    model. A model that cannot be split runs in one piece, with a warning that states the reason.

    Args:
        model: a Hugging Face model, or any module that keeps its layers in an ``nn.ModuleList``.
        use_sequential_preset: ``True``: raise an error if the model cannot be split. ``False``: do not split the model.
            Default: split the model if possible.
        lower_threshold: size in bytes; a smaller model is not split, and runs in one microbatch.
        upper_threshold: size in bytes; a model of at most this size is not split. Default: 0.
        skip_modules: modules whose layers are not split.
        override_config: run configurations by module. Only the model itself can have one, because it is one pipeline.
        model_run_config: defaults for every call.
        name: name in errors and timelines. Default: ``"file:line"``.
        example: keyword arguments of the model's forward for the split. Default: a few tokens.
        check: whether to compare the pieces with the model.
        **roundpipe_kwargs: further arguments of :class:`RoundPipe`, such as ``devices`` and ``compile``.

    Returns:
        The model, wrapped.

    Raises:
        CutError: the model does not run on the example; or cannot be split, with ``use_sequential_preset=True``.
        ConfigError: an argument has a value that is not supported.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> model = wrap_model_to_roundpipe(LlamaForCausalLM(config), lower_threshold=0, devices="virtual:2")
    >>> import torch
    >>> tokens = torch.arange(12).reshape(4, 3)
    >>> model.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens}).shape
    torch.Size([])
    >>> model.close()
    """
    _check_model(model)
    config = _config(model, override_config or {}, model_run_config)
    size = sum(stored_bytes(p) for p in model.parameters())
    if use_sequential_preset is False or size < lower_threshold or size <= (upper_threshold or 0):
        made = whole(model)
        if size < lower_threshold:
            config = RoundPipeRunConfig(num_microbatch=1).over(config)
    else:
        made = _cut(model, example, skip_modules, check=check, must=use_sequential_preset is True)
    _check_has_layers(made, roundpipe_kwargs.get("compile"))
    return WrappedModel(made, name=name, model_run_config=config, **roundpipe_kwargs)


def _check_has_layers(made: Cut, compiles: object) -> None:
    if compiles and made.report.is_whole:
        raise ConfigError(
            f"{made.report.model} runs in one piece, so it has no layers to compile. Split the model with "
            "lower_threshold=0, or leave compile out."
        )


def _cut(
    model: nn.Module, example: Mapping[str, Any] | None, skipped: Container[nn.Module], *, check: bool, must: bool
) -> Cut:
    """Split a model, and warn with the reason if it runs in one piece."""
    skip = [module for module in model.modules() if module in skipped]
    made = cut(model, example, check=check, skip_modules=skip)
    if made.report.is_whole:
        _report_whole(made, must)
    return made


def _check_model(model: object) -> None:
    if isinstance(model, RoundPipe):
        raise ConfigError("The model is a RoundPipe already: use it as it is.")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"wrap_model_to_roundpipe needs a Hugging Face model, found {type(model).__qualname__} {model!r:.60}. Load "
            "it first:\n    wrap_model_to_roundpipe(AutoModelForCausalLM.from_pretrained(...))"
        )
    check_copyable(model)  # before a check runs the model


def _config(
    model: nn.Module, overrides: Mapping[nn.Module, RoundPipeRunConfig], config: RoundPipeRunConfig | None
) -> RoundPipeRunConfig:
    others = [type(module).__name__ for module in overrides if module is not model]
    if others:
        raise ConfigError(
            f"override_config: {', '.join(others)} cannot have its own configuration, as the model is one "
            "pipeline. Wrap the part alone, or give the configuration to the whole model:\n"
            "    wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(...))"
        )
    given = overrides.get(model, RoundPipeRunConfig())
    return given.over(config or RoundPipeRunConfig())


def _report_whole(made: Cut, is_error: bool) -> None:
    reason, message = made.report.refused[-1]
    if "forward" in vars(model_inside(made.model)):
        message += REPLACED_FORWARD
    if is_error:
        raise CutError(reason, f"{made.report.model} cannot be split: {message}")
    warn(f"{made.report.model} runs in one piece, as it cannot be split ({reason}): {message}", CutRefusedWarning)
