"""Settings of a pipeline: run configurations, and which layers torch compiles."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from yobx_flatten.registry.patches import AttributePatch

from ..errors import ConfigError
from ..schedule.plan import ModelExecutePlan


@dataclasses.dataclass(frozen=True, slots=True)
class RoundPipeRunConfig:
    """Configuration of a pipeline call. A field that is ``None`` gets the pipeline's setting, or else the default.

    Attributes:
        requires_grad: whether gradients are computed (default: ``torch.is_grad_enabled()`` at the call).
        output_device: device of the outputs (default: the CPU).
        preserve_rng_state: whether a recomputation draws the same dropout masks as the forward (default: ``True``).
        recompute_grain: whether the backward recomputes a ``"stage"`` (several layers) or one ``"layer"`` at a time
            (default: ``"stage"``). ``recompute_grain="layer"`` needs less memory on the device than ``"stage"``.
        num_microbatch: number of microbatches per batch (default: number of devices + 1).
        split_input: rule for splitting arguments, see :func:`roundpipe_runtime.batch.split` (default: along the batch).
        split_label: rule for splitting labels (default: along the batch).
        merge_output: rule for joining the outputs of microbatches, see :func:`roundpipe_runtime.batch.join` (default:
            ``True``). With ``merge_output=True``, outputs are concatenated along the batch. With
            ``merge_output=False``, outputs are not joined, and each output tensor is replaced by a
            :class:`RoundPipePackedData`.
        execute_plan: layers of each pipeline stage (default: planned automatically from measured times).
        loss_reduction: how the losses of microbatches are combined to the loss of the batch (default: ``"auto"``). With
            ``loss_reduction="auto"``, loss and gradients equal those without a pipeline. A test with a few rows of the
            batch searches for weights with which the losses of microbatches add up to the loss of the batch. If the
            test finds no such weights, the loss is computed once from the joined outputs. ``"mean"``: the loss of a
            microbatch is a mean over rows, and the loss of the batch is the mean over all rows. ``"sum"``: the losses
            of microbatches are added, for a script that divides the loss by the number of microbatches. ``"joined"``:
            the loss is computed once, from the joined outputs.
        last_stage_copies: number of devices that compute the last layer and the loss in ``forward_backward`` (default:
            1). Each of these devices computes some of the microbatches. The number applies only if ``execute_plan`` is
            automatic. With ``last_stage_copies="auto"``, a simulation chooses the number of devices. Results do not
            depend on ``last_stage_copies``.
        keep_parameters: GB of each device's memory for parameters that stay on the device after use, so that only
            changed parameters are uploaded again (default: 0). Frozen parameters have priority. With
            ``keep_parameters="auto"``, all parameters stay on the device if parameters and gradients fit into 60 % of
            its memory. Otherwise, as many parameters stay as fit into this share in addition to the pipeline stages.
            Call :meth:`RoundPipe.drop_kept_parameters` after a write through ``parameter.data``, because the pipeline
            detects such a write only if the write changes one of a few sampled values.
        upload_experts: which experts of a mixture-of-experts layer are copied to a device (default: ``"routed"``).
            ``"routed"``: only the experts that get tokens are copied. If the last measured call with inputs of the same
            size used more than 75 % of a layer's experts, all experts of the layer are copied before it runs.
            ``"all"``: all experts are copied before the layer runs. Both values give identical results.

    Raises:
        ConfigError: a field has an invalid value.

    >>> RoundPipeRunConfig(num_microbatch=4, loss_reduction="mean").num_microbatch
    4
    >>> RoundPipeRunConfig(num_microbatch=0)
    Traceback (most recent call last):
        ...
    roundpipe_runtime.errors.ConfigError: ...
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: Literal["stage", "layer"] | None = None
    num_microbatch: int | None = None
    split_input: Any = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: ModelExecutePlan | None = None
    loss_reduction: Literal["auto", "sum", "mean", "joined"] | None = None
    last_stage_copies: int | Literal["auto"] | None = None
    keep_parameters: float | Literal["auto"] | None = None
    upload_experts: Literal["routed", "all"] | None = None

    def __post_init__(self) -> None:
        for name, (is_right, expected) in _CHECKS.items():
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise ConfigError(f"RoundPipeRunConfig: {name} must be {expected}, found {value!r}.")

    def over(self, defaults: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """Return this configuration, with ``None`` fields filled from another configuration.

        >>> model = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
        >>> merged = RoundPipeRunConfig(num_microbatch=4).over(model)
        >>> merged.num_microbatch, merged.loss_reduction
        (4, 'mean')
        """
        if not isinstance(defaults, RoundPipeRunConfig):
            raise ConfigError(f"model_run_config must be a RoundPipeRunConfig, found {type(defaults).__qualname__}.")
        names = [field.name for field in dataclasses.fields(self)]
        return RoundPipeRunConfig(**{n: getattr(self if getattr(self, n) is not None else defaults, n) for n in names})

    def resolved(self, num_devices: int) -> RoundPipeRunConfig:
        """Return this configuration, with ``None`` fields filled by default values.

        ``execute_plan``, ``split_input`` and ``split_label`` may stay ``None``, which means "automatic".

        Args:
            num_devices: number of devices that the pipeline runs on.
        """
        return self.over(
            RoundPipeRunConfig(
                requires_grad=torch.is_grad_enabled(),
                output_device=torch.device("cpu"),
                preserve_rng_state=True,
                recompute_grain="stage",
                num_microbatch=num_devices + 1,
                merge_output=True,
                loss_reduction="auto",
                last_stage_copies=1,
                keep_parameters=0,
                upload_experts="routed",
            )
        )


def _is_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device | str) and torch.device(value) is not None
    except RuntimeError:
        return False


def _is_spec(value: Any) -> bool:
    return not isinstance(value, (bool, int, float, str))


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "requires_grad": (lambda v: type(v) is bool, "True, False or None"),
    "output_device": (_is_device, 'a torch.device, like "cpu"'),
    "preserve_rng_state": (lambda v: type(v) is bool, "True, False or None"),
    "recompute_grain": (lambda v: v in ("stage", "layer"), '"stage" or "layer"'),
    "num_microbatch": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    "split_input": (_is_spec, "(spec of args, spec of kwargs), a mapping from key paths or a function"),
    "split_label": (_is_spec, "a tree of TensorChunkSpec and Replicate or a function"),
    "merge_output": (
        lambda v: type(v) is bool or _is_spec(v),
        "True, False, a tree of TensorChunkSpec and Replicate, or a function",
    ),
    "execute_plan": (lambda v: isinstance(v, ModelExecutePlan), "a ModelExecutePlan"),
    "last_stage_copies": (lambda v: v == "auto" or (type(v) is int and v >= 1), 'an integer >= 1, or "auto"'),
    "keep_parameters": (
        lambda v: v == "auto" or (type(v) in (int, float) and v >= 0),
        'a number of GB of at least 0, or "auto"',
    ),
    "upload_experts": (lambda v: v in ("routed", "all"), '"routed" or "all"'),
    "loss_reduction": (lambda v: v in ("auto", "sum", "mean", "joined"), '"auto", "sum", "mean" or "joined"'),
}


# Compile layers with `torch.compile`: once per kind, because layers of one class share compiled code.
#
# The compiled code runs only in runs with gradients. All stages then run in one thread: torch's flag that a compilation
# is active is global, and models read the flag, so a batch in another thread would get a different mask.

# Attribute of layers that only call another module, which is compiled instead; `None` if nothing is compiled.
TO_COMPILE = "_rp_to_compile"
_CALLED = "_compiled_call_impl"  # where `torch.nn.Module.compile` stores the compiled call
# These modes record the addresses of parameters, which change each time when a layer is loaded to a device.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledLayers:
    """The layers of a pipeline that run compiled (``torch.compile``) when gradients are computed."""

    # options: keyword arguments of `torch.compile`; `None` disables it

    def __init__(self, layers: Sequence[nn.Module], options: Mapping[str, Any] | None = None) -> None:
        self.is_empty = options is None
        targets = [] if options is None else [getattr(layer, TO_COMPILE, layer) for layer in layers]
        # Use symbolic sizes from the first call: by default torch compiles again at the second size, and a layer
        # would be recomputed by other code than its forward.
        how = {"dynamic": True, **(options or {})}
        self._called: dict[int, tuple[nn.Module, Callable[..., Any]]] = {
            index: (target, torch.compile(target._call_impl, **how))
            for index, target in enumerate(targets)
            if isinstance(target, nn.Module) and any(True for _ in target.parameters())
        }

    def standing(self, index: int) -> contextlib.AbstractContextManager[None]:  # the caller holds the layer's lock
        """Use the compiled code of a layer for all calls of the layer in the with block."""
        target, called = self._called.get(index, (None, None))
        return contextlib.nullcontext() if target is None else AttributePatch(target, _CALLED, called)


NOT_COMPILED = CompiledLayers(())


def check_compile_options(given: object) -> Mapping[str, Any] | None:
    """Return the keyword arguments of ``torch.compile``; ``None`` if compilation is disabled.

    >>> check_compile_options(True), check_compile_options({"backend": "aot_eager"}), check_compile_options(False)
    ({}, {'backend': 'aot_eager'}, None)
    """
    if given is None or isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"compile must be True, or keyword arguments of torch.compile, found {given!r:.80}. Write:\n"
            '    RoundPipe(model, compile={"backend": "inductor"})'
        )
    mode = given.get("mode")
    if mode in _WITH_GRAPHS:
        raise ConfigError(
            f"compile: mode={mode!r} records the addresses of parameters in CUDA graphs, but a pipeline loads its "
            'layers to new addresses. Use mode="max-autotune-no-cudagraphs", or leave mode out.'
        )
    if given.get("dynamic", True) is None:
        raise ConfigError(
            "compile: dynamic=None compiles a layer again at the second size of its inputs, so the recomputation would "
            "run different code than the forward. Leave dynamic out, or use dynamic=False for batches of one size."
        )
    return dict(given)
