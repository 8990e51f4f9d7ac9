"""One program of a model with a cache serves every length, below the window and past it."""

import copy
import functools
import pathlib
import textwrap

import pytest
import torch
import transformers
import transformers.cache_utils as cache_utils
from transformers import ProphetNetConfig, ProphetNetForCausalLM
from transformers.cache_utils import Cache, StaticCache

from matrix.models import make_model as make_model_of_type
from tests import fresh_process
from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.flatten.huggingface.tracing.one_graph import (
    assert_serves,
    export_decode,
    inputs,
    small_model,
    some_sizes,
    steps_of,
)
from tests.models import SIZES as MODEL_SIZES
from tests.models import WINDOW, make_model
from yobx_flatten import (
    Case,
    DecodeSizes,
    decode_inputs,
    dynamic_shapes,
    export_onnx,
    make_dynamic_cache,
    register_flattening_functions,
)
from yobx_flatten.huggingface.decoders import SlidingDecoder, why_not_sliding

pytestmark = pytest.mark.slow

# the example is past the window, the replays on both sides of it: a branch taken in the trace would show
EXAMPLE = DecodeSizes(batch=2, past=WINDOW + 4, new=3)
SIZES = {
    "one token, far below the window": DecodeSizes(batch=2, past=2, new=1),
    "fills the window exactly": DecodeSizes(batch=3, past=WINDOW - 2, new=1),
    "a chunk that crosses the window": DecodeSizes(batch=3, past=WINDOW - 3, new=3),
    "at the window": DecodeSizes(batch=1, past=WINDOW, new=1),
    "past the window, a padded row": DecodeSizes(batch=4, past=2 * WINDOW + 5, new=1, padding=3),
    "past the window, a padded row, a chunk": DecodeSizes(batch=2, past=WINDOW + 1, new=3, padding=WINDOW + 1),
}


def _program(name: str, **options: object) -> torch.export.ExportedProgram:
    kwargs = decode_inputs(make_model(name), EXAMPLE)
    return torch.export.export(make_model(name), (), kwargs, dynamic_shapes=dynamic_shapes(kwargs), **options)


@pytest.fixture(scope="module", params=cases(["llama", "gemma2", "gemma3", "mistral"], quick=["gemma2"]))
def exported(request):
    with register_flattening_functions(patch_transformers=True):
        program = _program(request.param)
        yield request.param, program, program.module()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_one_program_serves_every_length(exported, sizes):
    name, _, module = exported
    kwargs = decode_inputs(make_model(name), sizes, seed=sizes.past)
    for found, expected in zip(steps_of(module, kwargs), steps_of(make_model(name), kwargs), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def decomposed(exported):
    return exported[1].run_decompositions({})


def test_the_program_decomposes(exported, decomposed):
    """No constant was made in the trace that `run_decompositions` would miss."""
    name, program, _ = exported
    # transformers < 5.17 makes a tensor in gemma2's own code
    assert set(decomposed.graph_signature.lifted_tensor_constants) <= decomposed.constants.keys()
    if not (name == "gemma2" and any("lifted" in key for key in program.constants)):
        assert all("lifted" not in key for key in decomposed.constants)
    kwargs = decode_inputs(make_model(name), SIZES["at the window"])
    with torch.no_grad():
        expected = make_model(name)(**copy.deepcopy(kwargs)).logits
        found = decomposed.module()(**copy.deepcopy(kwargs)).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_sizes_are_compared_at_most_once(exported, decomposed):
    """How many keys a window keeps is a minimum of sizes; nothing else is, since some runtimes have no rule for it."""
    name, program, _ = exported
    for some in (program, decomposed):
        used = [node.target for node in some.graph.nodes]
        assert used.count(torch.sym_min) == (name != "llama")
        assert torch.sym_max not in used


def test_no_layer_of_the_program_keeps_more_than_its_window(exported):
    name, _, module = exported
    kwargs = decode_inputs(make_model(name), SIZES["past the window, a padded row"])
    with torch.no_grad():
        cache = cache_of(module(**copy.deepcopy(kwargs)))
    past = SIZES["past the window, a padded row"].past + 1
    kept = [past if type(layer) is cache_utils.DynamicLayer else WINDOW - 1 for layer in cache.layers]
    assert [layer.keys.shape[-2] for layer in cache.layers] == kept


@pytest.mark.parametrize("name", cases(["gemma2", "mistral"], quick=["gemma2"]))
def test_an_example_below_the_window_serves_lengths_past_it(name):
    """The example's side of the window does not matter, nor does the way torch is asked to guard."""
    kwargs = decode_inputs(make_model(name), DecodeSizes(batch=2, past=3, new=2))
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(
            make_model(name),
            (),
            kwargs,
            dynamic_shapes=dynamic_shapes(kwargs),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        module = program.module()
        for sizes in SIZES.values():
            case = decode_inputs(make_model(name), sizes)
            expected = steps_of(make_model(name), case)
            for found, wanted in zip(steps_of(module, case), expected, strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_position_ids_may_be_given():
    model = make_model("gemma2")
    like = dict.fromkeys(("input_ids", "attention_mask", "position_ids", WORD))
    kwargs = decode_inputs(model, EXAMPLE, like=like)
    case = decode_inputs(model, SIZES["past the window, a padded row"], like=like)
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs))
        found = steps_of(program.module(), case)
    for logits, expected in zip(found, steps_of(model, case), strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", cases(["llama", "mistral", "gemma3"], quick=["mistral"]))
def test_prefill_is_exported_without_a_cache(name):
    model = make_model(name)
    ids = torch.randint(3, 90, (2, WINDOW + 3), generator=torch.Generator().manual_seed(0))
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(
            model,
            (),
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True},
            dynamic_shapes=dynamic_shapes({"input_ids": ids, "attention_mask": ids, "use_cache": True}),
        )
        assert not [key for key in program.constants if "lifted" in key]
        for batch, length in ((3, 4), (1, 2 * WINDOW + 1)):
            other = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(length))
            with torch.no_grad():
                call = {"input_ids": other, "attention_mask": torch.ones_like(other), "use_cache": True}
                found, expected = program.module()(**call), model(**call)
                torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
                following = {"input_ids": other[:, :1], "use_cache": True}
                after = model(**following, **{WORD: cache_of(found)}).logits
                wanted = model(**following, **{WORD: cache_of(expected)}).logits
            torch.testing.assert_close(after, wanted, atol=1e-5, rtol=1e-5)


def test_a_program_exported_from_a_built_cache_takes_a_real_one():
    model = make_model("llama")
    config = model.config
    shape = (2, config.num_key_value_heads, 5, config.head_dim)
    built = make_dynamic_cache([(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)])
    kwargs = {
        "input_ids": torch.randint(3, 90, (2, 3)),
        "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        WORD: built,
    }
    case = decode_inputs(model, DecodeSizes(batch=3, past=11, new=1))
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs))
        found = steps_of(program.module(), case)
    for logits, expected in zip(found, steps_of(model, case), strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_saved_program_runs_in_a_fresh_process(tmp_path: pathlib.Path):
    for name in ("gemma3", "mistral"):
        kwargs = decode_inputs(make_model(name), SIZES["past the window, a padded row, a chunk"])
        cache = kwargs.pop(WORD)
        # no_grad: elsewhere torch 2.13 cannot load a `torch.no_grad()` region whose results nobody uses, and gemma3 in
        # transformers 5.0 has one ("Node.meta wrap_with_set_grad_enabled_1 is missing val field")
        with register_flattening_functions(patch_transformers=True), torch.no_grad():
            program = _program(name)
            torch.export.save(program, tmp_path / f"{name}.pt2")
            leaves, spec = torch.utils._pytree.tree_flatten(cache)
            with torch.no_grad():
                outputs = program.module()(**kwargs, **{WORD: copy.deepcopy(cache)})
        expected = torch.utils._pytree.tree_leaves(tuple(outputs.values())[:1])
        torch.save((kwargs, leaves, spec.context, expected), tmp_path / f"{name}.pt")
    script = """
        import sys, torch
        from yobx_flatten import register_flattening_functions, unflatten_dynamic_cache
        for name in ("gemma3", "mistral"):
            kwargs, leaves, context, expected = torch.load(f"{sys.argv[1]}/{name}.pt")
            with register_flattening_functions(patch_transformers=True):
                program = torch.export.load(f"{sys.argv[1]}/{name}.pt2")
                cache = unflatten_dynamic_cache(leaves, context)
                with torch.no_grad():
                    outputs = program.module()(**kwargs, **{sys.argv[2]: cache})
            assert torch.equal(outputs.logits, expected[0]), name
            print(name, type(outputs[sys.argv[2]]).__name__)
    """
    ran = fresh_process.run("-c", textwrap.dedent(script), tmp_path, WORD, imported=fresh_process.TRAINER)
    assert ran.stdout.splitlines() == ["gemma3 DynamicCache", "mistral DynamicCache"]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # in torch.export.unflatten
def test_the_interface_of_an_attention_with_a_window_is_kept():
    model, kept = make_model("mistral"), "model.layers.0.self_attn"
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = _program("mistral", preserve_module_call_signature=(kept,))
        signatures = {entry.fqn: entry.signature for entry in program.module_call_graph}
        assert WORD in signatures[kept].in_spec.child(1).context
        unflattened = torch.export.unflatten(program)
        for sizes in SIZES.values():
            kwargs = decode_inputs(model, sizes)
            expected = model(**copy.deepcopy(kwargs)).logits
            torch.testing.assert_close(unflattened(**kwargs).logits, expected, atol=1e-4, rtol=0)


def test_the_length_of_the_mask_stands_for_the_counter():
    model = make_model("mistral")
    kwargs = decode_inputs(model, DecodeSizes(batch=2, past=3, new=2))
    del kwargs["attention_mask"]
    decoder = SlidingDecoder(model, {**kwargs, "use_cache": True}, WORD)
    given = decoder.inputs(kwargs)
    assert given["attention_mask"].tolist() == [[1] * 5] * 2
    assert given["position_ids"].tolist() == [[3, 4]] * 2
    cache = cache_of(kwargs)
    with torch.no_grad():
        for step in range(WINDOW):
            found = decoder(**given)
            expected = model(input_ids=given["input_ids"], **{WORD: cache}, use_cache=True)
            torch.testing.assert_close(found["logits"], expected.logits, atol=1e-5, rtol=1e-5)
            assert given["position_ids"][0, 0] == 3 + 2 * step
            given = decoder.next_inputs(given, found, seed=step)
    assert cache_of(given)[0]["key"].shape[2] == WINDOW - 1


def test_tokens_with_codes_beside_them_are_counted_by_their_second_axis():
    model = make_codes_model()
    codes = torch.randint(1, 5, (2, 5, 3), generator=torch.Generator().manual_seed(0))
    cache = cache_of(model(input_ids=codes[:, :3], use_cache=True))
    kwargs = {"input_ids": codes[:, 3:], WORD: cache, "use_cache": True}
    assert why_not_sliding(model, kwargs, WORD) is None
    decoder = SlidingDecoder(model, kwargs, WORD)
    given = decoder.inputs(kwargs)
    assert given["attention_mask"].shape == (2, 5)
    with torch.no_grad():
        for step in range(WINDOW):
            found = decoder(**given)
            mask = given[
                "attention_mask"
            ]  # without, transformers 5.17 lets the first of two new tokens read the second
            expected = model(input_ids=given["input_ids"], attention_mask=mask, **{WORD: cache}, use_cache=True)
            torch.testing.assert_close(found["logits"], expected.logits, atol=1e-5, rtol=1e-5)
            assert given["attention_mask"].shape[1] == 5 + 2 * step
            given = decoder.next_inputs(given, found, seed=step)


def make_codes_model():
    from transformers import KyutaiSpeechToTextConfig, KyutaiSpeechToTextForConditionalGeneration, MimiConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    small = {"intermediate_size": 32, "num_filters": 4, "codebook_size": 8, "codebook_dim": 8, "upsample_groups": 32}
    config = KyutaiSpeechToTextConfig(
        **sizes,
        vocab_size=40,
        codebook_vocab_size=9,
        pad_token_id=3,
        audio_pad_token_id=8,
        num_codebooks=2,
        ffn_dim=64,
        max_position_embeddings=64,
        sliding_window=WINDOW,
        codec_config=MimiConfig(**sizes, **small).to_dict(),
    )
    return KyutaiSpeechToTextForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"token_type_ids": torch.ones(2, 3)}, "the inputs contain token_type_ids"),
        ({"input_ids": None}, "there are no input_ids"),
        ({"attention_mask": torch.ones(2, 1, 3, 8)}, "attention_mask has not the shape (batch, length)"),
        ({"use_cache": True}, None),
    ],
)
def test_inputs_that_tools_do_not_feed_are_named(more, reason):
    """Then the counter stays among the inputs of a file, and the report says why."""
    model = make_model("mistral")
    assert why_not_sliding(model, {**decode_inputs(model, DecodeSizes()), **more}, WORD) == reason


def test_a_specification_for_the_model_becomes_one_for_its_parts():
    model = make_model("mistral")
    kwargs = decode_inputs(model, DecodeSizes())
    decoder = SlidingDecoder(model, kwargs, WORD)
    shapes = dynamic_shapes(
        kwargs, {"input_ids": {0: "rows"}, "attention_mask": None, "past_key_values.value_W8_1": None}
    )
    found = decoder.shapes(shapes)
    assert found["input_ids"] == {0: "rows"}
    assert found["attention_mask"] is None
    assert set(found["position_ids"]) == {0, 1}
    assert [set(layer["key"]) for layer in found["cache"]] == [{0, 2}, {0, 2}]
    assert found["cache"][1]["value"] is None
    assert decoder.shapes(None) is None


_SLIDES = {"sliding_window": WINDOW}
_MIXED = {**_SLIDES, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
_CHUNKS = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
# the last two layers read the keys of the first two
_SHARED = {**_SLIDES, "layer_types": _MIXED["layer_types"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
_SHARED |= {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "intermediate_size": [48] * 4, "laurel_rank": 8}
_SHARED |= {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "head_dim": 8}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SLIDES),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_MIXED, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _MIXED),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_MIXED, **_EXPERTS}),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**_CHUNKS, **_EXPERTS, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48},
    ),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", _SHARED),
}
ROOM = 64

has_lists_of_layers = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17),
    reason="before 5.17 static caches are told the positions, and lists of layers come in another form",
)


def _model(name):
    return small_model(*MODELS[name])


@functools.cache
def _static_program(name):
    return export_decode(_model(name), EXAMPLE, room=ROOM)


@has_lists_of_layers
@pytest.mark.parametrize("name", cases(MODELS, quick=["mistral", "gpt_oss"]))
def test_a_static_cache_has_one_program(name):
    with register_flattening_functions(patch_transformers=True):
        assert_serves(_static_program(name), _model(name), some_sizes(), room=ROOM)


@has_lists_of_layers
@pytest.mark.parametrize("name", cases(["cohere2", "gpt_oss", "llama4", "gemma3n"], quick=["gpt_oss", "llama4"]))
def test_a_dynamic_cache_has_one_program(name):
    """Chunked layers (Llama 4) and layers that read another one's keys (Gemma 3n), too."""
    model = _model(name)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


@has_lists_of_layers
def test_a_static_cache_comes_out_as_the_eager_one():
    model = _model("gemma2")
    with register_flattening_functions(patch_transformers=True):
        program = _static_program("gemma2")
        for sizes in some_sizes():
            case = inputs(model, sizes, ROOM)
            ours, theirs = copy.deepcopy(case), copy.deepcopy(case)
            with torch.no_grad():
                found, expected = cache_of(program(**ours)), cache_of(model(**theirs))
            for mine, eager in zip(found.layers, expected.layers, strict=True):
                torch.testing.assert_close(mine.keys, eager.keys)
                torch.testing.assert_close(mine.values, eager.values)
                assert torch.equal(mine.cumulative_length, eager.cumulative_length)
                assert getattr(mine, "cumulative_length_int", 0) == getattr(eager, "cumulative_length_int", 0)
            for given, eager in zip(cache_of(ours).layers, expected.layers, strict=True):
                torch.testing.assert_close(given.keys, eager.keys)


@has_lists_of_layers
def test_the_layers_have_their_own_methods_behind_a_trace():
    from transformers.cache_utils import StaticSlidingWindowLayer

    copy.copy(StaticSlidingWindowLayer.__new__(StaticSlidingWindowLayer))  # Python notes __slotnames__ in the class
    before = dict(vars(StaticSlidingWindowLayer))
    model = _model("mistral")
    with register_flattening_functions(patch_transformers=True):
        export_decode(model, EXAMPLE, room=ROOM)
        assert dict(vars(StaticSlidingWindowLayer)) == before
    assert isinstance(StaticCache(config=model.config, max_cache_len=ROOM).layers[0], StaticSlidingWindowLayer)


has_functions_of_experts = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"),
    reason="before 5.23 these models loop over experts and tokens in functions of another form",
)


_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA |= {"num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
_MINIMAX = {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 2, "head_dim": 8}
_DBRX = dict.fromkeys((*MODEL_SIZES, "num_key_value_heads", "max_position_embeddings"), ...)
MODELS_OF_MATRIX = {
    "jamba": ("JambaConfig", "JambaForCausalLM", _JAMBA),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", {**_MINIMAX, "block_size": 4}),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}),
    # a loop over the experts that are hit, which no trace can follow, is a product with all of them
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", _DBRX),
    # cuts the positions of a padded mask behind the past: one program for one token and many
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


_DBRX |= {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}
_DBRX["attn_config"] = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}
_DBRX["ffn_config"] = {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}


@has_functions_of_experts
@pytest.mark.parametrize("name", cases(MODELS_OF_MATRIX, quick=["jamba", "dbrx", "opt"]))
def test_recurrences_experts_and_positions_have_one_program(name):
    model = small_model(*MODELS_OF_MATRIX[name])
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, EXAMPLE), model, some_sizes())


# 5.24 has the first model that calls its layers in a loop; where only the last call writes, the others read the past
LOOPED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
}
LOOPED |= {"n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3, "ngpt_alpha_init": 0.5, "head_dim": 8}


@has_functions_of_experts
@pytest.mark.parametrize("mode", cases(["per_loop", "last_loop"], quick=["last_loop"]))
def test_a_loop_over_layers_has_one_program(mode):
    model = small_model("DoryConfig", "DoryForCausalLM", {**LOOPED, "recurrent_kv_cache_mode": mode})
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, DecodeSizes(2, 5, 3)), model, some_sizes())


# the longest traces of all: `make extended` has them and `make test` none
@has_functions_of_experts
@pytest.mark.extended
@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp_text"])
def test_attention_to_chosen_keys_has_one_program(name):
    model = make_model_of_type(name)
    # a cache that has closed a window differs from one that has not: each of these has
    sizes = (3, 6, 2), (3, 7, 1), (2, 2 * WINDOW + 4, 3), (3, 6, 3, 3)
    with register_flattening_functions(patch_transformers=True):
        assert_serves(export_decode(model, DecodeSizes(2, 5, 3)), model, [DecodeSizes(*some) for some in sizes])


@has_functions_of_experts
def test_a_model_that_takes_one_token_at_a_time_keeps_its_example(tmp_path):
    """ProphetNet refuses several tokens beside a cache, and adds up positions: one program, one token, any past."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "decoder_ffn_dim": 16, "encoder_ffn_dim": 16}
    layers = {"num_decoder_layers": 1, "num_encoder_layers": 1, "num_decoder_attention_heads": 2}
    torch.manual_seed(0)
    config = ProphetNetConfig(**sizes, **layers, num_encoder_attention_heads=2, add_cross_attention=False)
    model = ProphetNetForCausalLM(config).eval()
    tokens = torch.randint(4, 32, (3, 9))

    def after(batch, past):
        cache = None
        for step in range(past):
            cache = cache_of(model(tokens[:batch, step : step + 1], **{WORD: cache}, use_cache=True))
        return {"input_ids": tokens[:batch, past : past + 1], WORD: cache, "use_cache": True}

    with torch.no_grad():
        example, other = after(2, 5), after(3, 8)
    exported = export_onnx(model, (), example, tmp_path / "model.onnx", cases=[Case("other", (), other)])
    assert len(exported.report.cases) == 4
    assert any("input_ids axis 1" in remark for remark in exported.report.remarks)
