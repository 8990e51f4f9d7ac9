"""Small models in float32 for a device, with batches of two halves of equal length."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from tests.gpu.place import Place

__all__ = ["CASES", "Case", "llama", "mlp", "tokens"]

F = nn.functional


class Case(NamedTuple):
    """A model, how it is wrapped and called, and the microbatches of its batch."""

    model: Callable[[], nn.Module]
    wrap: Callable[..., RoundPipe]
    batch: Callable[[int], Any]
    parts: int
    call: Callable[[RoundPipe, Any], torch.Tensor] = lambda pipe, batch: pipe.forward_backward(input_kwargs=batch)
    loss: Callable[[nn.Module, Any], torch.Tensor] = lambda model, part: model(**part).loss

    def split(self, batch: Any, place: Place) -> list[Any]:
        chunks = {name: value.to(place.torch_device).chunk(self.parts) for name, value in batch.items()}
        return [{name: values[number] for name, values in chunks.items()} for number in range(self.parts)]


def mlp(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


def llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 96, "use_cache": False,
             "attn_implementation": "eager"}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**small, **sizes})).train()


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=False, dropout_rate=0.0, use_cache=False)
    return T5ForConditionalGeneration(config).train()


def tokens(seed: int, rows: int = 4, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def _rows(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 8, generator=generator), "y": torch.randn(4, 4, generator=generator)}


def _wrap_mlp(model: nn.Module, place: Place, *, dtype: torch.dtype | None = None, **run: Any) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean", **run)
    return place.wrap(model, model_run_config=config, optim_dtype=dtype)


def _wrapper(parts: int) -> Callable[..., RoundPipe]:
    def wrap(model: nn.Module, place: Place, *, dtype: torch.dtype | None = None, **run: Any) -> RoundPipe:
        options: dict[str, Any] = {"model_run_config": RoundPipeRunConfig(num_microbatch=parts, **run)}
        return wrap_model_to_roundpipe(model, lower_threshold=0, devices=place.devices, optim_dtype=dtype, **options)

    return wrap


CASES = {
    "MLP": Case(
        mlp,
        _wrap_mlp,
        _rows,
        2,
        lambda pipe, batch: pipe.forward_backward((batch["x"],), label=batch["y"], loss_fn=F.mse_loss),
        lambda model, part: F.mse_loss(model(part["x"]), part["y"]),
    ),
    "Llama": Case(llama, _wrapper(2), lambda seed: dict.fromkeys(("input_ids", "labels"), tokens(seed)), 2),
    "T5": Case(
        _t5, _wrapper(1), lambda seed: {"input_ids": tokens(seed, length=8), "labels": tokens(seed + 100, length=8)}, 1
    ),
}
