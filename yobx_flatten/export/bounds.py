"""Set an upper bound on every dynamic axis, and check it against the model and its program.

.. code-block:: text

    bounds={"batch": 4, "length": 512, "new": 64}

    input_ids               (batch <= 4, new <= 64)                 an axis that the trace fixes has no bound:
    attention_mask          (batch <= 4, length <= 512)             frames of a spectrogram, heads, the width of a layer
    past_key_values.0.key   (batch <= 4, heads, length <= 512, 64)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from ..errors import DynamicShapesError, InvalidArgumentError
from ..huggingface.cache_names import after_cache
from ..recipe.aliases import DynamicShapes, PyTree
from ..trace.program_inputs import traced_inputs
from ..trees.shapes import shapes_of_leaves
from ..trees.walk import key_name, leaf_names, leaves_of, node_of

_NEW = ("input_ids", "inputs_embeds", "position_ids", "decoder_input_ids")
"""Names of inputs that contain the new tokens of a call, not the cached tokens."""

_POSITIONS = ("max_position_embeddings", "max_target_positions")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest batch size and numbers of tokens of an export; ``None`` for sizes without a bound."""

    batch: int | None = None  # number of rows
    length: int | None = None  # number of tokens, in the cache and the mask
    new: int | None = None  # number of tokens of one call

    @classmethod
    def of(cls, given: Mapping[str, int] | None) -> Bounds | None:
        """Return the bounds that a dict such as ``{"batch": 4, "length": 512}`` requests."""
        if given is None:
            return None
        known = [field.name for field in dataclasses.fields(cls)]
        wrong = [name for name, most in given.items() if name not in known or type(most) is not int or most < 1]
        if wrong or not given:
            raise InvalidArgumentError(
                'bounds: expected a dict of ints, such as {"batch": 4, "length": 512} ("new" limits tokens of a call), '
                f"found {dict(given)!r}."
            )
        return cls(given.get("batch"), given.get("length"), given.get("new", given.get("length")))

    def __str__(self) -> str:
        stated = {name: most for name, most in vars(self).items() if most is not None}
        return ", ".join(f"{name} {most}" for name, most in stated.items())

    def check_positions(self, module: object) -> None:
        """Refuse a length bound that exceeds the largest number of positions of a model."""
        config: Any = getattr(module, "config", None)  # only a Hugging Face model states its number of positions
        if self.length is None or not hasattr(config, "get_text_config"):
            return
        text: Any = config.get_text_config(decoder=True)
        for name in _POSITIONS:
            most = getattr(text, name, None)
            if isinstance(most, int) and self.length > most > 0:
                new = {"new": self.new} if self.new is not None and self.new < most else {}
                fitting = {**({} if self.batch is None else {"batch": self.batch}), "length": most, **new}
                raise DynamicShapesError(
                    f"bounds: length={self.length} is above the {most} positions of {type(module).__qualname__} "
                    f"(config.{name}):\n    bounds={fitting}"
                )

    def on(self, inputs: PyTree, shapes: DynamicShapes) -> DynamicShapes:
        """Return dynamic shapes in which every dynamic size has its bound."""
        return None if shapes is None else self._on(inputs, shapes, (), None)

    def check_program(self, inputs: PyTree, shapes: DynamicShapes, program: ExportedProgram) -> None:
        """Refuse a program with a varying size whose value in the example is above its bound."""
        dims_of_leaves, values = shapes_of_leaves(inputs, shapes), traced_inputs(program)
        leaves = zip(leaf_names(inputs), leaves_of(inputs), dims_of_leaves, values, strict=True)
        for name, leaf, dims, value in leaves:
            for axis, dim in (dims or {}).items():
                if getattr(dim, "max", None) is not None or not isinstance(value, torch.Tensor):
                    continue
                most, meaning = self._most((name.split(".")[0],), None, axis)
                if most is not None and leaf.shape[axis] > most and _varies(value.shape[axis], program):
                    raise _above(f"{name}.axis {axis}", leaf.shape[axis], most, meaning)

    def holds(self, inputs: PyTree, shapes: DynamicShapes, steps: int = 1) -> bool:
        """Return whether the sizes of ``steps`` calls that extend the same cache stay within the bounds."""
        leaves = list(zip(leaf_names(inputs), leaves_of(inputs), strict=True))
        new = max((leaf.shape[1] for name, leaf in leaves if name in _NEW and leaf.dim() > 1), default=0)
        for (name, leaf), dims in zip(leaves, shapes_of_leaves(inputs, shapes), strict=True):
            for axis, dim in (dims or {}).items():
                most = getattr(dim, "max", None)
                if most is None or not isinstance(leaf, torch.Tensor) or axis >= leaf.dim():
                    continue
                counts = not leaf.is_floating_point() or after_cache(name) is not None
                grows = (steps - 1) * new if axis and counts and name not in _NEW else 0
                if leaf.shape[axis] + grows > most:
                    return False
        return True

    def _on(
        self, obj: PyTree, shapes: DynamicShapes, path: tuple[str, ...], axes: Mapping[int, str] | None
    ) -> DynamicShapes:
        if shapes is None:
            return None
        node = node_of(obj)
        if node is None:
            return self._on_leaf(obj, shapes, path, axes)
        names = [key_name(key) for key in node.keys]
        recipe = node.recipe
        meanings = [None if recipe is None or recipe.axes is None else recipe.axes(name) for name in names]
        specs = [shapes[key] for key in obj] if isinstance(shapes, Mapping) else list(shapes)
        rows = zip(node.children, specs, names, meanings, strict=True)
        below = [self._on(child, spec, (*path, name), meaning) for child, spec, name, meaning in rows]
        if isinstance(shapes, Mapping):
            return dict(zip(obj, below, strict=True))
        return type(shapes)(*below) if hasattr(shapes, "_fields") else type(shapes)(below)

    def _on_leaf(
        self, leaf: object, shapes: DynamicShapes, path: tuple[str, ...], axes: Mapping[int, str] | None
    ) -> DynamicShapes:
        if not isinstance(leaf, torch.Tensor) or not isinstance(shapes, (Mapping, list, tuple)):
            return shapes
        entries = dict(enumerate(shapes)) if isinstance(shapes, (list, tuple)) else dict(shapes)
        for axis, dim in entries.items():
            most, meaning = self._most(path, axes, axis)
            kind = getattr(getattr(dim, "type", None), "name", "")
            if most is None or kind not in ("AUTO", "DYNAMIC") or dim.max is not None:
                continue
            if leaf.shape[axis] <= most:
                entries[axis] = getattr(Dim, kind)(min=dim.min, max=most)
            elif axes is not None or (not leaf.is_floating_point() and leaf.dim() < 3):
                raise _above(f"{'.'.join(path)}.axis {axis}", leaf.shape[axis], most, meaning)
        return entries

    def _most(self, path: tuple[str, ...], axes: Mapping[int, str] | None, axis: int) -> tuple[int | None, str]:
        """Return the bound of an axis, and the name of the bound."""
        meaning = ("length" if axis else "batch") if axes is None else axes.get(axis, "")
        meaning = "new" if meaning == "length" and path[0] in _NEW else meaning
        return getattr(self, meaning, None), meaning


def _varies(size: object, program: ExportedProgram) -> bool:
    if not isinstance(size, torch.SymInt):
        return False
    # torch.export may keep a symbol for a size with one possible value
    found = program.range_constraints.get(size.node.expr)
    return found is None or found.lower != found.upper


def _above(place: str, size: int, most: int, meaning: str) -> DynamicShapesError:
    return DynamicShapesError(
        f"{place}: size {size} of the example is above the bound {most} of {meaning!r}. Pass a smaller example, or a "
        f'larger bound:\n    bounds={{"{meaning}": {size}}}'
    )
