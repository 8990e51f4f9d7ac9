"""A Llama of two layers in the place of its file, so that generation is compared without an export."""

import torch

from tests.cache_words import WORD, cache_of
from yobx_flatten import make_dynamic_cache
from yobx_flatten.runners.ports import Port, cache_slots, present_of, with_rows


class EagerRunner:
    """The model itself in the place of a file, so that searches are compared without an export."""

    runtime, name = "eager", "the model"

    def __init__(self, model):
        self.model = model
        config = model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        names = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
        ports = [Port(name, (None, heads, None, size), torch.float32) for name in names]
        self.outputs = ("logits", *map(present_of, names))
        self.slots = cache_slots(ports, self.outputs, self.name)
        tokens = {name: Port(name, (None, None), torch.int64) for name in ("input_ids", "attention_mask")}
        self.ports = {**tokens, **{slot.port.name: slot.port for slot in self.slots}}

    def cache(self, tensors):
        return dict(tensors)

    @torch.no_grad()
    def step(self, feeds, cache, *, last_scores=False):
        leaves = list(cache.values())
        past = make_dynamic_cache([(leaves[0], leaves[1]), (leaves[2], leaves[3])])
        found = self.model(**feeds, **{WORD: past})
        leaves = [leaf for layer in cache_of(found).layers for leaf in (layer.keys, layer.values)]
        return {"logits": found.logits}, dict(zip(cache, leaves, strict=True))

    def select_rows(self, cache, rows):
        return {name: with_rows(value, rows) for name, value in cache.items()}
