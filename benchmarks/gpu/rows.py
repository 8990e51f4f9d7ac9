"""Rows of a day with a GPU: which model trains on how many tokens, in which data types, and who is measured on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

__all__ = ["ALL", "ROWS", "Row", "batch", "config_of", "make_model", "named_row", "rows_of"]

OURS = ("this runtime", "this runtime, exact", "this runtime, async")
PEERS = (
    "FSDP2, CPU offload",
    "RoundPipe 0.1.1",
    "PyTorch, resident",
    "DeepSpeed ZeRO-3 offload",
    "torchao CPU offload",
)
# in the order in which they run: a day that ends early has the ones that decide
ALL = (OURS[0], PEERS[0], OURS[2], PEERS[1], OURS[1], *PEERS[2:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One training that several programs are measured on."""

    part: str  # part of the day that measures it
    model: str  # key of _SIZES
    states: Literal["float32", "bfloat16"]  # data type of master weights and moments; weights are bfloat16
    batch: int  # rows of tokens in a step
    length: int  # tokens of a row
    microbatches: int
    adapters: int = 0  # rank of LoRA; 0 trains all weights
    few_bits: bool = False  # frozen weights in nf4
    grain: Literal["stage", "layer"] = "stage"
    programs: tuple[str, ...] = ALL

    @property
    def tokens(self) -> int:
        """Number of tokens of a step."""
        return self.batch * self.length

    @property
    def name(self) -> str:
        """The row in words, which is also its key in the records."""
        what = f"LoRA r={self.adapters}" if self.adapters else f"{self.states} states"
        rows = f"{self.batch} x {self.length:,}" if self.batch > 1 else "one row"
        return f"{self.model}, {what}{', nf4' if self.few_bits else ''}, {self.tokens:,} tokens ({rows})"


ROWS = (
    Row(part="1.7B", model="1.7B", states="float32", batch=32, length=2048, microbatches=8),
    Row(part="8B", model="8B", states="bfloat16", batch=32, length=2048, microbatches=16),
    Row(part="8B", model="8B", states="bfloat16", batch=128, length=2048, microbatches=32,
        programs=(OURS[0], PEERS[1], OURS[2], OURS[1])),
    Row(part="lora", model="8B", states="float32", adapters=16, batch=32, length=2048, microbatches=16,
        programs=(OURS[0], PEERS[2], OURS[1], PEERS[3])),
    Row(part="lora", model="32B", states="float32", adapters=16, few_bits=True, batch=32, length=2048, microbatches=16,
        programs=(OURS[0],)),
    Row(part="long", model="8B", states="bfloat16", batch=1, length=65536, microbatches=1, grain="layer",
        programs=(OURS[0], PEERS[1], PEERS[0], PEERS[2])),
)  # fmt: skip

# Sizes of Qwen3-1.7B, Llama-3.1-8B and Qwen3-32B; all are made as a Llama, so every program trains the same layers.
_SIZES: dict[str, dict[str, Any]] = {
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}  # fmt: skip


def rows_of(part: str, *, tiny: bool) -> list[Row]:
    """The rows of a part; tiny ones have the same programs and data types, and a few tokens."""
    found = [row for row in ROWS if row.part == part]
    if not tiny:
        return found
    return [
        dataclasses.replace(row, model=f"tiny {row.model}", batch=min(row.batch, 4), length=16 * min(row.batch, 4),
                            microbatches=min(row.microbatches, 2))
        for row in _distinct(found)
    ]  # fmt: skip


def _distinct(rows: list[Row]) -> list[Row]:
    """Rows that differ by more than their number of tokens."""
    kinds: dict[tuple[object, ...], Row] = {}
    for row in rows:
        kinds.setdefault((row.model, row.adapters, row.few_bits, row.batch > 1), row)
    return [*kinds.values()]


def named_row(name: str) -> Row:
    """The row of this name, of the large ones or of the tiny ones."""
    every = [*ROWS, *(row for part in dict.fromkeys(row.part for row in ROWS) for row in rows_of(part, tiny=True))]
    return next(row for row in every if row.name == name)


def config_of(row: Row) -> Any:
    """The configuration of the model of a row."""
    from transformers import LlamaConfig

    sizes = {**_SIZES[row.model.removeprefix("tiny ")], **(_TINY if row.model.startswith("tiny ") else {})}
    return LlamaConfig(**sizes, max_position_embeddings=row.length, use_cache=False)


def make_model(row: Row, device: torch.device) -> nn.Module:
    """The same random weights for every program, drawn on the device where that is faster, and kept on the host."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(row)).to(torch.bfloat16)
    draw = _drawn(device)
    if row.few_bits:
        from roundpipe_runtime.huggingface import quantize_frozen

        _compute_frequencies(model)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model = quantize_frozen(model, "nf4", weights=lambda name: draw(name, shapes[name]))
    else:
        names = {name: parameter.shape for name, parameter in model.named_parameters()}
        model = model.to_empty(device="cpu")
        _compute_frequencies(model)
        model.tie_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(draw(name, names[name]))
    model = model.to("cpu")
    if row.adapters:
        from roundpipe_runtime.fine_tune import Lora, add_lora

        model = add_lora(model, Lora(row.adapters, 2 * row.adapters))
    return model.train()


def _compute_frequencies(model: Any) -> None:
    """Make the buffers of rotations, which are computed from the configuration, and not drawn."""
    with torch.device("cpu"):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def _drawn(device: torch.device) -> Callable[[str, torch.Size], torch.Tensor]:
    # quantisation and drawing are kernels that the reference accelerator does not have
    where = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator(where).manual_seed(0)
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device=where)

    def draw(name: str, shape: torch.Size) -> torch.Tensor:
        return new(shape).fill_(1.0) if "norm" in name else new(shape).normal_(0.0, 0.02, generator=generator)

    return draw


def batch(row: Row) -> torch.Tensor:
    """Tokens of a step, the same in every step."""
    vocabulary = config_of(row).vocab_size
    return torch.randint(vocabulary, (row.batch, row.length), generator=torch.Generator().manual_seed(1))
