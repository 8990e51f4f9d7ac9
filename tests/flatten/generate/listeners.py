"""A small Whisper with languages, tasks and times, and sound for it."""

from typing import Any

import torch
import transformers

__all__ = ["listener", "rows_that_end", "sound", "stated"]

_TOKENS = {"eos_token_id": 180, "bos_token_id": 180, "pad_token_id": 180, "decoder_start_token_id": 181}
_LANGUAGES = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 182, "<|de|>": 183, "<|fr|>": 186},
    "task_to_id": {"transcribe": 184, "translate": 185},
    "no_timestamps_token_id": 189,
    "prev_sot_token_id": 187,
    "return_timestamps": False,
    "max_initial_timestamp_index": 5,
}


def stated(**entries: Any) -> transformers.GenerationConfig:
    config = transformers.GenerationConfig(**_TOKENS, suppress_tokens=[1, 2, 7])
    for name, value in {**_LANGUAGES, **entries}.items():
        setattr(config, name, value)
    return config


def listener(layers: int = 2, **entries: Any) -> Any:
    sizes = {"layers": layers, "attention_heads": 4, "ffn_dim": 48}
    sizes = {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in sizes.items()}
    sizes |= {"vocab_size": 200, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 50}
    config = transformers.WhisperConfig(**sizes, **_TOKENS, max_target_positions=60, init_std=0.4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = stated(**entries)
    return model


def sound(frames: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 16, frames, generator=torch.Generator().manual_seed(3))


def rows_that_end(frames: int, end: int) -> torch.Tensor:
    mask = torch.ones(2, frames, dtype=torch.int64)
    mask[1, end:] = 0
    return mask
