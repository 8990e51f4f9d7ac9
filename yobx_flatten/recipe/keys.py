"""Convert keys of children between libraries. Recipes use torch's classes."""

from __future__ import annotations

from typing import Any

from ..private_names.of_torch import GetAttrKey, KeyEntry, MappingKey, SequenceKey

_TORCH = (GetAttrKey, MappingKey, SequenceKey)


def torch_key(key: object) -> KeyEntry:
    """Translate a key of JAX (or any other that states what it holds) to torch's.

    >>> torch_key("a"), torch_key(0)
    (MappingKey(key='a'), SequenceKey(idx=0))
    """
    # key: `GetAttrKey`, `DictKey`, `SequenceKey` or `FlattenedIndexKey` of `jax.tree_util`, a key of torch, or a bare
    # key: an integer is a position, everything else a key of a mapping
    if isinstance(key, _TORCH):
        return key
    # by attribute, not by class: JAX is not imported for this
    if hasattr(key, "idx"):
        return SequenceKey(key.idx)
    if hasattr(key, "name"):
        return GetAttrKey(key.name)
    own: Any = getattr(key, "key", key)
    return SequenceKey(own) if type(key).__name__ == "FlattenedIndexKey" or type(key) is int else MappingKey(own)
