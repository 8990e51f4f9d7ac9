"""A Trainer whose reference, reward and teacher models also run through pipelines.

Trainers of preferences compare the model with others that do not learn, and give each of those to accelerate. One that
trains adapters calls its own model instead, with the adapters off::

    accelerator.prepare_model(reference, evaluation_mode=True)     its own pipeline, on the same devices
    with model.disable_adapter(): trainer.model(**batch)           the pipeline of the model, which holds the weights
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from yobx_flatten.huggingface.cache_names import cache_of

from ...device.accelerator import parse_devices
from ...device.generator import generator_kept
from ...distributed.ranks.torchrun import own_devices
from ...engine.config import RoundPipeRunConfig
from ...pipeline import RoundPipe
from ...pipeline.live import OtherForward
from ..wrap import wrap_model_to_roundpipe
from ..wrapped_model import WrappedModel
from .pipeline_trainer import PipelineTrainer


class FrozenModelTrainer(PipelineTrainer):
    """A Trainer that also runs its frozen models through pipelines."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that wraps models for evaluation in pipelines."""
        super().create_accelerator_and_postprocess()
        self._rp_frozen: list[WrappedModel] = []
        self._rp_plain_prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = self._rp_prepare_model

    def _rp_prepare_model(self, model: nn.Module, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> Any:
        """Return a pipeline around a model that is only evaluated; prepare any other one as accelerate does."""
        if isinstance(model, RoundPipe):
            return model
        if not evaluation_mode:
            return self._rp_plain_prepare(model, *args, evaluation_mode=evaluation_mode, **kwargs)
        config = RoundPipeRunConfig(num_microbatch=self._rp_config.num_microbatch)
        with generator_kept():  # the data come in the order they would come in anyway
            frozen = wrap_model_to_roundpipe(
                model, devices=self._rp_devices(), model_run_config=config, pin_model="off"
            )
        self._rp_frozen.append(frozen)
        if self.accelerator.mixed_precision == "bf16":
            frozen.__dict__["forward"] = functools.wraps(frozen.forward, updated=())(
                self._rp_in_autocast(frozen.forward)
            )
        return frozen

    def _rp_devices(self) -> Any:
        """The devices of the pipeline around the model, which may not be made yet."""
        if self._rp_pipeline is not None:
            return self._rp_pipeline.devices
        if "devices" not in self._rp_options:
            share = own_devices() if self.args.world_size > 1 else None
            self._rp_options["devices"] = share or None
        self._rp_options["devices"] = parse_devices(self._rp_options["devices"])
        return self._rp_options["devices"]

    def _rp_in_autocast(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.autocast_smart_context_manager():
                return forward(*args, **kwargs)

        return run

    def close(self) -> None:
        """End the threads of all pipelines; the one around the model is made again when it is needed."""
        for frozen in self._rp_frozen:
            frozen.close()
        if self._rp_pipeline is not None:
            self._rp_pipeline.close()
            self._rp_pipeline = None

    # -- the model itself, as its own reference ------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        with self._rp_called_through_pipeline():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does."""
        with self._rp_called_through_pipeline():
            return super().evaluate(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Let TRL compute the reference before the first step; a Trainer without this method does not call it."""
        with self._rp_called_through_pipeline():
            return super()._precompute_ref_logps(*args, **kwargs)

    @contextlib.contextmanager
    def _rp_called_through_pipeline(self) -> Iterator[None]:
        """Run calls of the model itself through its pipeline in the block."""
        held = None if getattr(self, "model_init", None) is not None else self.model.__dict__
        if held is None or isinstance(held.get("forward"), PipelineForward) or self.pipeline.cut.report.is_whole:
            yield
            return
        before = held.get("forward")
        held["forward"] = functools.wraps(self.model.forward, updated=())(PipelineForward(self, before))
        try:
            yield
        finally:
            if before is None:
                del held["forward"]
            else:
                held["forward"] = before


class PipelineForward(OtherForward):
    """The forward of a model that calls the pipeline around it; with a cache, the model's own."""

    def __init__(self, trainer: FrozenModelTrainer, before: Any) -> None:
        super().__init__(trainer._rp_in_autocast(self._run), before)
        self._trainer = trainer
        self._is_running = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # a cache is filled by `generate`, which has its own way; and the pipeline may call the model to prove its loss
        if self._is_running or cache_of(kwargs) is not None or kwargs.get("use_cache"):
            return self._own(self._trainer.model)(*args, **kwargs)
        self._is_running = True
        try:
            return self._trainer.pipeline(*args, **kwargs)
        finally:
            self._is_running = False

    def _own(self, model: nn.Module) -> Callable[..., Any]:
        found: Callable[..., Any] = self.before or types.MethodType(type(model).forward, model)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model its own forward: the pipeline has the weights of this one."""
        copied = memo[id(self._trainer.model)]
        return types.MethodType(type(copied).forward, copied)
