"""A class with two children, and the three functions that flatten it, as a user writes them."""

from typing import Any

import torch.utils._pytree as pytree


class Pair:
    """Two children, `a` and `b`, and no static part."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def flatten(pair: Pair) -> tuple[list[Any], None]:
    return [pair.a, pair.b], None


def unflatten(children: Any, static: Any) -> Pair:
    return Pair(*children)


def flatten_with_keys(pair: Pair) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey("a"), pair.a), (pytree.GetAttrKey("b"), pair.b)], None


FUNCTIONS = (flatten, unflatten, flatten_with_keys)
