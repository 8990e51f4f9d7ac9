"""Split rows along their tokens over several processes; in attention, each process has all tokens of some heads.

Each rank has some tokens of every row. Positions of tokens are counted from the beginning of the row. The label of a
rank's last token is the first token of the next rank. The loss is a sum over tokens divided by the number of tokens in
the batch, so the gradients of the batch are the sum of the gradients of all ranks.
"""

# rank 0   tokens 0 to T/2    layers, each token independent ... attention: all tokens, half of the heads ... layers
# rank 1   tokens T/2 to T    layers, each token independent ... attention: all tokens, half of the heads ... layers

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from yobx_flatten.core.compare import relative_difference, tolerance
from yobx_flatten.registry.recipe.aliases import Kwargs

from ..distributed.ranks.ranks import check_mesh, job_timeout
from ..engine.config import RoundPipeRunConfig
from ..errors import ConfigError, ranks_disagree
from ..schedule.plan import ModelExecutePlan
from .adapters import model_inside, random_tokens, text_config
from .cutting.check import evaluating
from .loss.call_options import CALL_OPTIONS, CallOptions
from .wrap import WrappedModel, wrap_model_to_roundpipe

_NAMES = itertools.count()
_TAKEN = ("input_ids", "attention_mask", "labels")
_IGNORED = -100
_PERIOD = 0.0002  # seconds between two polls of an unfinished exchange
# The loss of each rank is divided by the tokens of the whole batch, so losses of ranks are added.
_SHARE = CallOptions(weight_by="sum")
# Tensors that do not change the result of attention; any other tensor may have a value for each head or token.
_PASSED_ON = ("position_ids", "shift_labels", "num_items_in_batch")


class LongRows:
    """A causal language model that splits long rows along their tokens over the processes of a mesh.

    All processes get the same rows, and each process computes some of the tokens on its own device. Loss and gradients
    differ from those of unsplit rows only by rounding errors, and are bitwise reproducible. With ``N`` processes, each
    device stores the activations of ``1 / N`` of the tokens. Attention needs memory for all tokens, but only for
    ``1 / N`` of the heads.

    Args:
        model: Hugging Face causal language model. The numbers of query heads and of key/value heads must be multiples
            of the number of processes.
        mesh: ``DeviceMesh`` of the processes, as for :class:`RoundPipe`.
        **options: further arguments of :func:`wrap_model_to_roundpipe`; ``devices`` must be one device.

    Raises:
        ConfigError: a number of heads is not a multiple of the number of processes, or the model computes different
            results for split rows than for unsplit rows.

    ::

        rows = LongRows(model, mesh=init_device_mesh("cpu", (2,)), devices="cuda:0")
        loss = rows.forward_backward({"input_ids": tokens, "labels": labels})
        rows.pipeline.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    """

    def __init__(self, model: nn.Module, *, mesh: DeviceMesh, **options: Any) -> None:
        check_mesh(mesh)
        self._inner = model_inside(model)
        self._pipeline: WrappedModel | None = None
        self._exchange = TokenExchange(mesh, self._reason)
        config, kind, size = text_config(self._inner), type(self._inner).__name__, self._exchange.size
        heads = getattr(config, "num_attention_heads", None)
        keys = getattr(config, "num_key_value_heads", None) or heads or 0
        if not heads or heads % size or keys % size:
            raise ConfigError(
                f"{kind} has {heads} query heads and {keys} key/value heads, which {size} processes cannot share. "
                "Start a number of processes that divides both numbers of heads."
            )
        if getattr(config, "output_router_logits", False):
            raise ConfigError(
                f"{kind} has a router loss over all tokens of a batch, but LongRows splits the tokens. Switch the "
                "router loss off: model.config.output_router_logits = False"
            )
        self._before = self._inner.config._attn_implementation  # type: ignore[union-attr] # attributes of modules have no types
        self._name = f"roundpipe_long_rows_{next(_NAMES)}"
        expected = _run(model, self._example())
        _attentions().register(self._name, self._attention)
        try:
            self._inner.set_attn_implementation(self._name)  # type: ignore[operator] # as above
            logits, loss = _run(model, self.cut(self._example()))
            length = logits.shape[1]
            own = expected[0][:, self._exchange.rank * length :][:, :length]
            total = self._exchange.swap(loss.double().expand(size).clone()).sum()
            for name, found, wanted in (("logits", logits, own), ("loss", total, expected[1])):
                difference = relative_difference(wanted.double(), found.double())
                if not difference <= tolerance("gradients", *(p.dtype for p in model.parameters())):
                    raise ConfigError(
                        f"{type(model).__name__} computes a different {name} for rows that are split along their "
                        f"tokens (difference {difference:.1e}): modules other than attention mix tokens, or the model "
                        "has its own loss. Train it with wrap_model_to_roundpipe."
                    )
            self._pipeline = wrap_model_to_roundpipe(
                model, mesh=mesh, **{"example": self.cut(self._example()), **options}
            )
            if (count := len(self._pipeline.devices)) > 1:
                raise ConfigError(
                    f"LongRows runs one device in each process, found {count} devices. Start more processes:\n"
                    f"    torchrun --nproc-per-node={count * self._exchange.size} train.py\n"
                    '    LongRows(model, mesh=mesh, devices=f"cuda:{local_rank}")'
                )
        except BaseException:
            self.close()
            raise

    @property
    def pipeline(self) -> WrappedModel:
        """The pipeline around the model, with the parameters; use it for optimizer steps and checkpoints."""
        assert self._pipeline is not None  # made in `__init__`
        return self._pipeline

    def forward_backward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run forward, loss and backward of rows that are split over the processes, and return the loss.

        Args:
            batch: ``input_ids`` and ``labels``, and an ``attention_mask`` if rows are padded on the right; the same
                batch in every process.

        Returns:
            The mean loss of the tokens whose label is not ignored, equal in every process.

        Raises:
            ConfigError: the batch has unsupported arguments, or padding has labels that are not ignored.
            DistributedError: the processes have different batches, or another process has failed.
        """
        own = self.cut(batch)
        pipeline = self.pipeline
        stages = [range(number, number + 1) for number in range(len(pipeline.cut.pieces))]
        plan = ModelExecutePlan(stages[:-1], stages[::-1])  # the same in all processes, not from measured times
        config = RoundPipeRunConfig(num_microbatch=1, loss_reduction="sum", execute_plan=plan)
        try:
            return pipeline.forward_backward(input_kwargs={**own, CALL_OPTIONS: _SHARE}, run_config=config)
        except BaseException:
            self._exchange.close()
            raise

    def cut(self, batch: Mapping[str, torch.Tensor]) -> Kwargs:
        """Return this process's part of the tokens, as keyword arguments of the model."""
        missing = [name for name in ("input_ids", "labels") if batch.get(name) is None]
        strange = [name for name in batch if name not in _TAKEN]
        if missing or strange:
            raise ConfigError(
                f"LongRows takes {', '.join(_TAKEN)}, but this batch "
                + (f"lacks {', '.join(missing)}." if missing else f"also has {', '.join(strange)}.")
            )
        size, tokens, labels = self._exchange.size, batch["input_ids"], batch["labels"]
        if (mask := batch.get("attention_mask")) is not None:
            padded = mask == 0
            if bool((padded[:, :-1] & ~padded[:, 1:]).any()):
                raise ConfigError(
                    'Rows are padded on the left, but LongRows needs padding on the right: padding_side="right".'
                )
            if bool((labels[padded] != _IGNORED).any()):
                raise ConfigError("Labels of padding must be -100:\n    labels[attention_mask == 0] = -100")
        stated = {"the batch": zlib.crc32(torch.cat([tokens, labels]).cpu().numpy().tobytes())}
        if self._pipeline is not None and (error := ranks_disagree(self._pipeline.ranks.exchange(stated))):
            raise error
        following = nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        counted = int((following != _IGNORED).sum())
        left = -tokens.shape[1] % size
        tokens = nn.functional.pad(tokens, (0, left), value=0)
        following = nn.functional.pad(following, (0, left), value=_IGNORED)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        length = tokens.shape[1] // size
        own = slice(self._exchange.rank * length, (self._exchange.rank + 1) * length)
        parts = [tensor[:, own].contiguous() for tensor in (tokens, positions, following)]
        return {
            **dict(zip(("input_ids", "position_ids", "labels"), parts, strict=True)),
            "shift_labels": parts[2],
            "num_items_in_batch": torch.tensor(max(counted, 1)),
            "use_cache": False,
        }

    def close(self) -> None:
        """End the threads of the pipeline, and restore the model's own attention."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._exchange.close()
        self._inner.set_attn_implementation(self._before)  # type: ignore[operator] # attributes of modules have no types
        with contextlib.suppress(KeyError):
            del _attentions()._global_mapping[self._name]

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention over all tokens for this rank's heads; transformers calls this attention function."""
        total = query.shape[2] * self._exchange.size
        if (window := options.pop("sliding_window", None)) is not None and window < total:
            raise ConfigError(
                f"{type(module).__name__} attends to {window} tokens of a row of {total}, but LongRows supports "
                "attention to all tokens only. Train this model with wrap_model_to_roundpipe."
            )
        strange = [n for n, given in options.items() if n not in _PASSED_ON and isinstance(given, torch.Tensor)]
        if strange or not getattr(module, "is_causal", True) or attention_mask is not None:
            found = ", ".join(strange) or ("a mask" if attention_mask is not None else "attention to later tokens")
            raise ConfigError(
                f"LongRows cannot split the attention of {type(module).__name__}, which uses {found}. Train this model "
                "with wrap_model_to_roundpipe."
            )
        exchanged: Callable[..., torch.Tensor] = _Exchanged.apply
        queries, keys, values = (exchanged(tensor, self._exchange, True) for tensor in (query, key, value))
        how: dict[str, Any] = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
        out = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=query.shape[1] != key.shape[1], **how
        )
        return exchanged(out, self._exchange, False).transpose(1, 2).contiguous(), None

    def _reason(self) -> BaseException | None:
        groups = None if self._pipeline is None else self._pipeline._rp_groups
        return None if groups is None else groups.news.reason

    def _example(self) -> dict[str, torch.Tensor]:
        tokens = random_tokens(self._inner, 2, 3 * self._exchange.size)
        labels = tokens.clone()
        labels[0, 1] = _IGNORED
        return {"input_ids": tokens, "labels": labels}


def _attentions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def _run(model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad(), evaluating(model):
        found = model(**{**batch, "use_cache": False})
    return found.logits, found.loss


# Sequence parallelism (Jacobs et al., *DeepSpeed Ulysses*, 2023): ranks exchange tokens for heads.
#
#     projections   rank 0: tokens 0 1 | heads a b        rank 1: tokens 2 3 | heads a b
#     attention     rank 0: tokens 0 1 2 3 | heads a      rank 1: tokens 0 1 2 3 | heads b
#     output        rank 0: tokens 0 1 | heads a b        rank 1: tokens 2 3 | heads a b
#
# An exchange is an all-to-all in a separate group. The thread of the only device of each rank calls it, so all ranks
# call in the same order.


class TokenExchange:
    """Exchanges parts of tensors between ranks, so that each rank gets all tokens for some of the attention heads."""

    def __init__(self, mesh: DeviceMesh, reason: Callable[[], BaseException | None]) -> None:
        self._members: list[int] = mesh.mesh.flatten().tolist()
        self._reason = reason  # returns the error of another rank, which aborts an exchange; `None` without an error
        self.size, self.rank = len(self._members), self._members.index(dist.get_rank())
        self.sent = 0
        self._group: Any = None

    def swap(self, parts: torch.Tensor) -> torch.Tensor:
        """Send slice i of a tensor along axis 0 to rank i, and return the slices that this rank got from all ranks."""
        if self._group is None:
            self._group = dist.new_group(self._members, timeout=job_timeout(), backend="gloo")
        out = parts.to("cpu").contiguous()
        into = torch.empty_like(out)
        work: Any = dist.all_to_all_single(into, out, group=self._group, async_op=True)
        self.sent += out.nbytes * (self.size - 1) // self.size
        while not work.is_completed():
            if (reason := self._reason()) is not None:
                raise reason
            time.sleep(_PERIOD)
        work.wait()  # raises the error of a failed exchange
        return into.to(parts.device)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                group.abort()
                dist.destroy_process_group(group)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: TokenExchange, is_to_heads: bool) -> torch.Tensor:
        ctx.exchange, ctx.is_to_heads = exchange, is_to_heads
        return _to_heads(tensor, exchange) if is_to_heads else _to_tokens(tensor, exchange)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = _to_tokens if ctx.is_to_heads else _to_heads
        return back(gradients[0], ctx.exchange), None, None


def _to_heads(tensor: torch.Tensor, exchange: TokenExchange) -> torch.Tensor:
    rows, heads, tokens, width = tensor.shape
    parts = tensor.reshape(rows, exchange.size, heads // exchange.size, tokens, width).transpose(0, 1)
    found = exchange.swap(parts)  # by the rank of the tokens
    return found.permute(1, 2, 0, 3, 4).reshape(rows, heads // exchange.size, exchange.size * tokens, width)


def _to_tokens(tensor: torch.Tensor, exchange: TokenExchange) -> torch.Tensor:
    rows, heads, tokens, width = tensor.shape
    parts = tensor.reshape(rows, heads, exchange.size, tokens // exchange.size, width).permute(2, 0, 1, 3, 4)
    found = exchange.swap(parts)  # by the rank of the heads
    return found.transpose(0, 1).reshape(rows, exchange.size * heads, tokens // exchange.size, width)
