"""Read leaf names without sizes: newer versions of yobx write ``key_W_1`` instead of ``key_W8_1``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

# of layers that slide, or have their full length from the start
_WITHOUT = re.compile(r"(.+)_([WSX])_(\d+)")


def with_sizes(values: Sequence[Any], names: list[str]) -> list[str]:
    """Return names in which every layer states its size: the number of tokens of its keys, as yobx reads it.

    >>> with_sizes([torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)], ["key_W_0", "value_W_0"])
    ['key_W5_0', 'value_W5_0']
    """
    # names: their names; those that state a size, or whose keys are no tensor, stay as they are
    found = {name: _WITHOUT.fullmatch(name) for name in names}
    sizes = {
        match[3]: value.shape[2]
        for name, value in zip(names, values, strict=False)
        if (match := found[name]) is not None and match[1] == "key" and isinstance(value, torch.Tensor)
    }
    return [
        f"{match[1]}_{match[2]}{sizes[match[3]]}_{match[3]}"
        if (match := found[name]) is not None and match[3] in sizes
        else name
        for name in names
    ]
