"""Output classes: transformers' own registration is left in force, ours does the same where it is missing."""

import importlib.util
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast, CausalLMOutputWithPast

from tests.models import start
from yobx_flatten import register_flattening_functions
from yobx_flatten.huggingface.known import WRONG_REGISTRATIONS, transformers_recipes
from yobx_flatten.huggingface.outputs import (
    diffusers_recipes,
    flatten_base_model_output,
    flatten_with_keys_base_model_output,
    unflatten_base_model_output,
)

THEIRS_HAS_KEYS = pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn is not None


def output():
    return BaseModelOutput(
        last_hidden_state=torch.ones(2, 3),
        hidden_states=(torch.zeros(2), torch.ones(2)),
    )


def test_only_the_fields_that_are_set_come_apart():
    """A field that holds several tensors is one child, a container."""
    one = output()
    values, names = flatten_base_model_output(one)
    assert names == ["last_hidden_state", "hidden_states"]
    assert values[0] is one.last_hidden_state
    assert values[1] is one.hidden_states


def test_each_field_has_its_key():
    """`['last_hidden_state']`."""
    keyed, names = flatten_with_keys_base_model_output(output())
    assert [str(key) for key, _ in keyed] == ["['last_hidden_state']", "['hidden_states']"]
    assert names == ["last_hidden_state", "hidden_states"]


def test_an_output_comes_back():
    """Its class, its fields, the very same tensors."""
    one = output()
    rebuilt = unflatten_base_model_output(*flatten_base_model_output(one))
    assert type(rebuilt) is BaseModelOutput
    assert rebuilt.last_hidden_state is one.last_hidden_state
    assert rebuilt.hidden_states == one.hidden_states
    assert rebuilt.attentions is None


def test_another_class_may_be_asked_for():
    """The documented third argument."""
    rebuilt = unflatten_base_model_output(*flatten_base_model_output(output()), BaseModelOutputWithPast)
    assert type(rebuilt) is BaseModelOutputWithPast


@pytest.mark.parametrize("placeholder", ["leaf", 7, object()])
def test_an_output_may_hold_anything_for_a_while(placeholder):
    """Names and numbers that stand for leaves."""
    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(output())
        filled = pytree.tree_unflatten([placeholder] * len(leaves), spec)
        assert pytree.tree_flatten(filled) == ([placeholder] * len(leaves), spec)


def test_transformers_registration_stays_where_it_is_right():
    """Taken away it would be gone for the rest of the process: transformers registers an output class once."""
    theirs = pytree.SUPPORTED_NODES[BaseModelOutput]
    with register_flattening_functions(patch_transformers=True) as undo:
        assert (pytree.SUPPORTED_NODES[BaseModelOutput] is theirs) == THEIRS_HAS_KEYS
        assert pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn is not None
    assert undo[BaseModelOutput] is not THEIRS_HAS_KEYS
    assert pytree.SUPPORTED_NODES[BaseModelOutput] is theirs


@pytest.mark.skipif(not THEIRS_HAS_KEYS, reason="transformers 4.56 registers outputs without keys")
def test_ours_and_theirs_name_the_same_leaves():
    """Whichever is in force, a program's outputs have the same names."""
    theirs = pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn(output())
    ours = flatten_with_keys_base_model_output(output())
    assert [str(key) for key, _ in theirs[0]] == [str(key) for key, _ in ours[0]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "t5"])
def test_a_models_whole_output_comes_back(name):
    """Logits and the cache in it."""
    started = start(name, past=12)
    one = CausalLMOutputWithPast(logits=torch.ones(2, 3), past_key_values=started.cache)
    with register_flattening_functions(patch_transformers=True):
        leaves, spec = pytree.tree_flatten(one)
        rebuilt = pytree.tree_unflatten(leaves, spec)
        assert all(isinstance(leaf, torch.Tensor | int) for leaf in leaves)
    assert type(rebuilt) is CausalLMOutputWithPast
    assert type(rebuilt.past_key_values) is type(started.cache)
    assert rebuilt.past_key_values.get_seq_length() == 12


def test_every_wrong_registration_says_why_and_is_one_we_replace():
    """The table and the recipes do not drift apart."""
    ours = {f"{cls.__module__}.{cls.__qualname__}" for cls in transformers_recipes()}
    assert set(WRONG_REGISTRATIONS) == ours
    assert all(len(reason) > 20 for reason in WRONG_REGISTRATIONS.values())


def test_the_stored_names_are_stable():
    """A saved program finds its classes by them, in later versions too."""
    names = {cls.__name__: recipe.name for cls, recipe in transformers_recipes().items() if recipe is not None}
    names.pop("BaseModelOutput", None)
    assert names == {
        "DynamicCache": "yobx_flatten.transformers:DynamicCache",
        "StaticCache": "yobx_flatten.transformers:StaticCache",
        "EncoderDecoderCache": "yobx_flatten.transformers:EncoderDecoderCache",
    }


@pytest.fixture
def diffusers_like(monkeypatch):
    """A module with the one class of diffusers that matters here, and two output classes of models."""

    class BaseOutput(dict):
        """As diffusers': a dict of the fields that are set."""

        def __post_init__(self):
            self.update({name: value for name, value in vars(self).items() if value is not None})

    @dataclass
    class UNetOutput(BaseOutput):
        sample: torch.Tensor = None

    @dataclass
    class WithMask(UNetOutput):
        mask: torch.Tensor = None

    module = types.ModuleType("diffusers.utils.outputs")
    module.BaseOutput = BaseOutput
    monkeypatch.setitem(sys.modules, "diffusers.utils.outputs", module)
    return UNetOutput, WithMask


def test_each_diffusers_class_that_is_defined_has_a_recipe(diffusers_like):
    """Subclasses of subclasses too."""
    assert [recipe.cls for recipe in diffusers_recipes()] == list(diffusers_like)
    assert len({recipe.name for recipe in diffusers_recipes()}) == 2


def test_a_diffusers_output_comes_back(diffusers_like):
    """Its class, the fields that are set, the very same tensors, each with its key."""
    recipe = diffusers_recipes()[1]
    one = diffusers_like[1](sample=torch.ones(2))
    keyed, static = recipe.flatten_with_keys(one)
    assert [str(key) for key, _ in keyed] == ["['sample']"]
    rebuilt = recipe.unflatten([child for _, child in keyed], static)
    assert type(rebuilt) is diffusers_like[1]
    assert rebuilt.sample is one.sample
    assert rebuilt.mask is None


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
def test_the_installed_diffusers_outputs_come_apart_with_keys():
    """diffusers registers them without, so an exported program cannot name its outputs."""
    from diffusers.models.autoencoders.vae import DecoderOutput

    with register_flattening_functions(patch_diffusers=True):
        keyed, _ = pytree.tree_flatten_with_path(DecoderOutput(sample=torch.ones(2)))
    assert [pytree.keystr(path) for path, _ in keyed] == ["['sample']"]
