"""A cache in one piece of memory: the file for it, its proof, and the steps of a loop that write into it.

Operators next to onnxruntime's attention: fewer of them make the mask, and positions are passed on unchanged.
"""

import onnx
import pytest
import torch

from tests.cache_words import WORD, cache_of
from tests.transformers_versions import needs_transformers
from yobx_flatten import DecodeSizes, InvalidArgumentError, decode_inputs, export_onnx
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.runners import in_place
from yobx_flatten.runners.open import open_runner

NAMES = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model, path = small_model("llama"), tmp_path_factory.mktemp("shared") / "model.onnx"
    return model, path, export_onnx(model, (), decode_inputs(model, DecodeSizes()), path, optimize="onnxruntime").report


@needs_transformers("5.23", "frequencies of positions are one product more")
def test_each_layer_has_the_attention_of_onnxruntime_and_one_product_before_it(llama):
    """Three products of queries, keys and values are one; four others of a layer stay, and the head."""
    _, path, report = llama
    assert report.operators["GroupQueryAttention"] == 2
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("MatMul") + nodes.count("Gemm") == 2 * 5 + 1
    assert "Attention" not in nodes


def test_it_is_replayed_in_both_forms(llama):
    """With a cache that grows, and in memory for more tokens than there are; a note states what the file refuses."""
    _, _, report = llama
    assert report.ok
    runtimes = [case.runtime for case in report.cases]
    assert runtimes.count("onnxruntime") == runtimes.count("onnxruntime, shared cache") == 4
    assert any("for one row only" in remark for remark in report.remarks)


def test_steps_write_into_the_same_memory(llama, monkeypatch):
    monkeypatch.setattr(in_place, "_LEAST", 16)
    model, path, _ = llama
    runner = open_runner(path)
    tokens = torch.randint(4, 259, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    cache = runner.cache({name: torch.zeros(3, 2, 0, 16) for name in NAMES})
    past, places = None, []
    for start, end in ((0, 5), *((place, place + 1) for place in range(5, 20))):
        feeds = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end]}
        found, cache = runner.step(feeds, cache)
        with torch.no_grad():
            wanted = model(**feeds, **{WORD: past}, use_cache=True)
        past = cache_of(wanted)
        torch.testing.assert_close(found["logits"][:, -1], wanted.logits[:, -1], atol=1e-4, rtol=0)
        places.append((cache[NAMES[0]].shape[2], *(cache[name].data_ptr() for name in NAMES)))
    assert [capacity for capacity, *_ in places] == [16] * 11 + [32] * 5
    assert len(set(places)) == 2


@pytest.mark.parametrize("form", ["run", "step"])
def test_several_tokens_of_several_rows_after_others_are_read_in_several_calls(llama, form):
    """The operator refuses such a call: it is made row by row, in a loop token by token. The numbers are the same."""
    model, path, _ = llama
    runner = open_runner(path)
    inputs = decode_inputs(model, DecodeSizes(batch=3, past=5, new=4, padding=2))
    leaves = [leaf.clone() for layer in cache_of(inputs).layers for leaf in (layer.keys, layer.values)]
    cache = dict(zip(NAMES, leaves, strict=True))
    feeds = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if form == "run":
        found = runner.run({**feeds, **cache})
    else:
        found, cache = runner.step(feeds, runner.cache(cache))
        found |= {f"present.{name[16:]}": torch.from_numpy(cache[name].numpy())[:, :, :9] for name in NAMES}
    with torch.no_grad():
        wanted = model(**inputs)
    torch.testing.assert_close(found["logits"], wanted.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["present.1.key"], cache_of(wanted).layers[1].keys, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_layers_that_slide_keep_their_cache_and_the_others_share(tmp_path):
    model = small_model("gemma3_text")
    export_onnx(model, (), decode_inputs(model, DecodeSizes()), tmp_path / "a.onnx", optimize="onnxruntime")
    kinds = model.config.layer_types
    assert list(open_runner(tmp_path / "a.onnx").shared) == [
        f"past_key_values.{layer}.{part}"
        for layer, kind in enumerate(kinds)
        if kind == "full_attention"
        for part in ("key", "value")
    ]


def test_a_model_without_attention_stays_as_it_is(tmp_path):
    report = export_onnx(torch.nn.Linear(3, 2), (torch.ones(2, 3),), path=tmp_path / "a.onnx", optimize="onnxruntime")
    assert report.report.operators == {}


def test_there_is_one_runtime_to_optimize_for(tmp_path):
    with pytest.raises(InvalidArgumentError, match='optimize must be "onnxruntime" or None'):
        export_onnx(torch.nn.Linear(3, 2), (torch.ones(2, 3),), path=tmp_path / "a.onnx", optimize="tensorrt")


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    model, path = small_model("llama"), tmp_path_factory.mktemp("placed") / "model.onnx"
    inputs = decode_inputs(model, DecodeSizes(past=5, new=2))
    inputs["position_ids"] = torch.arange(5, 7)[None].repeat(inputs["input_ids"].shape[0], 1)
    report = export_onnx(model, (), inputs, path, optimize="onnxruntime").report
    assert report.ok
    return model, path, report.operators


def test_rotations_and_norms_are_one_operator_each_and_the_mask_is_read_as_it_is(placed):
    model, path, operators = placed
    assert operators["RMSNormalization"] == 2 * model.config.num_hidden_layers + 1
    assert operators["RotaryEmbedding"] == 2 * model.config.num_hidden_layers
    assert "GatherND" not in {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("past", [0, 7])
@pytest.mark.parametrize("first", [0, 900])
def test_positions_are_those_of_the_caller_in_each_row(placed, past, first):
    """Also in the prompt, where onnxruntime's own rotation would take those of the first row for all."""
    model, path, _ = placed
    if past:
        inputs = decode_inputs(model, DecodeSizes(batch=2, past=past, new=1, padding=3))
        leaves = [leaf.clone() for layer in cache_of(inputs).layers for leaf in (layer.keys, layer.values)]
    else:
        inputs = {"input_ids": torch.arange(8, 18).reshape(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
        leaves = [torch.zeros(2, 2, 0, 16) for _ in range(4)]
    columns = torch.arange(inputs["input_ids"].shape[1])
    inputs["position_ids"] = torch.stack([columns + first, columns + first + 11])
    feeds = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids")}
    names = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    found = open_runner(path).run({**feeds, **dict(zip(names, leaves, strict=True))})
    with torch.no_grad():
        wanted = model(**inputs, use_cache=True)
    torch.testing.assert_close(found["logits"], wanted.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["present.0.key"], cache_of(wanted).layers[0].keys, atol=1e-5, rtol=0)
