"""A cache that is written in place loses its last tokens, and its rows are chosen anew: next to the eager model."""

from collections.abc import Sequence
from typing import Any

import torch

from yobx_flatten.huggingface.cache_names import cache_of
from yobx_flatten.runners.rewind import cache_tensors, cropped

__all__ = ["assert_rows_go_on_after_a_rewind"]


def _feeds(tokens: torch.Tensor, seen: int) -> dict[str, torch.Tensor]:
    rows, new = tokens.shape
    positions = torch.arange(seen, seen + new).expand(rows, -1)
    mask = torch.ones(rows, seen + new, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def assert_rows_go_on_after_a_rewind(model: Any, runner: Any, calls: Sequence[int]) -> None:
    """Read so many tokens per call, take two back, go on with rows 1, 0 and 1."""
    count = sum(calls)
    ids = torch.randint(3, 128, (2, count), generator=torch.Generator().manual_seed(2))
    cache = runner.cache({name: torch.zeros(2, 2, 0, 16) for name in runner.in_place})
    seen = 0
    for new in calls:
        _, cache = runner.step(_feeds(ids[:, seen : seen + new], seen), cache)
        seen += new
    assert {tuple(leaf.shape) for leaf in cache_tensors(cache).values()} == {(2, 2, count, 16)}
    cache = cropped(runner, cache, count, count - 2)
    cache = runner.select_rows(cache, torch.tensor([1, 0]))
    cache = runner.select_rows(cache, torch.tensor([0, 1, 0]))
    new = torch.tensor([[9], [10], [11]])
    found, cache = runner.step(_feeds(new, count - 2), cache)
    with torch.no_grad():
        wanted = model(torch.cat([ids[[1, 0, 1], : count - 2], new], dim=1), use_cache=True)
    torch.testing.assert_close(found["logits"][:, -1], wanted.logits[:, -1], atol=1e-5, rtol=0)
    keys = cache_tensors(cache)["past_key_values.1.key"]
    torch.testing.assert_close(keys, cache_of(wanted).layers[1].keys, atol=1e-5, rtol=0)
