"""Readable names for the leaves of nested inputs and outputs: ``past_key_values.0.key``, ``present.length``."""

from __future__ import annotations

from collections.abc import Collection

from ..huggingface.cases import CACHE_NAMES
from ..recipe.aliases import PyTree
from .node import key_name, node_of

__all__ = ["leaf_names", "output_names"]


def leaf_names(tree: PyTree, renamed: dict[str, str] | None = None) -> list[str]:
    """Name every leaf by the way to it.

    Args:
        tree: nested inputs or outputs.
        renamed: other names for entries of the first level: ``{"past_key_values": "present"}`` is what tools for
            generation expect of outputs.

    Returns:
        One name per leaf, in the order of ``torch.utils._pytree.tree_leaves`` inside the block.

    >>> leaf_names({"input_ids": 1, "extra": [2, {"a": 3}]})
    ['input_ids', 'extra.0', 'extra.1.a']
    """
    # from below to above, unlike the walk: the class of a node may make a name of all that is below it
    node = node_of(tree)
    if node is None:
        return [""]
    names = []
    for key, child in zip(node.keys, node.children, strict=True):
        first = key_name(key)
        first = (renamed or {}).get(first, first)
        for below in leaf_names(child):
            if node.recipe is not None and node.recipe.label is not None:
                names.append(node.recipe.label(first, below))
            else:
                names.append(f"{first}.{below}" if below else first)
    return names


def output_names(outputs: PyTree, taken: Collection[str] = ()) -> list[str]:
    """Name every leaf of a module's outputs.

    Args:
        outputs: nested outputs.
        taken: names of inputs. An output of the same name is called ``output.<name>``, since a name means one thing in
            an ONNX graph (Qwen2Audio returns the attention mask that it was given).

    >>> output_names(3), output_names((1, 2)), output_names({"logits": 1, "past_key_values": [2]})
    (['output'], ['output.0', 'output.1'], ['logits', 'present.0'])
    >>> output_names({"logits": 1, "attention_mask": 2}, ["input_ids", "attention_mask"])
    ['logits', 'output.attention_mask']
    """
    # what tools for generation call the cache that comes out
    names = leaf_names(outputs, dict.fromkeys(CACHE_NAMES, "present"))
    if isinstance(outputs, (tuple, list)):
        return [f"output.{name}" for name in names]
    return [f"output.{name}" if name in taken else name or "output" for name in names]
