"""Caches of exported files: in one piece of memory, flat, or in 8-bit floats; and scores of the last tokens alone."""

from __future__ import annotations

import functools
import types

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
import transformers
from transformers import cache_utils
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.models import make_model
from tests.modules import module_of
from tests.transformers_versions import needs_transformers
from yobx_flatten import Case, dynamic_shapes, export_folder, export_onnx, export_program, open_generator, open_model
from yobx_flatten.errors import InvalidArgumentError, ReplayError
from yobx_flatten.export.proof.replay import check_last_scores
from yobx_flatten.huggingface import DecodeSizes, decode_inputs, make_dynamic_cache
from yobx_flatten.huggingface.cache_names import argument_of
from yobx_flatten.huggingface.cases import why_not_resizable
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.runners.in_place import TensorBuffers
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.ports import KEPT_SCORES

NAMES = [f"past_key_values.{layer}.{part}" for layer in range(2) for part in ("key", "value")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model, path = small_model("llama"), tmp_path_factory.mktemp("shared") / "model.onnx"
    return model, path, export_onnx(model, (), decode_inputs(model, DecodeSizes()), path, optimize="onnxruntime").report


@needs_transformers("5.23", "frequencies of positions are one product more")
def test_each_layer_has_the_attention_of_onnxruntime_and_one_product_before_it(llama):
    _, path, report = llama
    assert report.operators["GroupQueryAttention"] == 2
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("MatMul") + nodes.count("Gemm") == 2 * 5 + 1
    assert "Attention" not in nodes


def test_it_is_replayed_in_both_forms_and_steps_write_into_the_same_memory(llama, monkeypatch):
    model, path, report = llama
    assert report.ok
    runtimes = [case.runtime for case in report.cases]
    assert runtimes.count("onnxruntime") == runtimes.count("onnxruntime, shared cache") == 4
    assert any("for one row only" in remark for remark in report.remarks)
    runner = open_runner(path)
    monkeypatch.setattr(TensorBuffers.__init__, "__defaults__", (lambda total: max(2 * total, 16),))
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
    full = [layer for layer, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    shared = list(open_runner(tmp_path / "a.onnx").shared)
    assert shared == [f"past_key_values.{layer}.{part}" for layer in full for part in ("key", "value")]


def test_a_model_without_attention_stays_as_it_is_and_another_runtime_is_refused(tmp_path):
    given = torch.nn.Linear(3, 2), (torch.ones(2, 3),)
    assert export_onnx(*given, path=tmp_path / "a.onnx", optimize="onnxruntime").report.operators == {}
    with pytest.raises(InvalidArgumentError, match='optimize must be "onnxruntime" or None'):
        export_onnx(*given, path=tmp_path / "a.onnx", optimize="tensorrt")


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
    layers = model.config.num_hidden_layers
    assert (operators["RMSNormalization"], operators["RotaryEmbedding"]) == (2 * layers + 1, 2 * layers)
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
    found = open_runner(path).run({**feeds, **dict(zip(NAMES, leaves, strict=True))})
    with torch.no_grad():
        wanted = model(**inputs, use_cache=True)
    torch.testing.assert_close(found["logits"], wanted.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["present.0.key"], cache_of(wanted).layers[0].keys, atol=1e-5, rtol=0)


LAYERS, HEADS, SIZE = 2, 2, 8


def _model(family):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": SIZE}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, initializer_range=0.3)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def _called(self, input_ids, pairs):
    cache = transformers.DynamicCache(ddp_cache_data=pairs)
    out = self.model(input_ids=input_ids, use_cache=True, **{self.word: cache})
    return out.logits, [(layer.keys, layer.values) for layer in cache_of(out).layers]


def _flat(self, input_ids, key_0, value_0, key_1, value_1):
    logits, pairs = _called(self, input_ids, [(key_0, value_0), (key_1, value_1)])
    return (logits, *[tensor for pair in pairs for tensor in pair])


def _legacy(self, input_ids, past):
    logits, pairs = _called(self, input_ids, list(past))
    return logits, tuple(pairs)


def _stacked(self, input_ids, past):
    logits, pairs = _called(self, input_ids, [(past[i, 0], past[i, 1]) for i in range(LAYERS)])
    return logits, torch.stack([torch.stack(pair) for pair in pairs])


def _example(kind):
    past = [torch.randn(2, HEADS, 5, SIZE) for _ in range(2 * LAYERS)]
    ids = torch.randint(0, 64, (2, 3))
    if kind is _flat:
        return (ids, *past)
    if kind is _legacy:
        return ids, tuple(zip(past[::2], past[1::2], strict=True))
    return ids, torch.stack(past).reshape(LAYERS, 2, 2, HEADS, 5, SIZE)


@pytest.mark.parametrize(("kind", "family"), [(_flat, "Qwen3"), (_legacy, "Llama"), (_stacked, "Llama")])
def test_a_text_in_pieces_gives_the_scores_of_the_whole(kind, family, tmp_path):
    model = _model(family)
    module = module_of(kind, model=model, word=argument_of(model.forward))
    report = export_onnx(module, _example(kind), path=tmp_path / "flat.onnx").report
    assert not [remark for remark in report.remarks if "fixed as in the example" in remark]
    session = onnxruntime.InferenceSession(tmp_path / "flat.onnx")
    names = [one.name for one in session.get_inputs()]
    for rows in (1, 2):
        ids = torch.randint(0, 64, (rows, 12))
        with torch.no_grad():
            whole = model(ids, use_cache=True)
        past = [np.zeros((rows, HEADS, 0, SIZE), np.float32)] * (2 * LAYERS)
        if kind is _stacked:
            past = [np.zeros((LAYERS, 2, rows, HEADS, 0, SIZE), np.float32)]
        first = 0
        for new in (7, 1, 1, 3):
            given = ids[:, first : first + new].numpy()
            logits, *past = session.run(None, dict(zip(names, [given, *past], strict=True)))
            np.testing.assert_allclose(logits, whole.logits[:, first : first + new], atol=1e-4)
            first += new
        kept = [tensor for layer in cache_of(whole).layers for tensor in (layer.keys, layer.values)]
        found = past[0].reshape(2 * LAYERS, *past[0].shape[2:]) if kind is _stacked else past
        for one, other in zip(found, kept, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


def _prompt():
    tokens = torch.randint(4, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return tokens, mask


def _watched(monkeypatch, decoder):
    seen, step = [], decoder.step

    def watched(*args, **options):
        found = step(*args, **options)
        seen.append(found[0]["logits"].shape[1])
        return found

    monkeypatch.setattr(decoder, "step", watched)
    return seen


@pytest.mark.parametrize("optimize", [None, "onnxruntime"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_file_returns_the_scores_of_as_many_last_tokens_as_are_asked_for(tmp_path, family, optimize):
    model = small_model(family)
    export_folder(model, tmp_path / "folder", optimize=optimize)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # of an input with a value it says that it is no constant
    session = onnxruntime.InferenceSession(tmp_path / "folder" / "model.onnx", options)
    assert [one.name for one in session.get_overridable_initializers()] == [KEPT_SCORES]
    tokens, mask = _prompt()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    feeds = {"input_ids": tokens.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()}
    given = {}
    for port in session.get_inputs():
        sizes = [2 if axis == 0 else size if isinstance(size, int) else 0 for axis, size in enumerate(port.shape)]
        given[port.name] = feeds[port.name] if port.name in feeds else torch.zeros(sizes).numpy()
    for count in (None, 0, 1, 3):
        more = {} if count is None else {KEPT_SCORES: torch.tensor(count).numpy()}
        found = torch.from_numpy(session.run(["logits"], {**given, **more})[0])
        expected = wanted[:, -(count or 7) :]
        assert found.shape == expected.shape
        real = mask.bool()[:, -(count or 7) :]
        torch.testing.assert_close(found[real], expected[real], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "optimize": "onnxruntime"}])
def test_a_quantised_file_has_the_input_too(tmp_path, options):
    export_folder(small_model("llama"), tmp_path / "folder", **options)
    runner = open_runner(tmp_path / "folder" / "model.onnx")
    assert runner.has_kept_scores
    tokens, mask = _prompt()
    feeds = {"input_ids": tokens, "attention_mask": mask}
    if "position_ids" in runner.ports:
        feeds["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    empty = {slot.port.name: torch.zeros(2, slot.port.shape[1], 0, slot.port.shape[3]) for slot in runner.slots}
    every, _ = runner.step(feeds, runner.cache(empty))
    last, _ = runner.step(feeds, runner.cache(empty), last_scores=True)
    torch.testing.assert_close(last["logits"], every["logits"][:, -1:], atol=1e-4, rtol=1e-4)


def test_the_loop_asks_for_the_last_scores_and_generates_the_tokens_of_the_model(tmp_path, monkeypatch):
    model = small_model("llama")
    export_folder(model, tmp_path / "folder", optimize="onnxruntime")
    generator = open_generator(tmp_path / "folder")
    seen = _watched(monkeypatch, generator.parts.decoder)
    tokens, mask = _prompt()
    found = generator.generate(tokens, mask, max_new_tokens=8)
    wanted = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, wanted)
    assert set(seen) == {1}
    drafted = generator.generate(tokens[1:], max_new_tokens=8, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, model.generate(tokens[1:], max_new_tokens=8, do_sample=False))
    assert max(seen) > 1  # a binding does not remember what the call before asked for


def test_a_decoder_with_an_encoder_has_no_such_input(tmp_path):
    export_folder(small_model("bart"), tmp_path / "folder")
    for path in (tmp_path / "folder").glob("*.onnx"):
        names = [value.name for value in onnx.load(path, load_external_data=False).graph.input]
        assert KEPT_SCORES not in names


def test_a_file_that_returns_other_scores_is_refused():
    class Wrong:
        name, has_kept_scores, slots = "model.onnx", True, ()
        shared, ports = None, ("input_ids",)

        def cache(self, tensors):
            return {}

        def step(self, feeds, cache, *, last_scores=False):
            scores = torch.arange(12.0).reshape(1, 3, 4)
            return {"logits": scores[:, :1] if last_scores else scores}, {}

    case = Case("a text", (), {"input_ids": torch.ones(1, 3, dtype=torch.int64)})
    with pytest.raises(ReplayError, match=r"model.onnx was run twice.* last token's logits differ by 8\.0e\+00"):
        check_last_scores(Wrong(), ["input_ids"], [case])


def test_the_loops_of_transformers_ask_for_the_last_scores_too(tmp_path, monkeypatch):
    model = small_model("llama")
    export_folder(model, tmp_path / "folder")
    opened, (tokens, mask) = open_model(tmp_path / "folder"), _prompt()
    with torch.no_grad():
        wanted = model(input_ids=tokens, attention_mask=mask).logits
    for kept in (0, 1, 3, torch.tensor([2, 6])):
        found = opened(input_ids=tokens, attention_mask=mask, logits_to_keep=kept).logits
        places = kept if isinstance(kept, torch.Tensor) else slice(-kept or None, None)
        torch.testing.assert_close(found[1], wanted[:, places][1], atol=2e-4, rtol=1e-3)
    seen = _watched(monkeypatch, opened.steps.parts.decoder)
    given = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(tokens, attention_mask=mask, **given)
    assert torch.equal(opened.generate(tokens, attention_mask=mask, repetition_penalty=1.0, **given), plain)
    assert set(seen) == {1}
    drafted = opened.generate(tokens[1:], prompt_lookup_num_tokens=3, **given)
    assert torch.equal(drafted, model.generate(tokens[1:], **given))
    assert max(seen) > 1


has_fp8_layers = pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the layer class of 5.23")


def _inputs(model, rows: int, past: int, new: int) -> dict[str, object]:
    ids = torch.randint(3, 90, (rows, past + new), generator=torch.Generator().manual_seed(rows))
    cache = cache_utils.QuantizedCache("fp8", model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :past], **{WORD: cache})
    mask = torch.ones(rows, past + new, dtype=torch.int64)
    return {"input_ids": ids[:, past:].contiguous(), "attention_mask": mask, WORD: cache}


@pytest.mark.slow
@has_fp8_layers
def test_one_program_serves_all_lengths_of_an_fp8_cache():
    model = make_model("llama")
    exported = export_program(model, (), _inputs(model, 2, 5, 3), steps=2)
    assert exported.report.max_difference == 0.0
    assert len(exported.report.cases) == 4
    with torch.no_grad():
        found, expected = exported(**_inputs(model, 3, 11, 2)), model(**_inputs(model, 3, 11, 2))
    torch.testing.assert_close(found.logits, expected.logits)
    keys = cache_of(found).layers[0]._quantized_keys[0]
    assert keys.dtype is torch.float8_e4m3fn
    assert keys.shape[-2] == 13


@pytest.mark.slow
@has_fp8_layers
def test_other_parts_of_a_quantized_cache_stay_fixed_and_another_quantisation_is_not_made_up():
    """A scale has no axes, and the empty tensor in place of the keys has one; the report names what is not resized."""
    model = make_model("llama")
    shapes = dynamic_shapes(_inputs(model, 2, 5, 3))[WORD]
    assert [sorted(entry) for entry in shapes[:6]] == [[], [], [0, 2], [], [0, 2], []]
    cache = cache_utils.QuantizedCache("fp8", model.config)
    cache.layers = [type("Layer", (), {})()]
    kwargs = {"input_ids": torch.ones(2, 3, dtype=torch.int64), WORD: cache}
    assert "quantized cache" in why_not_resizable(model, kwargs, WORD)


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OTHER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
# class and configuration; all of them have two layers
MODELS = {
    "llama": ("Llama", SMALL),
    "mistral, all layers slide": ("Mistral", {**SMALL, "sliding_window": 6}),
    "gemma 2, soft cap": ("Gemma2", {**SMALL, **MIXED, "attn_logit_softcapping": 2.0}),
    "qwen 3, norms of heads": ("Qwen3", {**SMALL, "head_dim": 8}),
    "phi 3, one projection": ("Phi3", SMALL),
    "llama, spelled out": ("Llama", {**SMALL, "attn_implementation": "eager"}),
    "falcon, one key head": ("Falcon", OTHER),
}


def make(family, settings, seed=0):
    torch.manual_seed(seed)
    settings = dict(settings)
    how = {name: settings.pop(name) for name in ("attn_implementation",) if name in settings}
    config = getattr(transformers, f"{family}Config")(**settings)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, **how).eval()


def decode(model):
    return decode_inputs(model, DecodeSizes())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    @functools.cache
    def export(name):
        model, path = make(*MODELS[name]), tmp_path_factory.mktemp("attention") / "model.onnx"
        return path, export_onnx(model, kwargs=decode(model), path=path).report

    return export


def nodes_of(path, *types):
    return [node for node in onnx.load(path, load_external_data=False).graph.node if node.op_type in types]


@pytest.mark.parametrize("name", cases(MODELS, quick=["llama", "gemma 2, soft cap"]))
def test_attention_is_one_operator_per_layer_that_takes_the_cache(exported, name):
    path, report = exported(name)
    attention = nodes_of(path, "Attention", "Softmax")
    assert report.opset == 23
    assert report.operators["Attention"] == 2
    assert [node.op_type for node in attention] == ["Attention", "Attention"]
    assert all(node.input[4].startswith("past_key_values.") and len(node.output) == 3 for node in attention)
    assert not [remark for remark in report.remarks if "left out:" in remark]
    assert sum(case.runtime == "onnxruntime" for case in report.cases) >= 4


@needs_transformers("5.23", "frequencies of positions are a product that is transposed")
def test_keys_have_the_heads_of_the_cache_and_no_axis_is_moved(exported):
    """Two heads of keys serve four of queries: no node has the keys of four, also where Qwen 3 normalises each head."""
    path, _ = exported("llama")
    graph = onnx.load(path).graph
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.value_info}
    for node in nodes_of(path, "Attention"):
        numbers = {attribute.name: attribute.i for attribute in node.attribute}
        assert (numbers["q_num_heads"], numbers["kv_num_heads"]) == (4, 2)
        assert [shapes[name][2] for name in node.input[:3]] == [32, 16, 16]
    normed, report = exported("qwen 3, norms of heads")
    assert report.operators["RMSNormalization"] == 9
    assert not [*nodes_of(path, "Transpose"), *nodes_of(normed, "Transpose")]


def test_an_opset_that_was_asked_for_is_written_and_operators_whose_replay_fails_are_left_out_and_named(
    tmp_path, monkeypatch
):
    model = make("Llama", SMALL)
    report = export_onnx(model, kwargs=decode(model), path=tmp_path / "model.onnx", opset_version=18).report
    assert report.opset == 18
    assert report.operators == {"Softmax": 2}

    def wrong(model):
        for node in model.graph:
            if node.op_type == "Attention":
                node.attributes.add(onnx_ir.AttrFloat32("scale", 9.0))

    monkeypatch.setattr("yobx_flatten.export.onnx.file.fuse_attention", wrong)
    report = export_onnx(model, kwargs=decode(model), path=tmp_path / "model.onnx").report
    assert report.ok
    assert "Attention" not in report.operators
    (remark,) = [remark for remark in report.remarks if "was left out" in remark]
    assert remark.startswith("opset 23, attention in one operator was left out: the example: logits differs by")


def _spelled(self, query, key, value, mask):
    key, value = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, 8) for x in (key, value))
    scores = torch.tanh(query @ key.transpose(2, 3) * 0.25 / 3.0) * 3.0 + mask
    scores = scores.softmax(-1, dtype=torch.float32)
    return (scores @ value, scores) if self.weights else scores @ value


def spelled_inputs():
    torch.manual_seed(0)
    query, key, value = (4 * torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    return query, key, value, torch.randn(2, 1, 5, 5)


def test_attention_that_is_spelled_out_becomes_the_operator_unless_its_scores_are_returned(tmp_path):
    report = export_onnx(
        module_of(_spelled, weights=False), spelled_inputs(), path=tmp_path / "model.onnx", dynamic_shapes=None
    ).report
    (node,) = nodes_of(tmp_path / "model.onnx", "Attention")
    attributes = {attribute.name: attribute.f for attribute in node.attribute}
    assert attributes == pytest.approx({"scale": 0.25, "softcap": 3.0})
    assert not nodes_of(tmp_path / "model.onnx", "Softmax", "Expand", "Tanh")
    # other cases have numbers of other sizes, whose outputs are as much larger
    assert max(case.max_difference for case in report.cases if case.case == "the example") < 1e-5
    report = export_onnx(
        module_of(_spelled, weights=True), spelled_inputs(), path=tmp_path / "both.onnx", dynamic_shapes=None
    ).report
    assert report.operators == {"Softmax": 1}  # the operator does not return what the softmax returns


def _mask_of_keys(self, query, key, value, past_key, past_value):
    """The mask is made from the keys themselves: they are needed before the attention."""
    key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
    mask = key.mean(dim=(1, 3))[:, None, None] > 0
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask), key


def test_a_mask_made_of_the_keys_keeps_their_concatenation(tmp_path):
    """An operator that returned the keys could not take a mask made of them; a row that sees nothing gets zeros."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, tokens, 8) for tokens in (3, 3, 3, 4, 4)]
    inputs[1][0], inputs[3][0] = -1.0, -1.0  # no key of the first row is seen
    report = export_onnx(
        module_of(_mask_of_keys), tuple(inputs), path=tmp_path / "model.onnx", dynamic_shapes=None
    ).report
    assert report.operators == {"Attention": 1}
    assert len(nodes_of(tmp_path / "model.onnx", "Attention")[0].output) == 1
    assert report.max_difference < 1e-5


def test_a_module_that_is_wrong_in_every_opset_fails_once(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1))  # torch and onnxruntime round apart
    with pytest.raises(ReplayError) as caught:
        export_onnx(module, (torch.linspace(-2, 2, 2048).reshape(32, 64),), path=tmp_path / "a.onnx", tolerance=0.0)
    assert [case.runtime for case in caught.value.report.cases] == [*["torch.export"] * 3, "onnxruntime"]
    assert not list(tmp_path.iterdir())


def _one_layer(self, input_ids, attention_mask, past_key_values):
    hidden = self.embedding(input_ids)
    rows, new = input_ids.shape
    query = hidden.view(rows, new, 4, 8).transpose(1, 2)
    key, value = self.keys(hidden).view(rows, new, 4, 8).transpose(1, 2).chunk(2, dim=1)
    key, value = past_key_values.update(key, value, 0)
    total = attention_mask.shape[1]
    place = torch.arange(total)
    seen = place[None, :] <= (place[:, None] + total - new)[:new]
    seen = seen[None, None] & attention_mask[:, None, None, :].bool()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    module = types.SimpleNamespace(sinks=self.sinks, num_key_value_groups=2, training=False)
    found, _ = eager_attention_forward(module, query, key, value, mask, scaling=8**-0.5)
    return {"logits": found.flatten(2), "past_key_values": past_key_values}


@pytest.mark.parametrize("optimize", ["onnxruntime", None])
def test_sinks_are_an_input_of_the_operator_that_takes_them(tmp_path, optimize):
    """Replayed with sinks that take from a hundredth to most of the weight; spelled out without that operator."""
    torch.manual_seed(0)
    mask = torch.ones(2, 10).long()
    mask[0, :3] = 0
    inputs = {
        "input_ids": torch.randint(0, 32, (2, 3)),
        "attention_mask": mask,
        "past_key_values": make_dynamic_cache([tuple(torch.randn(2, 2, 2, 7, 8))]),
    }
    parts = {"embedding": torch.nn.Embedding(32, 32), "keys": torch.nn.Linear(32, 2 * 16)}
    module = module_of(_one_layer, **parts, sinks=torch.tensor([2.0, -1.0, 0.5, 4.0]))
    report = export_onnx(module, (), inputs, tmp_path / "a.onnx", cases=[], optimize=optimize).report
    assert report.ok
    assert report.operators == ({"GroupQueryAttention": 1} if optimize else {"Softmax": 1})
