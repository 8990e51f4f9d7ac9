"""Decide whether a batch runs in microbatches, and whether its loss is computed once for the whole batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten.errors.failures import format_bytes
from yobx_flatten.huggingface.cache_names import cache_of, is_cache, name_in, named_for
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ..batch.loss_proof import LossProof, LossWay
from ..engine.config import RoundPipeRunConfig
from ..engine.loss_check import NONLINEAR
from ..errors import ConfigError, LossError, RoundPipeWarning, SplitError, warn
from ..pipeline import RoundPipe
from . import batches
from .adapters import model_inside, plain_rows, without_cache
from .cutting.caches import HeldCache, cache_argument, has_layers, home, split_held
from .cutting.capture import asked_for, install_hooks
from .cutting.cut import Cut
from .loss.call_options import CALL_OPTIONS, CallOptions
from .loss.own_loss import UnprovenLossError, has_labels, has_router_logits, rows_of_call, wants_tuple
from .loss_proof import LossOfModel, LossWays, PieceRows


class CutModel(RoundPipe):
    """A pipeline of a split Hugging Face model, which decides how the loss of each batch is computed."""

    _rp_cut: Cut
    _rp_warned_of: frozenset[str] = frozenset()

    def __init__(self, made: Cut, **options: Any) -> None:
        self.__dict__["_rp_cut"] = made
        super().__init__(made.model, **options)

    @functools.cached_property
    def _rp_losses(self) -> LossWays:
        return LossWays(self._rp_rows)

    @functools.cached_property
    def _rp_rows(self) -> PieceRows:
        return PieceRows(self._rp_cut, self._rp_engine, shares_batches=self._rp_options.has_groups)

    def _rp_layers(self, model: nn.Module) -> list[nn.Module]:
        return list(self.cut.pieces)

    def _rp_build(self, *args: Any, **kwargs: Any) -> None:
        super()._rp_build(*args, **kwargs)
        self._rp_engine.row_check = None  # `_rp_rows` checks the pieces for each kind of call
        self._rp_engine.few_rows = lambda batch, config: self._rp_rows.few_rows(batch, config)

    def _rp_read_model(self) -> None:
        """If the model was changed, update the split and discard the results of loss checks."""
        made = self._rp_cut.current()
        if made is not self._rp_cut:
            self._rp_cut = made
            self.__dict__.pop("_rp_losses", None)
            self.__dict__.pop("_rp_rows", None)

    def _rp_check_model(self) -> None:
        """Do nothing, because :meth:`_rp_prepared` detects changes of the model in each call."""

    _rp_runs_model = True  # pieces call copies that share the hooks of the model

    @property
    def model(self) -> nn.Module:
        """The submodule ``model`` of the wrapped model (a decoder without its head); else the wrapped model itself."""
        inner = getattr(self.cut.model, "model", None)
        return inner if isinstance(inner, nn.Module) else self.cut.model

    @property
    def cut(self) -> Cut:
        """The split of the model into modules, and a report about the split and the way losses are computed."""
        if not (shown := self._rp_losses.shown if "_rp_losses" in self.__dict__ else ()):
            return self._rp_cut
        report = dataclasses.replace(self._rp_cut.report, losses=tuple(shown))
        return dataclasses.replace(self._rp_cut, report=report)

    def _rp_way(self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig) -> LossWay:
        """Decide how the loss of a batch is computed from the losses of its microbatches."""
        options: CallOptions = kwargs[CALL_OPTIONS]  # replaced below, to store the weights of the microbatch losses
        if options.weight_by is not None:  # set by `LongRows`: a check in one process would wait for the others
            return options.weight_by
        resolved = self._rp_config(config)
        is_wanted = has_labels(self.cut.model, kwargs) or resolved.requires_grad
        if resolved.loss_reduction == "joined":
            self._rp_check_alone()
            return "joined"
        is_one = resolved.num_microbatch == 1
        if options.smoothed_loss is not None or (is_one and not self._rp_options.has_groups) or not is_wanted:
            # A smoothed loss is computed by this package, and one microbatch in one process needs no weights. A call
            # without labels and gradients rarely has a loss, which then counts as unchecked.
            if options.smoothed_loss is not None:
                kwargs[CALL_OPTIONS] = dataclasses.replace(options, weight_by="items")
            return "items"
        proof = self._rp_losses.find(args, kwargs, resolved)
        if self._rp_options.has_groups and proof.way != "items":
            if is_one:  # may be the whole batch; otherwise its loss raises an error
                return "items"
            raise UnprovenLossError
        if proof.way in ("items", "rows", "sum"):
            kwargs[CALL_OPTIONS] = dataclasses.replace(options, weight_by=proof.way)
        elif proof.compared or proof.way == "whole":  # otherwise no label counts in this batch, and the loss is zero
            self._rp_warn_of_loss(proof, rows_of_call(args, kwargs))
        return proof.way

    def _rp_way_of_function(
        self, args: tuple[Any, ...], kwargs: Kwargs, function: LossOfModel, config: RoundPipeRunConfig, way: LossWay
    ) -> LossWay:
        """Return how to combine the microbatch losses of a caller's ``loss_fn``, if the model also computes a loss."""
        resolved = self._rp_config(config)
        is_one, has_groups = resolved.num_microbatch == 1, self._rp_options.has_groups
        if way in ("joined", "whole") or (is_one and not has_groups):
            return way
        proof = self._rp_losses.find(args, kwargs, resolved, function)
        if has_groups and (proof.way in ("joined", "whole") or not proof.compared):
            if is_one:  # may be the whole batch; otherwise its loss raises an error
                kwargs[CALL_OPTIONS] = dataclasses.replace(kwargs[CALL_OPTIONS], weight_by=None)
                return way
            raise LossError(
                "loss_fn does not return a multiple of the loss that the model computes from labels, or this process "
                "has too few rows to check this. Any other loss needs all rows of the batch, but each process has only "
                "a part of them. Give labels to loss_fn only:\n"
                "    forward_backward(input_kwargs=without_labels, label=labels, loss_fn=loss_fn)"
            )
        if proof.way in ("items", "rows", "sum"):
            return way
        if proof.compared or proof.way == "whole":
            self._rp_warn_of_loss(proof, rows_of_call(args, kwargs), "loss_fn")
        return proof.way

    def _rp_way_for_rows(
        self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, way: LossWay, *, is_late: bool = False
    ) -> LossWay:
        """Decide whether modules must run once for the whole batch, because rows influence each other in them."""
        # is_late: whether gradients are scaled after the last microbatch
        options: CallOptions = kwargs[CALL_OPTIONS]
        last, resolved = len(self.cut.pieces) - 1, self._rp_config(config)
        if way == "whole" or resolved.num_microbatch == 1:
            return way
        # the loss of the last piece was checked separately
        is_loss_only = way == "joined" or options.loss_only or options.smoothed_loss is not None
        rows = self._rp_rows.mixing(args, kwargs, resolved, last if is_loss_only else last + 1)
        piece = rows.mixes
        if piece is None and not (rows.is_nonlinear and is_late and way != "joined"):
            return way
        title = "A layer" if piece is None else self._rp_rows.title(piece)
        if self._rp_options.has_groups:
            raise SplitError(
                f"{title} computes different values or gradients for a whole batch than for parts of it, but each "
                "process has only a part of the batch, so results would be wrong. Train in one process:\n"
                "    wrap_model_to_roundpipe(model)"
            )
        if piece is None:
            self._rp_warn_of_loss(NONLINEAR, rows_of_call(args, kwargs))
            return "joined"
        found: LossWay = "joined" if piece == last and last > 0 else "whole"
        how = "this module runs once for the whole batch" if found == "joined" else "such batches run in one microbatch"
        text = f"{title} computes different values or gradients for a batch than for microbatches. So {how}."
        self._rp_warn_once("rows", f"{type(self.cut.model).__name__}: {text}")
        return found

    def _rp_warn_once(self, about: str, text: str) -> None:
        if about not in self._rp_warned_of:
            self._rp_warned_of |= {about}
            warn(text, RoundPipeWarning)

    def _rp_way_without_parts(self, kwargs: Kwargs) -> LossWay:
        """Decide how the loss is computed for labels that cannot be checked, and warn about it."""
        way: LossWay = "whole" if self.cut.report.is_whole or is_cache(cache_of(kwargs)) else "joined"
        self._rp_warn_of_loss(LossProof(way, "this batch has labels of a kind that was not checked"), 0)
        return way

    def _rp_warn_of_loss(self, proof: LossProof, rows: int, whose: str = "") -> None:
        # whose: name of the function that computes the loss. Default: the class of the model.
        held = f" ({format_bytes(proof.row_nbytes * rows)} on the host)" if proof.row_nbytes and rows else ""
        how = (
            f"the last layer and the loss run once for the whole batch, on joined outputs of earlier layers{held}"
            if proof.way == "joined"
            else "such batches run in one microbatch"
        )
        self._rp_warn_once(
            "loss",
            f"The loss of {whose or type(self.cut.model).__name__} cannot be computed from the losses of microbatches: "
            f"{proof.reason.rstrip('.')}. So {how}, and the loss is that of the whole batch.",
        )

    def _rp_prepared(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: RoundPipeRunConfig | None
    ) -> tuple[Kwargs, RoundPipeRunConfig]:
        """Return the keyword arguments of a call, and a configuration that splits inputs and merges outputs."""
        model = self.cut.model
        if kwargs.get("adapter_names") is not None:  # PEFT selects adapters by hooks on layers
            raise ConfigError(
                "adapter_names: rows of one batch cannot use different adapters in a pipeline. Call once per adapter:\n"
                '    model.set_adapter("name")\n'
                "    model(**rows_of_that_adapter)"
            )
        tokens = kwargs.get("input_ids")
        if kwargs.get("cu_seq_lens_q") is not None and isinstance(tokens, torch.Tensor) and len(tokens) > 1:
            raise ConfigError(
                f"cu_seq_lens_q has the offsets of the texts in all {len(tokens)} rows together, so the rows cannot be "
                "split. Pass an attention_mask instead, or concatenate the rows:\n    DataCollatorWithFlattening()"
            )
        # otherwise the model's forward would warn in each phase and microbatch, at a line of this package
        inner = model_inside(model)
        renamed = named_for(inner.forward, dict(kwargs))
        if (before := name_in(kwargs)) != (wanted := name_in(renamed)):
            kind = type(inner).__name__
            warn(f"{kind} calls its cache `{wanted}`. Use `{wanted}` instead of `{before}`.", FutureWarning)
        prepared = plain_rows(without_cache(model, renamed))
        if asked_for(model, prepared) != "none":
            install_hooks(model)
        self._rp_read_model()  # after hooks are installed, which copies share
        if "packed" not in self._rp_warned_of and batches.is_packed(prepared):
            self._rp_warned_of |= {"packed"}
            self.synchronize()  # a background step would change weights between two calls
            if batches.keeps_texts_apart(self._rp_cut.model) is False:
                warn(
                    f"position_ids restart in a row, so the row has several texts. {type(self._rp_cut.model).__name__} "
                    "passes its state from one text to the next, so losses differ from those of separate texts. Give "
                    'each text its own row:\n    tokenizer(texts, padding=True, return_tensors="pt")',
                    RoundPipeWarning,
                )
        config = (given or RoundPipeRunConfig()).over(self._rp_options.model_run_config)
        if config.split_input is None:
            pictures = batches.split_pictures(getattr(model, "config", None), prepared)
            config = dataclasses.replace(config, split_input=batches.split_lists(model, args, prepared, pictures))
        prepared.setdefault(CALL_OPTIONS, CallOptions())
        if config.merge_output in (None, True):
            # the loss of experts is computed from router logits, which a tuple does not name
            as_tuple = has_router_logits(model, prepared) and wants_tuple(model, prepared)
            if as_tuple:
                prepared["return_dict"] = True

            def merge(outputs: list[PyTree]) -> PyTree:
                joined = batches.merge_with_loss(model, prepared, outputs)
                return joined.to_tuple() if as_tuple else joined

            config = dataclasses.replace(config, merge_output=merge)
        elif config.merge_output is not False:
            merge_as_asked = functools.partial(batches.merge_as_asked, config.merge_output)
            config = dataclasses.replace(config, merge_output=merge_as_asked)
        return prepared, config

    def _rp_with_cache(self, kwargs: Kwargs, config: RoundPipeRunConfig) -> tuple[Kwargs, RoundPipeRunConfig]:
        if config.resolved(1).requires_grad:
            raise ConfigError(
                "A KV cache works without gradients only, because recomputed layers would write to the cache twice:\n"
                "    with torch.no_grad(): model(..., use_cache=True)"
            )
        name, cache = name_in(kwargs) or cache_argument(self.cut.model), cache_of(kwargs)
        cache, merge = home(model_inside(self.cut.model)) if cache is None else cache, config.merge_output
        if name is None or cache is None or not has_layers(cache) or not callable(merge):
            made = "" if name is None else f"    model(..., {name}=DynamicCache(config=model.config))\n"
            raise ConfigError(
                "A pipeline can use a KV cache only if outputs are joined (no merge_output=False) and the cache has a "
                f"list of layers. Pass a cache with layers, or no cache:\n{made}    model(..., use_cache=False)"
            )
        cut, joined = config.split_input, functools.partial(batches.merge_with_cache, cache, merge)
        if cut is not None and not callable(cut):
            raise ConfigError("With a KV cache, give a function as split_input: lambda args, kwargs, count: ...")
        config = dataclasses.replace(config, merge_output=joined, split_input=split_held(cut))
        return {**kwargs, name: HeldCache(cache)}, config
