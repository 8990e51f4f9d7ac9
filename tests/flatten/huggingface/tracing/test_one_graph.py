"""One program of a model with a cache serves every length, below the window and past it."""

import copy
import pathlib
import textwrap
from typing import Any

import pytest
import torch
import transformers.cache_utils as cache_utils

from tests import fresh_process
from tests.cache_words import WORD, cache_of
from tests.cases import cases
from tests.flatten.huggingface.tracing.one_graph import steps_of
from tests.models import WINDOW, make_model
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, make_dynamic_cache, register_flattening_functions

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


def _program(model: torch.nn.Module, kwargs: dict[str, Any], **options: object) -> torch.export.ExportedProgram:
    return torch.export.export(model, (), kwargs, dynamic_shapes=dynamic_shapes(kwargs), **options)


def assert_same_steps(module: torch.nn.Module, model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for found, expected in zip(steps_of(module, kwargs), steps_of(model, kwargs), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module", params=cases(["llama", "gemma2", "gemma3", "mistral"], quick=["gemma2"]))
def exported(request):
    model = make_model(request.param)
    with register_flattening_functions(patch_transformers=True):
        program = _program(model, decode_inputs(model, EXAMPLE))
        yield request.param, program, program.module()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_one_program_serves_every_length(exported, sizes):
    name, _, module = exported
    assert_same_steps(module, make_model(name), decode_inputs(make_model(name), sizes, seed=sizes.past))


def test_the_program_decomposes_and_compares_sizes_at_most_once(exported):
    """How many keys a window keeps is a minimum of sizes; nothing else is: some runtimes have no rule for it."""
    name, program, _ = exported
    decomposed = program.run_decompositions({})
    # transformers < 5.17 makes a tensor in gemma2's own code
    assert set(decomposed.graph_signature.lifted_tensor_constants) <= decomposed.constants.keys()
    if not (name == "gemma2" and any("lifted" in key for key in program.constants)):
        assert all("lifted" not in key for key in decomposed.constants)
    kwargs = decode_inputs(make_model(name), SIZES["at the window"])
    with torch.no_grad():
        expected = make_model(name)(**copy.deepcopy(kwargs)).logits
        found = decomposed.module()(**copy.deepcopy(kwargs)).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
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
    model = make_model(name)
    example = decode_inputs(model, DecodeSizes(batch=2, past=3, new=2))
    with register_flattening_functions(patch_transformers=True):
        module = _program(model, example, prefer_deferred_runtime_asserts_over_guards=True).module()
        for sizes in SIZES.values():
            assert_same_steps(module, model, decode_inputs(model, sizes))


@pytest.mark.parametrize("name", cases(["llama", "mistral", "gemma3"], quick=["mistral"]))
def test_prefill_is_exported_without_a_cache(name):
    model = make_model(name)

    def call(batch, length):
        ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": True}

    with register_flattening_functions(patch_transformers=True):
        program = _program(model, call(2, WINDOW + 3))
        assert not [key for key in program.constants if "lifted" in key]
        for given in (call(3, 4), call(1, 2 * WINDOW + 1)):
            with torch.no_grad():
                found, expected = program.module()(**given), model(**given)
                torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
                following = {"input_ids": given["input_ids"][:, :1], "use_cache": True}
                after = model(**following, **{WORD: cache_of(found)}).logits
                wanted = model(**following, **{WORD: cache_of(expected)}).logits
            torch.testing.assert_close(after, wanted, atol=1e-5, rtol=1e-5)


def test_a_program_exported_from_a_built_cache_takes_a_real_one():
    model = make_model("llama")
    shape = (2, model.config.num_key_value_heads, 5, model.config.head_dim)
    pairs = [(torch.randn(shape), torch.randn(shape)) for _ in range(model.config.num_hidden_layers)]
    mask = torch.ones(2, 8, dtype=torch.int64)
    kwargs = {"input_ids": torch.randint(3, 90, (2, 3)), "attention_mask": mask, WORD: make_dynamic_cache(pairs)}
    with register_flattening_functions(patch_transformers=True):
        module = _program(model, kwargs).module()
        assert_same_steps(module, model, decode_inputs(model, DecodeSizes(batch=3, past=11, new=1)))


def test_a_saved_program_runs_in_a_fresh_process(tmp_path: pathlib.Path):
    for name in ("gemma3", "mistral"):
        kwargs = decode_inputs(make_model(name), SIZES["past the window, a padded row, a chunk"])
        cache = kwargs.pop(WORD)
        # no_grad: elsewhere torch 2.13 cannot load a `torch.no_grad()` region whose results nobody uses, and gemma3 in
        # transformers 5.0 has one ("Node.meta wrap_with_set_grad_enabled_1 is missing val field")
        with register_flattening_functions(patch_transformers=True), torch.no_grad():
            program = _program(make_model(name), decode_inputs(make_model(name), EXAMPLE))
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
        program = _program(model, decode_inputs(model, EXAMPLE), preserve_module_call_signature=(kept,))
        signatures = {entry.fqn: entry.signature for entry in program.module_call_graph}
        assert WORD in signatures[kept].in_spec.child(1).context
        unflattened = torch.export.unflatten(program)
        for sizes in SIZES.values():
            kwargs = decode_inputs(model, sizes)
            expected = model(**copy.deepcopy(kwargs)).logits
            torch.testing.assert_close(unflattened(**kwargs).logits, expected, atol=1e-4, rtol=0)
