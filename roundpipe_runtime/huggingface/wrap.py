"""Wrap a Hugging Face model, so that it trains through a pipeline and keeps its interface."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn

from yobx_flatten.core.compare import relative_difference, tolerance
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.errors.failures import result_or
from yobx_flatten.huggingface.cache_names import cache_of, is_cache, name_in
from yobx_flatten.registry.patches import AttributePatch
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree

from ..batch import entries
from ..batch.loss_proof import LossWay
from ..device.composite import check_copyable, stored_bytes
from ..engine.config import RoundPipeRunConfig
from ..engine.loss_check import JoinedLossError
from ..errors import REPLACED_FORWARD, ConfigError, CutError, CutRefusedWarning, warn
from ..optim.parameters import resized_late
from ..pipeline import RoundPipe
from ..pipeline.live import OtherForward, with_own_forwards
from ..pipeline.roundpipe import back_from, forward_backward_method
from .adapters import model_inside, random_tokens
from .batches import WholeBatchLoss, loss_fn_with_weight
from .call_ways import CutModel
from .cutting.caches import cache_argument, home
from .cutting.check import evaluating
from .cutting.cut import Cut, cut, pieces_of, whole
from .cutting.cut_plan import CannotJoinError
from .loss import own_loss as model_loss
from .loss.call_options import CALL_OPTIONS, CallOptions, SmoothedLoss, smoothed_call
from .loss.own_loss import ShareOfOwnLoss, UnprovenLossError, has_labels, own_loss, rows_of_call, wants_tuple
from .loss_proof import LossOfModel

_LOG = logging.getLogger(__name__)


def wrap_model_to_roundpipe(
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,  # smaller models gain nothing from microbatches
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

    A forward on a small batch finds how to split the model (:func:`cut`), and the split model is compared with the
    original model. If the model cannot be split, it runs as one module, and a warning states the reason.

    Args:
        model: a Hugging Face model, or any module that keeps its layers in an ``nn.ModuleList``.
        use_sequential_preset: ``True``: raise an error if the model cannot be split. ``False``: do not split the model.
            Default: split the model if possible.
        lower_threshold: size in bytes; a smaller model is not split, and runs in one microbatch.
        upper_threshold: size in bytes; a model of at most this size is not split. Default: 0.
        skip_modules: modules whose layers are not split.
        override_config: ``{model: RoundPipeRunConfig(...)}`` overrides ``model_run_config``. Other keys are refused.
        model_run_config: default settings for every call.
        name: name in errors, and in seeds of layers such as dropout (default: in errors ``"file:line"`` of the call).
        example: keyword arguments of the model's forward for the split. Default: a few tokens.
        check: whether to compare the split model with the original model.
        **roundpipe_kwargs: further arguments of :class:`RoundPipe`, such as ``devices`` and ``compile``.

    Returns:
        A pipeline around the model.

    Raises:
        CutError: the model does not run on the example, or cannot be split although ``use_sequential_preset=True``.
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
    if isinstance(model, RoundPipe):
        raise ConfigError("The model is a RoundPipe already: use it as it is.")
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"wrap_model_to_roundpipe needs a Hugging Face model, found {type(model).__qualname__} {model!r:.60}. Load "
            "it first:\n    wrap_model_to_roundpipe(AutoModelForCausalLM.from_pretrained(...))"
        )
    check_copyable(model)  # before a check runs the model
    overrides = override_config or {}
    if others := [type(module).__name__ for module in overrides if module is not model]:
        raise ConfigError(
            f"override_config: {', '.join(others)} cannot have its own configuration, as the model is one pipeline. "
            "Wrap the submodule alone, or give the configuration to the whole model:\n"
            "    wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(...))"
        )
    config = overrides.get(model, RoundPipeRunConfig()).over(model_run_config or RoundPipeRunConfig())
    size = sum(stored_bytes(p) for p in model.parameters())
    if use_sequential_preset is False or size < lower_threshold or size <= (upper_threshold or 0):
        made = whole(model)
        if size < lower_threshold:
            config = RoundPipeRunConfig(num_microbatch=1).over(config)
    else:
        skipped = [module for module in model.modules() if module in skip_modules]
        made = cut(model, example, check=check, skip_modules=skipped)
        if made.report.is_whole:
            reason, message = made.report.refused[-1]
            if "forward" in vars(model_inside(model)):
                message = message.rstrip(".") + REPLACED_FORWARD
            kind = made.report.model
            if use_sequential_preset is True:
                raise CutError(reason, f"{kind} cannot be split: {message}")
            warn(f"{kind} runs as one module, as it cannot be split ({reason}): {message}", CutRefusedWarning)
    if roundpipe_kwargs.get("compile") and made.report.is_whole:
        raise ConfigError(
            f"{made.report.model} runs as one module, so it has no layers to compile. Split the model with "
            "lower_threshold=0, or call without compile=."
        )
    return WrappedModel(made, name=name, model_run_config=config, **roundpipe_kwargs)


class WrappedModel(CutModel):
    """A Hugging Face model that runs through a pipeline, made by :func:`wrap_model_to_roundpipe`.

    Parameters, ``config``, ``generate``, ``save_pretrained`` and all other attributes are those of the wrapped model.
    ``forward`` and ``forward_backward`` take the arguments of the model's forward.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import RoundPipe
    >>> from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> model = wrap_model_to_roundpipe(LlamaForCausalLM(config), lower_threshold=0, devices="virtual:2")
    >>> isinstance(model, RoundPipe), model.config.hidden_size, model.model.layers[0].mlp.up_proj.weight.shape
    (True, 16, torch.Size([32, 16]))
    >>> model.close()
    """

    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """Run the model forward, microbatch by microbatch, and return its joined output.

        With labels, the output contains the loss of the whole batch.

        Args:
            *args: positional arguments of the model.
            roundpipe_run_config: settings of this call, which override the settings of the pipeline.
            **kwargs: keyword arguments of the model. ``use_cache`` is ``False`` by default. A KV cache is split into
                one cache per microbatch; after the call, it has the new keys and values of all microbatches.

        Returns:
            The output of the whole batch.

        Raises:
            BatchStructureError: the model's forward takes a different branch than for the example batch of the split.
            SplitError: inputs cannot be split into microbatches.
        """
        kwargs, config = self._rp_prepared(args, kwargs, roundpipe_run_config)
        if is_cache(cache_of(kwargs)) or kwargs.get("use_cache"):
            kwargs, config = self._rp_with_cache(kwargs, config)
            outputs = super().forward(*args, roundpipe_run_config=config, **kwargs)
        else:
            way = self._rp_way_for_rows(args, kwargs, config, self._rp_way(args, kwargs, config))
            outputs = self._rp_forward(args, kwargs, config, way)
        return outputs[0] if config.merge_output is False else outputs

    def _rp_forward(self, args: tuple[Any, ...], kwargs: Kwargs, config: RoundPipeRunConfig, way: LossWay) -> PyTree:
        if way in ("items", "rows", "sum"):
            try:
                return super().forward(*args, roundpipe_run_config=config, **kwargs)
            except UnprovenLossError:  # the labels are of another kind than those that were checked
                if self._rp_options.has_groups:
                    raise
                way = self._rp_way_without_parts(kwargs)
        resolved = self._rp_config(config)
        if way == "joined":
            self._rp_engine.synchronize()  # a background step would change weights before the backward
        if way == "joined" and (join := self._rp_rows.join(args, kwargs, resolved)) is not None:
            try:
                return self._rp_engine.forward_joined(args, kwargs, resolved, join)
            except CannotJoinError as error:
                _LOG.info("%s runs in one microbatch: %s", self.cut.report.model, error)
        one = dataclasses.replace(config, num_microbatch=1)
        return super().forward(*args, roundpipe_run_config=one, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate through the pipeline, or on the host if a trial run of the pipeline fails.

        Args:
            *args: positional arguments of the model's ``generate``.
            **kwargs: keyword arguments of the model's ``generate``.

        Returns:
            The value that the model's ``generate`` returns.
        """
        self.synchronize()
        self._rp_read_model()  # before the forward is replaced, because copies would have the replacement
        generate: Callable[..., Any] = self.cut.model.generate  # type: ignore[assignment] # attributes of modules
        with contextlib.ExitStack() as stack:
            for path in self._rp_paths:
                stack.enter_context(forward_of(path.model, path))
            if not self._rp_paths and self._rp_host_reason is None:
                stack.enter_context(forward_of(self.cut.model, self.forward))
            return generate(*args, **kwargs)

    @functools.cached_property
    def _rp_paths(self) -> list[GenerationPath]:
        """Pipelines with which ``generate`` runs a split encoder-decoder; an empty list for every other model."""
        inner = model_inside(self.cut.model)
        find = getattr(inner, "get_encoder", None)
        is_pair = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        if self.cut.report.is_whole or find is None or not is_pair:
            return []
        encoder, config = find(), self._rp_options.model_run_config
        apart = isinstance(encoder, nn.Module) and encoder is not inner
        wrap = functools.partial(
            WrappedModel, name=self.name, model_run_config=config, pin_model="off", devices=self.devices
        )
        return [GenerationPath(part, wrap) for part in ([encoder] if apart else []) + [inner]]

    def close(self) -> None:
        """Wait for an optimizer step in the background, and end the threads; the pipeline cannot run afterwards."""
        for path in self.__dict__.pop("_rp_paths", ()):
            path.close()
        super().close()

    @functools.cached_property
    def _rp_host_reason(self) -> str | None:
        if (reason := reason_for_host(self.cut, self.forward)) is not None:
            _LOG.info("%s generates on the host: %s", self.cut.report.model, reason)
        return reason

    @forward_backward_method
    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = own_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
    ) -> Any:
        """Run forward, loss and backward, and return the loss.

        If ``input_kwargs`` contain labels, the model computes its own loss. If ``loss_fn`` returns the model's loss, or
        a multiple of it, loss and gradient are those of the whole batch.

        Args:
            input_args: positional arguments of the model.
            input_kwargs: keyword arguments of the model.
            label: labels for ``loss_fn``, which are split into microbatches like the inputs.
            loss_fn: ``loss_fn(outputs, label)`` returns the loss of a microbatch. Default: the loss that the model
                computed. With a `SmoothedLoss`, the labels can also be among ``input_kwargs``.
            return_outputs: whether to also return the outputs, joined and detached.
            run_config: settings of this call, which override the settings of the pipeline.

        Returns:
            The loss of the batch, detached, on the host; or the list of losses if ``loss_fn`` returns several. With
            ``return_outputs``, ``(loss, outputs)``.

        Raises:
            BatchStructureError: the model's forward takes a different branch than for the example batch of the split.
            SplitError: inputs or labels cannot be split into microbatches.
            LossError: ``loss_fn`` returned something that is not a loss.
        """
        with self._rp_engine.groups.entering():
            return self._rp_forward_backward(input_args, input_kwargs, label, loss_fn, return_outputs, run_config)

    def _rp_forward_backward(
        self,
        input_args: tuple[Any, ...],
        input_kwargs: Mapping[str, Any] | None,
        label: Any,
        loss_fn: Callable[[Any, Any], Any],
        return_outputs: bool,
        run_config: RoundPipeRunConfig | None,
    ) -> Any:
        model = self.cut.model
        options: CallOptions = (input_kwargs or {}).get(CALL_OPTIONS, CallOptions())
        if isinstance(loss_fn, SmoothedLoss):
            input_kwargs, smoothed, labels = smoothed_call(model, loss_fn, input_kwargs or {}, label)
            options = CallOptions(smoothed_loss=smoothed, labels=labels)
            loss_fn, label = own_loss, None
        input_kwargs = {**(input_kwargs or {}), CALL_OPTIONS: options}
        kwargs, config = self._rp_prepared(input_args, input_kwargs, run_config)
        if is_cache(cache_of(kwargs)) or kwargs.get("use_cache"):
            names = " and ".join(name for name in (name_in(kwargs), "use_cache") if name and kwargs[name])
            raise ConfigError(f"forward_backward returns no cache: leave {names} out.")
        is_smoothed = options.smoothed_loss is not None
        computes_loss = is_smoothed or loss_fn is own_loss or has_labels(model, kwargs)
        if loss_fn is own_loss and not return_outputs:
            kwargs[CALL_OPTIONS] = dataclasses.replace(options, loss_only=True)
        way: LossWay = self._rp_way(input_args, kwargs, config) if computes_loss else "items"
        way = self._rp_way_for_rows(input_args, kwargs, config, way, is_late=computes_loss)

        def joined(way: LossWay) -> Any:
            with torch.enable_grad():
                outputs = self._rp_forward(input_args, kwargs, config, way)
            return back_from(outputs[0] if config.merge_output is False else outputs, label, loss_fn, return_outputs)

        if computes_loss and not is_smoothed and model_loss.has_auxiliary_loss(model, kwargs):
            if self._rp_groups is not None:
                merge = (run_config or RoundPipeRunConfig()).over(self._rp_options.model_run_config).merge_output
                whole = WholeBatchLoss(model, kwargs, loss_fn, label, merge, as_tuple=wants_tuple(model, input_kwargs))
                together = self._rp_groups.forward_backward_whole
                found = together(self._rp_engine, input_args, kwargs, whole, self._rp_config(config))
                return found if return_outputs else found[0]
            return joined(way)
        if computes_loss and not isinstance(loss_fn, ShareOfOwnLoss) and loss_fn is not own_loss:
            way = self._rp_way_of_function(input_args, kwargs, LossOfModel(loss_fn, label), config, way)
        if way == "joined" or (not computes_loss and self._rp_config(config).loss_reduction == "joined"):
            self._rp_check_alone()
            return joined(way)
        if way == "whole":
            config = dataclasses.replace(config, num_microbatch=1)
        if computes_loss:  # shares of a mean are added
            config = dataclasses.replace(config, loss_reduction="sum")
        # the rows of the batch over all ranks are known when a microbatch has its loss
        rows_of_batch = functools.partial(self._rp_engine.groups.rows_of_batch, rows_of_call(input_args, kwargs))
        weighted = loss_fn_with_weight(loss_fn, rows_of_batch if computes_loss else None, kwargs)
        run = functools.partial(super().forward_backward, input_args, kwargs, label, weighted, return_outputs)
        try:
            result = run(config)
        except (UnprovenLossError, JoinedLossError) as error:
            if self._rp_options.has_groups:
                raise
            if isinstance(error, JoinedLossError):
                return self._rp_joined_instead(error, functools.partial(joined, "joined"))
            if self._rp_way_without_parts(kwargs) == "joined":
                return joined("joined")
            result = run(dataclasses.replace(config, num_microbatch=1))
        return (result[0], result[1][0]) if return_outputs and config.merge_output is False else result

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the last optimizer step, and save the model (with LoRA, only adapters) with its ``save_pretrained``.

        Args:
            *args: positional arguments of the model's ``save_pretrained``.
            **kwargs: keyword arguments of the model's ``save_pretrained``.

        Returns:
            The value that the model's ``save_pretrained`` returns.
        """
        self.synchronize()
        return self.cut.model.save_pretrained(*args, **kwargs)  # type: ignore[operator] # attributes of modules

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the last optimizer step, and upload the model with its ``push_to_hub``.

        Args:
            *args: positional arguments of the model's ``push_to_hub``.
            **kwargs: keyword arguments of the model's ``push_to_hub``.

        Returns:
            The value that the model's ``push_to_hub`` returns.
        """
        self.synchronize()
        return self.cut.model.push_to_hub(*args, **kwargs)  # type: ignore[operator] # attributes of modules

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize the token embeddings as the model does, unless an optimizer may already have copies of the embeddings.

        Args:
            *args: positional arguments of the model's ``resize_token_embeddings``.
            **kwargs: keyword arguments of the model's ``resize_token_embeddings``.

        Returns:
            The value that the model's ``resize_token_embeddings`` returns.

        Raises:
            ConfigError: the pipeline already has master weights, or has ``update="in_place"`` or ``"in_backward"``.
        """
        self.synchronize()
        if (args or kwargs) and (self._rp_engine.store.masters() or self._rp_options.update != "masters"):
            raise resized_late()
        return self.cut.model.resize_token_embeddings(*args, **kwargs)  # type: ignore[operator] # attributes of modules

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert the dtype of the model, as in ``model.half()``; raise an error if the device would change."""
        device = fn(torch.empty(0)).device
        if device.type != "cpu":
            raise ConfigError(
                f"The parameters of a pipeline stay on the host, and to('{device}') would move them. Leave to() out, "
                f"and choose the devices of the layers here:\n    wrap_model_to_roundpipe(model, devices=['{device}'])"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch has no types for it

    def __getstate__(self) -> dict[str, Any]:
        of_cut = {"program": self.cut.program, "report": self.cut.report, "names": list(self.cut.layers)}
        return {**super().__getstate__(), **of_cut}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model, program = state["model"], state["program"]
        made = whole(model)
        if program is not None:
            layers = {name: model.get_submodule(name) for name in state["names"]}
            made = Cut.of(model, pieces_of(model, layers, program), state["report"], layers)
        self.__dict__["_rp_cut"] = made
        super().__setstate__(state)


# ``generate`` runs through the pipeline if a trial gives the model's results.
_PROMPT, _PADDING = 5, 2


def forward_of(model: nn.Module, forward: Callable[..., Any]) -> AttributePatch:
    # `generate` calls the model itself, so only an attribute of the model can replace its forward
    inner = model_inside(model)
    other = OtherForward(forward, vars(inner).get("forward"))
    return AttributePatch(vars(inner), "forward", functools.wraps(inner.forward, updated=())(other))


def reason_for_host(cut: Cut, forward: Callable[..., Any]) -> str | None:
    """Return the reason why a model cannot generate through its pipeline, or ``None`` if it can."""
    if cut.report.is_whole:
        return "it could not be split into layers"
    if (cache := home(model_inside(cut.model))) is None:
        return "it has no cache of a known class"
    # a model may raise any error for a cache
    with torch.no_grad(), evaluating(cut.model):
        trial = functools.partial(_difference, cut.model, forward, cache)
        return result_or(trial, lambda error: f"{type(error).__name__}: {error}")


def _difference(model: nn.Module, forward: Callable[..., Any], cache: Any) -> str | None:
    tokens = random_tokens(model, 2, _PROMPT + 1)
    mask = torch.ones_like(tokens)
    mask[0, :_PADDING] = 0
    name = cache_argument(model)
    assert name is not None  # the model accepts the cache
    caches = (cache, copy.deepcopy(cache))
    runs: tuple[Callable[..., Any], ...] = (forward, model)
    for start, stop in ((0, _PROMPT), (_PROMPT, _PROMPT + 1)):
        call = {"input_ids": tokens[:, start:stop], "attention_mask": mask[:, :stop], "use_cache": True}
        found, expected = (
            run(**call, **{name: held}).logits[:, -1].double() for run, held in zip(runs, caches, strict=True)
        )
        difference = relative_difference(expected, found)
        if not difference <= tolerance("gradients", *(p.dtype for p in model.parameters())):
            return f"with a cache, logits through the pipeline differ by {difference:.1e}"
    return None


_ROWS = 2  # of a trial


class GenerationPath:
    """Runs an encoder or an encoder-decoder in ``generate`` through a pipeline, which is created by the first call.

    The model's own forward runs on the host if the pipeline fails, or if its outputs differ from the model's outputs.
    """

    def __init__(self, model: nn.Module, wrap: Callable[[Cut], Any]) -> None:
        self.model, self._wrap, self._tried = model, wrap, False
        self._pipeline: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with with_own_forwards(self.model):
            bound = inspect.signature(self.model.forward).bind_partial(*args)
            kwargs = {**bound.arguments, **kwargs}
            if not self._tried:
                self._tried = True
                # the code of a model may raise any error
                trial = functools.partial(self._reason_for_host, kwargs)
                if (reason := result_or(trial, lambda error: f"{type(error).__name__}: {error}")) is not None:
                    _LOG.info("%s runs on the host in generate: %s", type(self.model).__name__, reason)
                    self.close()
            return self.model.forward(**kwargs) if self._pipeline is None else self._pipeline.forward(**kwargs)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None

    def _reason_for_host(self, kwargs: Kwargs) -> str | None:
        """Create the pipeline; return the reason not to use it, or ``None`` if its outputs equal the model's."""
        name, cache = name_in(kwargs), cache_of(kwargs)
        rest = {key: value for key, value in kwargs.items() if key not in (name, "use_cache", "cache_position")}
        tensors = [leaf for leaf in pytree.tree_leaves(rest) if isinstance(leaf, torch.Tensor)]
        rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)

        def first(leaf: Any) -> Any:
            is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
            return leaf[:_ROWS].clone() if is_cut else leaf  # a copy, because some models write into their arguments

        example = {key: pytree.tree_map(first, value) for key, value in rest.items()}
        made = cut(self.model, example, check=False)
        if made.report.is_whole:
            raise CutError(*made.report.refused[-1])
        self._pipeline = self._wrap(made)
        calls: list[dict[str, Any]] = [example]
        with torch.no_grad(), evaluating(self.model):
            held: list[dict[str, Any]] = [{"use_cache": True} if cache is None and kwargs.get("use_cache") else {}] * 2
            if name is not None and cache is not None and entries.is_cache(cache) and not cache.get_seq_length():
                held = [{name: copy.deepcopy(cache), "use_cache": True} for _ in range(2)]
                calls.append({**example, "decoder_input_ids": example["decoder_input_ids"][:, -1:]})
            for call in calls:
                runs = zip((self._pipeline.forward, self.model.forward), held, strict=True)
                found, expected = (_first_tensor(run(**call, **more)) for run, more in runs)
                difference = relative_difference(expected, found)
                if not difference <= tolerance("gradients", *(p.dtype for p in self.model.parameters())):
                    return f"through the pipeline, its output differs by {difference:.1e}"
        return None


def _first_tensor(output: PyTree) -> torch.Tensor:
    logits = output.get("logits") if isinstance(output, dict) else None
    found: torch.Tensor = output[0] if logits is None else logits
    return found.double()
