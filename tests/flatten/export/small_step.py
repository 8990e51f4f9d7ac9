"""A small module with a cache, written with plain tensors: what it costs to compile is little."""

import torch
from torch._higher_order_ops.scan import scan
from torch.export import Dim

from yobx_flatten import Case

BATCH, LENGTH = 4, 12


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.keys = torch.nn.Linear(8, 8, bias=False)

    def forward(self, input_ids, attention_mask, past_key_values):
        new = self.embedding(input_ids)
        keys = torch.cat([past_key_values[0]["key"], self.keys(new)], dim=1)
        scores = (new @ keys.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -100.0)
        return {"logits": scores.softmax(-1) @ keys @ self.embedding.weight.T, "present": [{"key": keys}]}


def make_step():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Step().eval()


def inputs(batch, past, new, *, padded=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, past + new, dtype=torch.int64)
    mask[0, :padded] = 0
    return {
        "input_ids": torch.randint(0, 16, (batch, new), generator=generator),
        "attention_mask": mask,
        "past_key_values": [{"key": torch.randn(batch, past, 8, generator=generator)}],
    }


def strided(kwargs):
    """The same values in other places: a slice, an expanded row, a transposed tensor."""
    ids, mask, key = kwargs["input_ids"], kwargs["attention_mask"], kwargs["past_key_values"][0]["key"]
    return {
        "input_ids": torch.stack([ids, ids], dim=2)[:, :, 0],
        "attention_mask": mask.t().contiguous().t(),
        "past_key_values": [{"key": key.permute(2, 0, 1).contiguous().permute(1, 2, 0)}],
    }


def shapes(*, bounded=True):
    batch = Dim.AUTO(max=BATCH) if bounded else Dim.AUTO
    length = Dim.AUTO(max=LENGTH) if bounded else Dim.AUTO
    return {
        "input_ids": {0: batch, 1: length},
        "attention_mask": {0: batch, 1: length},
        "past_key_values": [{"key": {0: batch, 1: length}}],
    }


def cases():
    sizes = {"one row, one token": (1, 4, 1), "two tokens": (2, 2, 3), "as long as can be": (BATCH, 9, 3)}
    made = [Case(name, (), inputs(*size, seed=seed)) for seed, (name, size) in enumerate(sizes.items(), 1)]
    return [
        *made,
        Case("padded", (), inputs(3, 5, 2, padded=2, seed=4)),
        Case("strided", (), strided(inputs(3, 4, 2, seed=5))),
    ]


class Decay(torch.nn.Module):
    """A loop over tokens."""

    def forward(self, decay, added, state):
        def step(state, given):
            state = given[0] * state + given[1]
            return state, state.sum(-1)

        return scan(step, state, (decay.transpose(0, 1), added.transpose(0, 1)))


def loop_inputs(batch, tokens):
    generator = torch.Generator().manual_seed(batch + 8 * tokens)
    shapes = {"decay": (batch, tokens, 4), "added": (batch, tokens, 4), "state": (batch, 4)}
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
