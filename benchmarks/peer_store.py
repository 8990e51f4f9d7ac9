"""Which values `create_onnx_model_from_input_tensors` of onnx-diagnostic, and ours, store and give back.

    pip install onnx-diagnostic
    python benchmarks/peer_store.py [--json docs/data/store-peer.json] [--markdown]

Each value is stored as the entry of a dict, goes through the bytes of the model, and is read again. "The same" means
equal structure, equal static data, every leaf of the same type and equal bit by bit. `--markdown` prints the table of
the guide.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from bench_flatten import machine

import yobx_flatten

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.flatten.storage.storage_values import TORCH_TYPES, Mode, Pair, State, random_tensor, same
from yobx_flatten.huggingface.cache_names import installed_name

SAME = "the same"


def cache(layer: str = "DynamicLayer", **options: Any) -> Any:
    pairs = [(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)) for _ in range(2)]
    cls = getattr(transformers.cache_utils, layer)
    return yobx_flatten.make_dynamic_cache(pairs, cls_layers=[cls, cls], cls_kwargs=[options, options])


def values() -> dict[str, Any]:
    """Everything that inputs and outputs of models are made of."""
    outputs = transformers.modeling_outputs
    x, y = torch.ones(1), torch.zeros(2)
    return {
        **{f"tensor of {str(t).removeprefix('torch.')}": random_tensor(t, (2, 3), seed=1) for t in TORCH_TYPES},
        "tensor without elements": torch.zeros(0, 3),
        "tensor without axes": torch.tensor(1.5),
        "NumPy array of float32": numpy.arange(3, dtype="float32"),
        "NumPy array of bool": numpy.array([True, False]),
        "NumPy array of complex64": numpy.array([1j], dtype="complex64"),
        "NumPy array of text": numpy.array(["a", "b"]),
        "NumPy scalar, float32": numpy.float32(0.5),
        "NumPy scalar, int64": numpy.int64(3),
        "None": None,
        "bool": True,
        "int": 3,
        "int of more than 64 bits": 2**70,
        "float": 0.1,
        "complex": 1j,
        "str": "text",
        "bytes": b"ab",
        "member of an enum": Mode.EVAL,
        "torch.dtype": torch.float16,
        "slice": slice(1, 2),
        "tuple": (x, y),
        "list": [x, y],
        "empty list": [],
        "list with None": [x, None],
        "dict": {"a": x},
        "dict with a number as key": {1: x},
        "dict with numbers and text": {"a": 1, "b": 0.1, "c": True, "d": "x"},
        "dict of lists of tuples": {"a": [x, {"b": (y,)}]},
        "OrderedDict": collections.OrderedDict(a=x),
        "named tuple": Pair(x, y),
        "torch.return_types.max": torch.max(torch.zeros(2, 2), dim=0),
        "registered dataclass": State(x, None),
        "DynamicCache": cache(),
        "DynamicCache with sliding layers": cache("DynamicSlidingWindowLayer", sliding_window=4),
        "StaticCache": yobx_flatten.make_static_cache([(torch.randn(1, 2, 8, 4),) * 2], max_cache_len=8),
        "EncoderDecoderCache": yobx_flatten.make_encoder_decoder_cache(cache(), cache()),
        "BaseModelOutput": outputs.BaseModelOutput(last_hidden_state=torch.ones(1, 2)),
        "CausalLMOutputWithPast": outputs.CausalLMOutputWithPast(logits=y, **{installed_name(): cache()}),
    }


def outcome(value: Any, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> str:
    """What becomes of a value, in words."""
    step = "not stored"
    try:
        model = write({"x": value})
        step = "not read"
        found = read(type(model).FromString(model.SerializeToString()))
    except Exception as error:  # whatever a builder raises is its outcome
        return f"{step}: {type(error).__name__}"
    with yobx_flatten.register_flattening_functions(patch_transformers=True):
        if type(found) is dict and set(found) == {"x"} and same(found, {"x": value}):
            return SAME
    kind = type(found["x"]).__name__
    return "another value" if kind == type(value).__name__ else f"another value: {kind}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table of the guide")
    options = parser.parse_args()
    import onnx
    import onnx_diagnostic
    from onnx_diagnostic.helpers import mini_onnx_builder

    builders = {
        "onnx-diagnostic": mini_onnx_builder,
        "yobx_flatten": yobx_flatten,
    }
    table: dict[str, dict[str, str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of onnx-diagnostic about versions
        for name, value in values().items():
            table[name] = {
                builder: outcome(
                    value, module.create_onnx_model_from_input_tensors, module.create_input_tensors_from_onnx_model
                )
                for builder, module in builders.items()
            }
    modules = {"onnx-diagnostic": onnx_diagnostic, "yobx-flatten": yobx_flatten, "onnx": onnx, "numpy": numpy}
    modules |= {"torch": torch, "transformers": transformers}
    found = {"versions": {name: module.__version__ for name, module in modules.items()}, "values": table}
    start = "| " if options.markdown else ""
    for name, row in table.items():
        print(f"{start}{name} | {' | '.join(row[builder] for builder in builders)}{' |' if start else ''}")
    if not options.markdown:
        right = {builder: sum(row[builder] == SAME for row in table.values()) for builder in builders}
        print(f"\n{right} of {len(table)}; {machine()}; {found['versions']}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
