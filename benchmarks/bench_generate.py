"""One step of a decode loop: eager PyTorch next to the exported file in onnxruntime, with and without IO binding.

All run the same small model in one process with one thread, and take turns of ten steps. The result is the median step
of the rounds. The sliding model runs far beyond its window; the size of its cache is shown at the beginning and at
the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import statistics
import tempfile
import time
import warnings

import numpy
import torch

from yobx_flatten import OnnxGenerator, export_folder
from yobx_flatten.huggingface.cache_names import cache_of, installed_name

PROMPT, STEPS = 16, 10


def model_of(name: str):
    import transformers

    sizes = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=64)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


class Eager:
    """The model itself, with its own cache."""

    def __init__(self, model, ids):
        self.model, self.mask = model, torch.ones_like(ids)
        self.output = model(input_ids=ids, attention_mask=self.mask, use_cache=True)
        self.token = self.output.logits[:, -1:].argmax(-1)

    def step(self):
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        position = self.mask.sum(-1, keepdim=True) - 1
        cache = cache_of(self.output)
        self.output = self.model(
            input_ids=self.token,
            attention_mask=self.mask,
            position_ids=position,
            **{installed_name(): cache},
            use_cache=True,
        )
        self.token = self.output.logits[:, -1:].argmax(-1)
        return self.token[:, 0].tolist()

    def held(self):
        layers = cache_of(self.output).layers
        return sum(part.numel() * 4 for layer in layers for part in (layer.keys, layer.values))


class Bound:
    """`OnnxGenerator`: what comes out stays in onnxruntime and goes in again."""

    def __init__(self, generator, ids):
        self.sequence = generator.steps.begin(ids, None, {}, None, [])
        self.stream = generator._stream(self.sequence, 100_000, None)
        next(self.stream)

    def step(self):
        return next(self.stream).tolist()

    def held(self):
        return sum(value.tensor_size_in_bytes() for value in self.sequence.cache.values())


class Plain:
    """The same file with `session.run`: every key and value becomes a NumPy array, and is given as one."""

    def __init__(self, generator, ids):
        self.session = generator.parts.decoder._session
        self.names = [node.name for node in self.session.get_outputs()]
        caches = [node for node in self.session.get_inputs() if node.name.startswith("past_key_values")]
        # a named size is the number of rows, or the length of the cache, which is empty
        rows = {node.shape[0]: len(ids) for node in caches}
        shapes = {node.name: [rows.get(n, 0) if isinstance(n, str) else n for n in node.shape] for node in caches}
        self.past = {name: numpy.zeros(shape, numpy.float32) for name, shape in shapes.items()}
        self.mask = torch.ones_like(ids)
        self.run(ids, torch.arange(ids.shape[1]).expand_as(ids))

    def run(self, ids, positions):
        feeds = {"input_ids": ids, "attention_mask": self.mask, "position_ids": positions}
        arrays = {name: value.numpy() for name, value in feeds.items()} | self.past
        found = dict(zip(self.names, self.session.run(None, arrays), strict=True))
        self.token = torch.from_numpy(found["logits"][:, -1:].argmax(-1))
        self.past = {name: found[name.replace("past_key_values", "present")] for name in self.past}

    def step(self):
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.run(self.token, self.mask.sum(-1, keepdim=True) - 1)
        return self.token[:, 0].tolist()

    def held(self):
        return sum(array.nbytes for array in self.past.values())


@torch.no_grad()
def measure(name: str, folder: pathlib.Path, rounds: int, rows: int) -> None:
    model = model_of(name)
    export_folder(model, folder / name)
    generator = OnnxGenerator(folder / name, threads=1)
    ids = torch.randint(4, 1000, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    sides = {
        "eager PyTorch": Eager(model, ids),
        "session.run": Plain(generator, ids),
        "IO binding": Bound(generator, ids),
    }
    seconds = {side: [] for side in sides}
    first = {}
    for number in range(rounds):
        tokens = []
        for side, loop in sides.items():
            start = time.perf_counter()
            tokens.append([loop.step() for _ in range(STEPS)])
            seconds[side].append((time.perf_counter() - start) / STEPS)
        assert tokens[0] == tokens[1] == tokens[2], "the sides chose other tokens"
        if number == rounds // 4:
            first = {side: loop.held() for side, loop in sides.items()}
    eager = statistics.median(seconds["eager PyTorch"])
    total = PROMPT + rounds * STEPS
    for side, loop in sides.items():
        median = statistics.median(seconds[side])
        held = f"{first[side] / 1024:8.0f} {loop.held() / 1024:8.0f}"
        print(f"{name:8} {rows:4} {side:14} {median * 1e6:9.0f} {eager / median:8.2f} {held}   {total}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of ten steps each")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = ("torch", "transformers", "onnxruntime")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names), "- one thread, float32")
    print(f"{'model':8} {'rows':>4} {'loop':14} {'µs/step':>9} {'x eager':>8} {'KiB 1/4':>8} {'KiB end':>8}   tokens")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama", "mistral"):
            for rows in (1, 4):
                measure(name, pathlib.Path(folder) / str(rows), options.rounds, rows)


if __name__ == "__main__":
    main()
