"""The Flattening List says what the tables say, of every class."""

import pytest
import torch
from transformers import cache_utils

from yobx_flatten import flattening_list, register_flattening_functions
from yobx_flatten.huggingface.caches.layers import LETTERS, OTHER_LETTERS, kind_of_code
from yobx_flatten.huggingface.caches.layouts import flatten_layers
from yobx_flatten.huggingface.recipes import transformers_recipes


def rows(kind):
    return {row.cls.rpartition(".")[2]: row for row in flattening_list() if row.kind == kind}


def test_every_layer_and_every_class_that_the_block_registers_is_listed_with_its_code():
    letters = {name: letter for name, letter in (LETTERS | OTHER_LETTERS).items() if hasattr(cache_utils, name)}
    letters = {getattr(cache_utils, name).__name__: letter for name, letter in letters.items()}
    found = {name: row.code for name, row in rows("layer").items() if row.since}
    assert found == letters
    listed = {row.cls: row.registered_by for row in flattening_list() if row.kind != "layer"}
    with register_flattening_functions(patch_transformers=True) as undo:
        for cls, ours in undo.items():
            if cls.__module__.startswith("transformers."):
                expected = "yobx_flatten" if ours else "transformers"
                assert listed[f"{cls.__module__}.{cls.__qualname__}"] == expected
    stored = {f"{c.__module__}.{c.__qualname__}": recipe.name for c, recipe in transformers_recipes().items() if recipe}
    assert {row.cls: row.code for row in flattening_list() if row.registered_by == "yobx_flatten"} == stored


@pytest.mark.parametrize("code", ["D", "W8", "S16", "X8"])
def test_the_leaves_of_a_layer_are_those_that_it_comes_apart_into(code):
    kind, parameter = kind_of_code(code)
    layer = kind.empty(parameter)
    layer.update(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4), {"cache_position": torch.arange(3)})
    _, names = flatten_layers([layer], plain=False)
    parts = [name.partition("_")[0] for name in names if name != "length"]
    row = rows("layer")[kind.cls.__name__]
    assert parts == [part for part in row.leaves.split(", ") if part != "position" or kind.has_position]
    assert ("length" in names) == ("length" in row.counters.split(", "))
