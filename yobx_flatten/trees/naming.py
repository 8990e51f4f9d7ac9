"""Name the leaves of nested inputs and outputs: ``past_key_values.0.key``, ``present.length``."""

from __future__ import annotations

from collections.abc import Collection

from ..huggingface.cache_names import CACHE, PRESENT, word_in_files
from ..recipe.aliases import PyTree
from .walk import key_name, node_of


def leaf_names(tree: PyTree, *, cache: str = CACHE) -> list[str]:
    """Name every leaf by its path.

    >>> leaf_names({"input_ids": 1, "extra": [2, {"a": 3}]})
    ['input_ids', 'extra.0', 'extra.1.a']
    >>> leaf_names({"cache": [{"key": 1, "value": 2}]})
    ['past_key_values.0.key', 'past_key_values.0.value']
    """
    # cache: the word for an entry of the first level that is a model's cache, whatever the model calls it: by default
    # the one that tools for generation expect of inputs
    # returns: one name per leaf, in the order of `torch.utils._pytree.tree_leaves` inside the block
    return _leaf_names(tree, cache)


def _leaf_names(tree: PyTree, cache: str | None) -> list[str]:
    # from below to above, unlike the walk: the class of a node may make a name of all that is below it
    node = node_of(tree)
    if node is None:
        return [""]
    names = []
    for key, child in zip(node.keys, node.children, strict=True):
        first = key_name(key)
        first = first if cache is None else word_in_files(first, child, cache)
        for below in _leaf_names(child, None):
            if node.recipe is not None and node.recipe.label is not None:
                names.append(node.recipe.label(first, below))
            else:
                names.append(f"{first}.{below}" if below else first)
    return names


def output_names(outputs: PyTree, taken: Collection[str] = ()) -> list[str]:
    """Name every leaf of a module's outputs.

    >>> output_names(3), output_names((1, 2)), output_names({"logits": 1, "cache": [{"key": 2, "value": 3}]})
    (['output'], ['output.0', 'output.1'], ['logits', 'present.0.key', 'present.0.value'])
    >>> output_names({"logits": 1, "attention_mask": 2}, ["input_ids", "attention_mask"])
    ['logits', 'output.attention_mask']
    """
    # taken: names of inputs. An output of the same name is called `output.<name>`, since a name means one thing in an
    # ONNX graph (Qwen2Audio returns the attention mask that it was given).
    # what tools for generation call the cache that comes out
    names = leaf_names(outputs, cache=PRESENT)
    if isinstance(outputs, (tuple, list)):
        return [f"output.{name}" for name in names]
    return [f"output.{name}" if name in taken else name or "output" for name in names]
