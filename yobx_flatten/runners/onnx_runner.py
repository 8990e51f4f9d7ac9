"""Run an ONNX file in onnxruntime: one call, or a step of a loop without copies.

.. code-block:: text

    step 1   past (empty)  ──> session ──> present ──┐ an OrtValue: memory that onnxruntime owns
    step 2   past  <── the same OrtValue ────────────┘ ──> session ──> present ── ...

Where a file states that memory of its inputs may be that of its outputs, the cache is an :class:`.BufferedCache`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from ..errors import GenerationError, ReplayError
from ..errors.failures import raised_as
from ..errors.messages import first_line
from .adapters import FIRST, SECOND
from .in_place import new_tokens
from .one_by_one import is_refused, one_by_one, row_by_row
from .onnx_buffers import SHARED_CACHE, BufferedCache
from .onnx_values import from_value, to_value, value_type
from .ports import KEPT_SCORES, CacheSlot, Port, cache_slots, is_present, split_cache, with_rows
from .signature import KEY, Signature

_COUNT = value_type("tensor(int64)")


class OnnxRunner:
    """One ONNX file, open; a :class:`.runner.Runner`."""

    # session: an `onnxruntime.InferenceSession`; see `onnx_session.open_session`

    runtime: ClassVar[str] = "onnxruntime"

    def __init__(self, session: Any, name: str) -> None:
        self.name = name
        self._session = session
        nodes = session.get_inputs()
        self._kinds = {node.name: value_type(node.type) for node in nodes}
        self.ports: Mapping[str, Port] = {
            node.name: Port(node.name, tuple(map(_size, node.shape)), self._kinds[node.name].dtype) for node in nodes
        }
        self.outputs: Sequence[str] = [node.name for node in session.get_outputs()]
        self.has_kept_scores = any(node.name == KEPT_SCORES for node in session.get_overridable_initializers())
        self.slots: Sequence[CacheSlot] = cache_slots(self.ports.values(), self.outputs)
        metadata = session.get_modelmeta().custom_metadata_map
        shared = metadata.get(SHARED_CACHE, "").split(",")
        pairs = {slot.port.name: slot.present for slot in self.slots if slot.present is not None}
        self.shared: Mapping[str, str] = {name: pairs[name] for name in shared if name in pairs}
        self._signature = Signature.from_json(metadata[KEY], name) if KEY in metadata else None
        rooms = [node for node in session.get_overridable_initializers() if node.name.endswith((FIRST, SECOND))]
        self._room_kinds = {node.name: value_type(node.type) for node in rooms}
        self.rooms: Mapping[str, Port] = {
            node.name: Port(node.name, tuple(map(_size, node.shape)), self._room_kinds[node.name].dtype)
            for node in rooms
        }
        self._adapter: Mapping[str, Any] = {}  # matrices that each call is given
        # outputs of one token, however many were read
        self.of_last = {node.name for node in session.get_outputs() if len(node.shape) < 2 or node.shape[1] == 1}
        self._has_text = any(node.type == "tensor(string)" for node in (*nodes, *session.get_outputs()))

    def with_adapter(self, matrices: Mapping[str, torch.Tensor]) -> Self:
        """Return the same file with those matrices of an adapter that it takes."""
        found = copy.copy(self)
        found._adapter = {
            name: to_value(name, kind, matrices[name]) for name, kind in self._room_kinds.items() if name in matrices
        }
        return found

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.runner.Runner.run`."""
        if self.refuses(inputs):
            return self.run_in_parts(inputs)
        values = {name: to_value(name, kind, inputs[name]) for name, kind in self._kinds.items()}
        if self._signature is not None:
            shapes = {name: tuple(getattr(inputs[name], "shape", ())) for name in self.ports}
            self._signature.check_sizes(shapes, ReplayError, self.name)
        # onnxruntime has no base class for its errors
        with raised_as(lambda e: ReplayError(f"onnxruntime fails on the inputs of the case: {first_line(e)}")):
            found = self._call_with_text(values) if self._has_text else self._call(values)
            return {name: from_value(value) for name, value in found.items()}

    def refuses(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the file refuses a call: several tokens of several rows after others."""
        return bool(self.shared) and is_refused(inputs)

    def run_in_parts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run a call that the file :meth:`refuses` as several: row by row, or token by token where rows are fixed."""
        given = {name: inputs[name] for name in self.ports}
        if all(port.shape[0] is None for port in self.ports.values() if port.shape):
            rows = [self.run(feeds) for feeds in row_by_row(given)]
            return {name: torch.cat([row[name] for row in rows]) for name in self.outputs}
        calls, found = [], dict(given)
        for feeds in one_by_one(given):
            past = {slot.port.name: found.get(slot.present or "", found[slot.port.name]) for slot in self.slots}
            found = {**past, **self.run({**feeds, **past})}
            calls.append({name: found[name] for name in self.outputs if not is_present(name)})
        return {**{name: found[name] for name in self.outputs if is_present(name)}, **self._joined(calls)}

    def _joined(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The outputs of calls of one token each, as one call of all tokens returns them."""
        last = calls[-1]
        return {
            name: value if name in self.of_last else torch.cat([found[name] for found in calls], dim=1)
            for name, value in last.items()
        }

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return a cache in onnxruntime's own values; see :meth:`.runner.Runner.cache`."""
        return {name: to_value(name, self._kinds[name], tensor) for name, tensor in tensors.items()}

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Run one call of a loop; see :meth:`.runner.Runner.step`."""
        if self.refuses(feeds):
            calls = []
            for given in one_by_one(feeds):
                outputs, cache = self.step(given, cache)
                calls.append(outputs)
            return self._joined(calls), cache  # type: ignore[return-value] # what the last step returned
        values = {name: to_value(name, self._kinds[name], tensor) for name, tensor in feeds.items()}
        if self.has_kept_scores:  # each time: a binding remembers what the call before was given
            values[KEPT_SCORES] = to_value(KEPT_SCORES, _COUNT, torch.tensor(int(last_scores)))
        buffers = self._buffers(feeds, cache) if self.shared else None
        for slot in self.slots:
            if slot.port.name not in self.shared:
                values[slot.port.name] = cache[slot.port.name]
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {first_line(error)}")):
            found = self._call(values, buffers)
        outputs, following = split_cache(found, self.slots, cache)
        if buffers is not None:
            buffers.update(following)
            following = buffers
        return {name: from_value(value) for name, value in outputs.items()}, following

    def select_rows(self, cache: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
        """Return a cache with other rows; see :meth:`.runner.Runner.select_rows`."""
        buffers = cache if isinstance(cache, BufferedCache) else None
        kept = () if buffers is None else buffers.presents
        selected = {
            name: to_value(name, self._kinds[name], with_rows(from_value(value), rows))
            for name, value in cache.items()
            if name not in kept
        }
        if buffers is None:
            return selected
        buffers.select_rows(rows)
        buffers.update(selected)
        return buffers

    def _buffers(self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any]) -> BufferedCache:
        if isinstance(cache, BufferedCache):
            buffers = cache
        else:
            buffers = BufferedCache(self._session, cache, self.shared, self._adapter)
        buffers.reserve(feeds["attention_mask"].shape[1], new_tokens(feeds))
        return buffers

    def _call(self, values: Mapping[str, Any], buffers: BufferedCache | None = None) -> dict[str, Any]:
        binding = self._session.io_binding() if buffers is None else buffers.binding
        kept = [] if buffers is None else list(buffers.presents.values())
        made = [name for name in self.outputs if name not in kept]
        for name, value in (values if buffers is not None else {**values, **self._adapter}).items():
            binding.bind_ortvalue_input(name, value)
        for name in made:
            # without a shape: onnxruntime takes new memory for it, and never that of an input
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        return dict(zip([*kept, *made], binding.get_outputs(), strict=True))  # in the order in which they were bound

    def _call_with_text(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # no OrtValue holds text; `run` takes arrays and OrtValues and returns arrays
        return dict(zip(self.outputs, self._session.run(self.outputs, values), strict=True))


def _size(size: Any) -> int | None:
    return size if isinstance(size, int) else None
