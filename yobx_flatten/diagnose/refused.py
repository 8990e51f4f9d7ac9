"""Find the object among the inputs that ``torch.export`` refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.contents import Layouts
from ..errors import NotRegisteredError
from ..trees.walk import class_name, torch_leaves
from .remedies import remedy_for


def explain_leaf(inputs: Mapping[str, Any], refusal: str) -> NotRegisteredError | None:
    """Say where among the inputs the object is that torch refuses, and the line that registers its class."""
    # refusal: what `torch.export` states, which names the class and neither place nor remedy
    layouts = Layouts()
    for name, value in inputs.items():
        for path, leaf in torch_leaves(value, name):
            if str(type(leaf)) in refusal:
                remedy = remedy_for(type(leaf), leaf, layouts, path)
                line = remedy.line.replace("\n", "\n    ")
                return NotRegisteredError(
                    f"{path} is a {class_name(type(leaf))}, which torch does not know how to flatten. "
                    f"{remedy.advice}:\n    {line}"
                )
    return None
