"""Plan the training of a Hugging Face model on ``meta``, without allocating its parameters."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from yobx_flatten.errors.failures import first_line
from yobx_flatten.registry.recipe.aliases import Kwargs

from ..engine.planner import FOR_PARAMETERS, stage_limit
from ..errors import ConfigError, CutError
from ..estimate.footprint import LayerFootprint, device_kernels, measure_layers
from ..estimate.hardware import Hardware
from ..estimate.report import PlanReport, plan_report
from ..estimate.step_plan import JoinedLoss, joined_loss
from ..optim.layer_contents import LargeTables, rule_for
from ..optim.parameters import Update
from .adapters import without_cache
from .cutting.cut import Cut, cut
from .cutting.pieces import Phase, Whole
from .loss.lazy_logits import loss_only, without_logits


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsChange:
    """Settings with which a training fits into device memory or, if no settings fit, needs the least memory."""

    what: str  # options of the command line
    device_bytes: int  # peak memory of a device after the change
    fits: bool


class PlannedTraining:
    """A split model on ``meta``, whose memory and work are measured for batches of any size.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime.estimate.hardware import describe_hardware
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(dtype="bfloat16"))  # of 6.7 billion parameters
    >>> cards = describe_hardware("cuda:0,cuda:1", memory=24 * 2**30, link=25e9, flops=150e12)
    >>> training = PlannedTraining(model, cards, optim_dtype=torch.float32)
    >>> report = training.report(batch=12, length=2048, num_microbatch=3)
    >>> report.fits_devices, len(report.layers)
    (True, 34)
    """

    # model: Hugging Face causal language model, or PEFT's model around one, with parameters on `meta`
    # optim_dtype: dtype in which the optimizer works. Default: the dtype of each parameter.
    # large_tables, host, update: as in `RoundPipe`

    def __init__(
        self,
        model: nn.Module,
        hardware: Hardware,
        *,
        optim_dtype: torch.dtype | None = None,
        large_tables: LargeTables = "auto",
        host: Literal["memory", "disk"] = "memory",
        update: Update = "masters",
    ) -> None:
        if not all(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                "A plan needs a model on the meta device, where weights take no memory:\n"
                '    with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)'
            )
        self.model, self.hardware, self.optim_dtype = model, hardware, optim_dtype
        self.host, self.update = host, update
        self._measured: dict[tuple[int, int, int], list[LayerFootprint]] = {}
        try:
            with device_kernels(hardware.kind):
                self.cut: Cut = cut(model, _batch(2, 16), check=False)
        except CutError as error:
            raise CutError(
                error.reason,
                f"{type(model).__name__} cannot be planned: on meta, where tensors have no values, its forward fails "
                f"with {first_line(error.__cause__ or error)}",
            ) from error
        limit = None if hardware.memory is None else stage_limit(FOR_PARAMETERS * hardware.memory / 1e9)
        self.rule = rule_for(self.cut.pieces, large_tables, limit, self._gradient_dtype)
        self._least_rule = rule_for(self.cut.pieces, large_tables, 0.0, self._gradient_dtype)

    def report(
        self,
        *,
        batch: int,
        length: int,
        num_microbatch: int,
        last_stage_copies: int | Literal["auto"] = 1,
        keep_parameters: float | Literal["auto"] = 0,
    ) -> PlanReport:
        # last_stage_copies: number of devices that run the last layer, each with a share of the microbatches; `"auto"`,
        # as many as make the simulated step clearly faster. Default: 1.
        # keep_parameters: parameters that stay on devices between steps, as in `RoundPipeRunConfig`. Default: 0.
        return plan_report(
            self.model,
            self.cut.pieces,
            self._layers(-(-batch // num_microbatch), length),
            self.hardware,
            num_microbatch=num_microbatch,
            tokens=batch * length,
            optim_dtype=self.optim_dtype,
            last_stage_copies=last_stage_copies,
            keep_parameters=keep_parameters,
            rule=self.rule,
            least_rule=self._least_rule,
            host=self.host,
            update=self.update,
        )

    def joined_loss(self, *, batch: int, length: int) -> JoinedLoss:
        """Return the memory that is needed if the loss must be computed from the whole batch at once."""
        # returns: memory of the device that runs the last layer, and additional host memory
        return joined_loss(self._layers(batch, length, start=len(self.cut.pieces) - 1)[-1])

    def remedy(self, *, batch: int, length: int, num_microbatch: int) -> SettingsChange:
        """Return settings that make a batch fit into a device's memory: smaller microbatches or shorter rows."""
        if self.hardware.memory is None:
            device = self.hardware.names[0]
            raise ConfigError(
                f"No settings can be found, because the memory of {device} is unknown. Give the memory in bytes:\n"
                "    describe_hardware(devices, memory=24 * 2**30)"
            )
        sizes, number = list[tuple[int, int]](), num_microbatch
        while number < batch:
            number = min(2 * number, batch)
            sizes.append((number, length))
        sizes += [(batch, length // 2**k) for k in range(1, length.bit_length()) if length // 2**k >= 64]
        for number, shorter in sizes or [(num_microbatch, length)]:  # no sizes: already as small as possible
            report = self.report(batch=batch, length=shorter, num_microbatch=number)
            if report.fits_devices:
                break
        what = f"--microbatches {number}" + (f" --length {shorter}" if shorter < length else "")
        return SettingsChange(what, max(memory.total for memory in report.device_memory), bool(report.fits_devices))

    def _layers(self, rows: int, length: int, start: int = 0) -> list[LayerFootprint]:
        key = rows, length, start
        if key not in self._measured:
            self.model.train()
            self.cut.sync()
            self._measured[key] = measure_layers(
                self.cut.pieces,
                (),
                without_cache(self.model, _batch(rows, length)),
                names=self.cut.report.pieces,
                gradient_dtype=self._gradient_dtype,
                last_call=_last_call,
                kind=self.hardware.kind,
                start=start,
                rule=self.rule,
            )
        return self._measured[key]

    def _gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return self.optim_dtype if self.optim_dtype and parameter.is_floating_point() else parameter.dtype


def model_on_meta(config: Any, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the causal language model of a configuration, without memory for its parameters."""
    # dtype: dtype of the parameters. Default: that of the configuration, but bfloat16 for float16; else float32.
    import transformers

    stored = getattr(config, "dtype", None)
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype or {None: torch.float32, torch.float16: torch.bfloat16}.get(stored, stored)
        )
    model: nn.Module = made.to("meta")  # some models create parameters on the CPU
    return model


def _batch(rows: int, length: int) -> Kwargs:
    tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens.clone()}


def _last_call(piece: nn.Module, value: Any) -> Any:
    """Call the last module of the pipeline as in training, where only the loss is used."""
    if isinstance(piece, Phase):
        model, run = piece.copy, partial(piece, value)
    elif isinstance(piece, Whole):
        model, run = piece.model, partial(piece, *value[0], **value[1])
    else:
        return piece(value)
    return without_logits(model, loss_only(model, run))
