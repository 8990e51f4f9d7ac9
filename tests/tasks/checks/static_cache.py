"""The program takes the next tokens with its cache as the model does, and the position of the cache moves."""

import torch
from transformers import StaticCache

import __main__ as page

caches = [StaticCache(config=page.qwen.config, max_cache_len=16) for _ in range(2)]
start = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]])
for cache in caches:
    with torch.no_grad():
        page.qwen(start, past_key_values=cache)
for token in ([[1], [2], [3]], [[4], [5], [6]]):
    with torch.no_grad():
        wanted = page.qwen(torch.tensor(token), past_key_values=caches[0])
    found = page.exported(input_ids=torch.tensor(token), past_key_values=caches[1])
    assert torch.allclose(found.logits, wanted.logits, atol=1e-5)
    caches[1] = found.past_key_values
assert int(caches[1].get_seq_length()) == 6
