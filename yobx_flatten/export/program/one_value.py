"""Write sizes with one possible value as numbers into a program.

.. code-block:: text

    torch.cat([key_0, keys])            asserts key_0.shape[1] == 2
    scaled_dot_product_attention(...)   had s88 heads of keys, with 2 <= s88 <= 2; now it has 2

``torch.export`` narrows the range of such a symbol, and keeps the symbol. Translations to ONNX need the number: that of
attention divides by heads, that of an LSTM has the hidden size as an attribute.
"""

from __future__ import annotations

import sympy
import torch
from torch.export import ExportedProgram

from ...private_names.of_torch import FakeTensor, pytree
from ...recipe.aliases import PyTree


def write_single_values(program: ExportedProgram) -> None:
    """Replace each symbol that has one possible value by that value. The program still checks it."""
    # program: changed in place
    single = {symbol: known.lower for symbol, known in program.range_constraints.items() if known.lower == known.upper}
    environment = next((size.node.shape_env for size in _symbols(program)), None) if single else None
    if environment is None:
        return
    # torch does so itself, but not while it defers assertions
    environment.replacements.update({symbol: sympy.Integer(value) for symbol, value in single.items()})
    environment._update_version_counter()
    if hasattr(environment, "_replacements_version_counter"):  # of torch 2.13, in addition
        environment._replacements_version_counter += 1
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(_with_numbers, node.meta["val"])
    for symbol in single:
        del program.range_constraints[symbol]


def _symbols(program: ExportedProgram) -> list[torch.SymInt]:
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    sizes = (size for value in values for size in getattr(value, "shape", (value,)))
    return [size for size in sizes if type(size) is torch.SymInt]


def _number(size: int | torch.SymInt) -> int | torch.SymInt:
    return int(size.node.expr) if isinstance(size, torch.SymInt) and size.node.expr.is_Integer else size


def _with_numbers(value: PyTree) -> PyTree:
    if isinstance(value, torch.SymInt):
        return _number(value)
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return value  # also what torch.vmap wraps, which takes no symbols
    shape, stride = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
    if all(new is old for new, old in zip((*shape, *stride), (*value.shape, *value.stride()), strict=True)):
        return value
    return value.new_empty_strided(shape, stride)
