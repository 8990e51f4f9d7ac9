"""Output classes: transformers' own registration is left in force, ours does the same where it is missing."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import BatchEncoding, BatchFeature, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    BaseModelOutputWithPastAndCrossAttentions,
)
from transformers.utils.generic import ModelOutput

from tests import fresh_process
from tests.cache_words import cache_of
from tests.models import start
from tests.modules import module_class
from yobx_flatten import dynamic_shapes, export_program, flatten_base_model_output, register_flattening_functions
from yobx_flatten.huggingface.outputs import flatten_with_keys_base_model_output, unflatten_base_model_output
from yobx_flatten.huggingface.recipes import WRONG_REGISTRATIONS, transformers_recipes
from yobx_flatten.trees.walk import output_names

THEIRS_HAS_KEYS = pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn is not None


def test_only_the_fields_that_are_set_come_apart():
    one = BaseModelOutput(last_hidden_state=torch.ones(2, 3), hidden_states=(torch.zeros(2), torch.ones(2)))
    values, names = flatten_base_model_output(one)
    keyed, keyed_names = flatten_with_keys_base_model_output(one)
    assert names == keyed_names == ["last_hidden_state", "hidden_states"]
    assert [str(key) for key, _ in keyed] == ["['last_hidden_state']", "['hidden_states']"]
    if THEIRS_HAS_KEYS:  # transformers 4.56 registers outputs without
        theirs = pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn(one)
        assert [str(key) for key, _ in theirs[0]] == [str(key) for key, _ in keyed]
    assert [values[0] is one.last_hidden_state, values[1] is one.hidden_states] == [True, True]
    rebuilt = unflatten_base_model_output(values, names)
    assert type(rebuilt) is BaseModelOutput
    assert rebuilt.last_hidden_state is one.last_hidden_state
    assert rebuilt.hidden_states == one.hidden_states
    assert rebuilt.attentions is None
    assert type(unflatten_base_model_output(values, names, BaseModelOutputWithPast)) is BaseModelOutputWithPast


@pytest.mark.parametrize("cls", [BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions])
def test_transformers_registration_stays_where_it_is_right_and_has_keys_inside_the_block(cls):
    """transformers registers an output class once, before 5.17 without keys, which `torch.export` of T5 needs."""
    theirs = pytree.SUPPORTED_NODES[cls]
    with register_flattening_functions(patch_transformers=True) as undo:
        with register_flattening_functions(patch_transformers=True):
            pass
        assert (pytree.SUPPORTED_NODES[cls] is theirs) == THEIRS_HAS_KEYS
        assert pytree.SUPPORTED_NODES[cls].flatten_with_keys_fn is not None
        assert cls is BaseModelOutput or pytree.SUPPORTED_NODES[cls].flatten_fn is theirs.flatten_fn
        paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(cls(last_hidden_state=torch.ones(2)))]
    assert paths == ["['last_hidden_state']"]
    assert pytree.SUPPORTED_NODES[cls] is theirs
    assert cls is not BaseModelOutput or undo[cls] is not THEIRS_HAS_KEYS


def test_every_wrong_registration_says_why_and_is_one_we_replace():
    ours = {f"{cls.__module__}.{cls.__qualname__}" for cls in transformers_recipes()}
    assert set(WRONG_REGISTRATIONS) <= ours
    assert all(len(reason) > 20 for reason in WRONG_REGISTRATIONS.values())
    assert DynamicCache in WRONG_REGISTRATIONS
    assert WRONG_REGISTRATIONS[DynamicCache] == WRONG_REGISTRATIONS["transformers.cache_utils.DynamicCache"]
    assert (int in WRONG_REGISTRATIONS, WRONG_REGISTRATIONS.get(int)) == (False, None)


def test_the_stored_names_are_stable():
    """A saved program finds its classes by them, in later versions too."""
    recipes = transformers_recipes()
    expected = {
        DynamicCache: "yobx_flatten.transformers:DynamicCache",
        StaticCache: "yobx_flatten.transformers:StaticCache",
        EncoderDecoderCache: "yobx_flatten.transformers:EncoderDecoderCache",
        BatchEncoding: "yobx_flatten.transformers:transformers.tokenization_utils_base.BatchEncoding",
        BatchFeature: "yobx_flatten.transformers:transformers.feature_extraction_utils.BatchFeature",
    }
    assert {cls: recipes[cls].name for cls in expected} == expected


@dataclass
class Inner(ModelOutput):
    features: torch.Tensor = None
    mask: torch.Tensor = None


@dataclass
class Outer(ModelOutput):
    logits: torch.Tensor = None
    inner: Inner = None
    several: list = None
    hidden_states: tuple = None
    cache: object = None


def nested():
    x = torch.arange(6.0).reshape(2, 3)
    return Outer(
        logits=x,
        inner=Inner(features=x + 1),
        several=[Inner(features=x + 2, mask=x + 3)],
        hidden_states=(x + 4, x + 5),
        cache=start("llama", past=3).cache,
    )


NESTED_PATHS = [
    "['logits']", "['inner']['features']", "['several'][0]['features']", "['several'][0]['mask']",
    "['hidden_states'][0]", "['hidden_states'][1]", "['cache']['key_0']", "['cache']['value_0']",
    "['cache']['key_1']", "['cache']['value_1']",
]  # fmt: skip


def test_outputs_inside_outputs_come_back():
    one = nested()
    with register_flattening_functions(patch_transformers=True):
        pairs, spec = pytree.tree_flatten_with_path(one)
        leaves = [leaf for _, leaf in pairs]
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
        rebuilt = pytree.tree_unflatten(leaves, stored)
        assert stored == spec
        again = pytree.tree_leaves(rebuilt)
    assert [pytree.keystr(path) for path, _ in pairs] == NESTED_PATHS
    assert all(a is b for a, b in zip(leaves, again, strict=True))
    assert (type(rebuilt), type(rebuilt.inner), type(rebuilt.several[0])) == (Outer, Inner, Inner)
    assert rebuilt.inner.mask is None
    assert type(cache_of(rebuilt)) is type(cache_of(one))


class Relay(torch.nn.Module):
    def forward(self, outer):
        return Outer(
            logits=outer.logits + outer.inner.features,
            inner=Inner(features=outer.several[0].mask * 2),
            hidden_states=(outer.hidden_states[1],),
            cache=outer.cache,
        )


def test_an_output_is_exported_as_input_and_as_output():
    one = nested()
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(Relay(), (one,), dynamic_shapes=dynamic_shapes((one,)), strict=False)
        other = nested()
        for name in ("logits", "hidden_states"):
            other[name] = pytree.tree_map(lambda x: x.repeat(2, 1), other[name])
        other.inner.features = torch.ones(4, 3)
        other.several[0]["features"] = other.several[0]["mask"] = torch.ones(4, 3)
        other.cache = start("llama", past=7, batch=4).cache
        found = program.module()(other)
    assert type(found) is Outer
    assert torch.equal(found.logits, other.logits + 1)
    assert torch.equal(found.inner.features, torch.full((4, 3), 2.0))
    assert (len(found.hidden_states), found.cache.get_seq_length()) == (1, 7)
    assert output_names(found)[:3] == ["logits", "inner.features", "hidden_states.0"]


def batch(rows=2, **options):
    data = {"input_ids": torch.ones(rows, 3, dtype=torch.long), "attention_mask": torch.ones(rows, 3)}
    return BatchEncoding(data, **options)


AddOne = module_class("AddOne", lambda self, given: BatchFeature({"sum": given["input_ids"] + given["attention_mask"]}))


def test_a_batch_encoding_comes_back_without_what_a_tokenizer_notes_and_is_exported():
    """One program takes the batches of all tokenizers, and one made by hand; the original keeps its notes."""
    one, noted = batch(), batch(rows=5, n_sequences=2)
    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(one)
        rebuilt = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(one)[0]]
        assert pytree.tree_structure(noted) == spec
        assert (noted.n_sequences, pytree.tree_map(lambda x: x, noted).n_sequences) == (2, None)
        program = torch.export.export(AddOne(), (one,), dynamic_shapes=dynamic_shapes((one,)), strict=False)
        found = program.module()(noted)
    assert paths == ["['input_ids']", "['attention_mask']"]
    assert type(rebuilt) is BatchEncoding
    assert vars(rebuilt).keys() == vars(one).keys()
    assert rebuilt.data.keys() == one.data.keys()
    assert all(rebuilt[key] is one[key] for key in one)
    assert rebuilt.is_fast is False
    assert type(found) is BatchFeature
    assert torch.equal(found["sum"], torch.full((5, 3), 2.0))


def test_a_batch_feature_may_hold_anything():
    data = {"pixel_values": torch.ones(2, 3), "sizes": [(3, 4)], "name": "cat", "extra": None}
    one = BatchFeature(dict(data))
    with register_flattening_functions(patch_transformers=True):
        named, spec = pytree.tree_flatten_with_path(one)
        rebuilt = pytree.tree_unflatten([leaf for _, leaf in named], spec)
    assert [pytree.keystr(path) for path, _ in named] == [
        "['pixel_values']", "['sizes'][0][0]", "['sizes'][0][1]", "['name']", "['extra']",
    ]  # fmt: skip
    assert type(rebuilt) is BatchFeature
    assert vars(rebuilt) == vars(one)


def test_a_dataclass_of_a_model_comes_apart_by_its_fields():
    esmfold2 = pytest.importorskip("transformers.models.esmfold2.modeling_esmfold2")
    fields = [torch.ones(2), torch.ones(3), (torch.ones(4), torch.ones(5)), None, None, None, [torch.ones(6)]]
    one = esmfold2.EsmFold2DenoiserConditioning(*fields)
    with register_flattening_functions(patch_transformers=True):
        named, spec = pytree.tree_flatten_with_path(one)
        rebuilt = pytree.tree_unflatten([leaf for _, leaf in named], spec)
    assert [pytree.keystr(path) for path, _ in named][:4] == [
        ".atom_embeds", ".attention_mask", ".position_embeddings[0]", ".position_embeddings[1]",
    ]  # fmt: skip
    assert type(rebuilt) is type(one)
    assert rebuilt.atom_embeds is one.atom_embeds
    assert rebuilt.token_attention_bias[0] is one.token_attention_bias[0]
    assert type(one) not in pytree.SUPPORTED_NODES


needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")


def decoder_output(**fields):
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(**fields)


@needs_diffusers
def test_a_stored_diffusers_output_is_read_inside_and_outside():
    one = decoder_output(sample=torch.ones(2))
    outside = pytree.treespec_dumps(pytree.tree_structure(one))
    with register_flattening_functions(patch_diffusers=True):
        inside = pytree.treespec_dumps(pytree.tree_structure(one))
        assert type(pytree.tree_unflatten([3], pytree.treespec_loads(outside))) is type(one)
    assert inside == outside
    assert pytree.tree_unflatten([3], pytree.treespec_loads(inside)).sample == 3


@needs_diffusers
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copying of leaf specs warns
def test_an_exported_diffusers_model_names_its_outputs_and_loads_in_a_fresh_process(tmp_path):
    """`export_program` sees that diffusers is imported; the block that loads imports the module of the output."""
    decoding = module_class("Decoding", lambda self, x: decoder_output(sample=x * 2))()
    exported = export_program(decoding, (torch.ones(2, 3),))
    assert output_names(exported(torch.ones(2, 3))) == ["sample"]
    exported.save(tmp_path / "decoding.pt2")
    code = (
        "import sys, torch\n"
        "from yobx_flatten import register_flattening_functions\n"
        "with register_flattening_functions(patch_diffusers=True):\n"
        "    outputs = torch.export.load(sys.argv[1]).module()(torch.ones(4, 3))\n"
        "print(type(outputs).__name__, outputs.sample.tolist() == [[2.0] * 3] * 4)\n"
    )
    assert fresh_process.run("-c", code, tmp_path / "decoding.pt2").stdout.split() == ["DecoderOutput", "True"]
