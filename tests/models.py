"""Small random-weight models of real architectures, in the middle of generating.

    started = start("gemma3", past=5)           # runs the model: started.cache holds 5 tokens per row
    logits = go_on(started, cache, steps=8)     # 8 greedy steps from there, with any cache instead

Everything runs on the CPU in float32 from configurations; nothing is downloaded. `go_on` changes the cache it is given,
as generating does.
"""

import copy
import dataclasses
import functools
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from tests.cache_words import WORD

WINDOW = 8

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES = {**SIZES, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
_BART_PARTS = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
BART_SIZES = {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in _BART_PARTS.items()}
BART_SIZES["d_model"] = 32
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_NO_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MIXED = ["sliding_attention", "full_attention"]
_WINDOWED = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}

# name -> configuration class, model class, what differs from _SIZES
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_WINDOWED, "layer_types": _MIXED}),
    # a full layer first, and two windows: the other order than gemma2's
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_WINDOWED, "num_hidden_layers": 3, "layer_types": [_MIXED[1], _MIXED[0], _MIXED[0]]},
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**T5_SIZES, "decoder_start_token_id": 0}),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {**BART_SIZES, "max_position_embeddings": 128, "decoder_start_token_id": 2},
    ),
}

ENCODER_DECODERS = ("t5", "bart")
_ENCODER_LENGTH = 6


@functools.cache
def make_model(name: str) -> Any:
    """Return the model of that name, built once per process: `llama`, `mistral`, `gemma2`, `gemma3`, `t5`, `bart`."""
    config_class, model_class, options = _MODELS[name]
    sizes = {"vocab_size": _SIZES["vocab_size"]} if name in ENCODER_DECODERS else _SIZES
    config = getattr(transformers, config_class)(**{**sizes, **_NO_TOKENS, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, model_class)(config).eval()


def new_cache(name: str, *, static: bool = False, room: int = 32) -> Any:
    """Return an empty cache for the model, as its configuration asks; a static one has room for `room` tokens."""
    config = make_model(name).config

    def one(length: int) -> Any:
        return StaticCache(config=config, max_cache_len=length) if static else DynamicCache(config=config)

    return EncoderDecoderCache(one(room), one(_ENCODER_LENGTH)) if name in ENCODER_DECODERS else one(room)


@dataclasses.dataclass(frozen=True)
class Started:
    """A model, the cache it has filled, and what the next step needs."""

    name: str
    cache: Any
    mask: torch.Tensor | None  # (batch, tokens seen), 0 where a row is padded on its left; `None` without padding
    tokens: torch.Tensor  # (batch, 1), the next input
    encoded: Any  # the encoder's output, or `None`

    @property
    def model(self) -> Any:
        return make_model(self.name)


@torch.no_grad()
def start(
    name: str, *, past: int = 5, batch: int = 2, left_padding: int = 0, static: bool = False, cache: Any = None
) -> Started:
    """Run the model over `past` random tokens in each row, of which so many of the first row are padding."""
    model = make_model(name)
    generator = torch.Generator().manual_seed(1000 * past + 10 * batch + left_padding)
    tokens = torch.randint(3, _SIZES["vocab_size"], (batch, past), generator=generator)
    mask, encoded = None, None
    if left_padding:
        mask = torch.ones(batch, past, dtype=torch.int64)
        mask[0, :left_padding] = 0
    if name in ENCODER_DECODERS:
        source = torch.randint(3, _SIZES["vocab_size"], (batch, _ENCODER_LENGTH), generator=generator)
        encoded = model.get_encoder()(input_ids=source)
    started = Started(name, cache if cache is not None else new_cache(name, static=static), mask, tokens, encoded)
    logits = _step(started, started.cache, tokens, mask)
    return dataclasses.replace(started, tokens=logits[:, -1:].argmax(-1))


@torch.no_grad()
def go_on(started: Started, cache: Any = None, *, steps: int = 8, chunk: int = 1) -> list[torch.Tensor]:
    """Generate greedily and return the logits of each step, (batch, chunk, vocabulary); a chunk repeats a token."""
    cache = started.cache if cache is None else cache
    tokens, mask, found = started.tokens, started.mask, []
    for _ in range(steps):
        tokens = tokens.expand(-1, chunk)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], chunk)], dim=1)
        found.append(_step(started, cache, tokens, mask))
        tokens = found[-1][:, -1:].argmax(-1)
    return found


def continued_alike(started: Started, rebuilt: Any, *, steps: int = 8, chunk: int = 1) -> bool:
    """Tell whether the rebuilt cache gives, bit by bit, the logits of the original.

    The original goes on as a deep copy, since static layers write into their tensors.
    """
    expected = go_on(started, copy.deepcopy(started.cache), steps=steps, chunk=chunk)
    found = go_on(started, rebuilt, steps=steps, chunk=chunk)
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _step(started: Started, cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    inputs: dict[str, Any] = {WORD: cache, "use_cache": True}
    if started.encoded is not None:
        inputs |= {"decoder_input_ids": tokens, "encoder_outputs": started.encoded}
    else:
        inputs["input_ids"] = tokens
    if mask is not None:
        # without positions transformers counts padding as tokens
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs |= {"attention_mask": mask, "position_ids": positions}
    return started.model(**inputs).logits
