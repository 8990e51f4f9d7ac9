"""Run an ONNX file in onnxruntime, either once or as one step of generation without a copy of the KV cache.

If a file's metadata states that cache inputs and outputs may share memory, its KV cache is a :class:`.BufferedCache`.
"""

# step 1   past (empty)  ──> session ──> present ──┐ an OrtValue: memory that onnxruntime owns
# step 2   past  <── the same OrtValue ────────────┘ ──> session ──> present ── ...

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from ..errors import GenerationError, ReplayError
from ..errors.failures import first_line, raised_as
from .in_place import TensorBuffers, new_tokens
from .onnx_session import use_huge_pages
from .ports import (
    FIRST,
    KEPT_SCORES,
    SECOND,
    CacheSlot,
    Port,
    cache_slots,
    from_value,
    is_present,
    presents_of,
    split_cache,
    to_value,
    value_type,
)
from .signature import KEY, Signature

_LONG = 256
"""Number of calls after which a loop counts as long enough to be worth the cost of huge memory pages."""


class OnnxRunner:
    # session: an `onnxruntime.InferenceSession`; see `onnx_session.open_session`

    runtime: ClassVar[str] = "onnxruntime"

    def __init__(self, session: Any, name: str) -> None:
        self.name = name
        self._session = session
        nodes = session.get_inputs()
        self._kinds = {node.name: value_type(node.type) for node in nodes}
        self.ports: Mapping[str, Port] = _ports(nodes)
        self.outputs: Sequence[str] = [node.name for node in session.get_outputs()]
        self.has_kept_scores = any(node.name == KEPT_SCORES for node in session.get_overridable_initializers())
        self.slots: Sequence[CacheSlot] = cache_slots(self.ports.values(), self.outputs)
        metadata = session.get_modelmeta().custom_metadata_map
        shared = metadata.get(SHARED_CACHE, "").split(",")
        presents = presents_of(self.slots)
        self.shared: Mapping[str, str] = {name: presents[name] for name in shared if name in presents}
        self._signature = Signature.from_json(metadata[KEY], name) if KEY in metadata else None
        rooms = [node for node in session.get_overridable_initializers() if node.name.endswith((FIRST, SECOND))]
        self._room_kinds = {node.name: value_type(node.type) for node in rooms}
        self.rooms: Mapping[str, Port] = _ports(rooms)
        self._adapter: Mapping[str, Any] = {}  # matrices that each call passes
        self._steps = 0
        # outputs that have one token, whatever the number of new tokens
        self.of_last = {node.name for node in session.get_outputs() if len(node.shape) < 2 or node.shape[1] == 1}
        self._has_text = any(node.type == "tensor(string)" for node in (*nodes, *session.get_outputs()))

    def with_adapter(self, matrices: Mapping[str, torch.Tensor]) -> Self:
        found = copy.copy(self)
        found._adapter = {
            name: to_value(name, kind, matrices[name]) for name, kind in self._room_kinds.items() if name in matrices
        }
        return found

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if self.refuses(inputs):
            return self.run_in_parts(inputs)
        values = {name: to_value(name, kind, inputs[name]) for name, kind in self._kinds.items()}
        if self._signature is not None:
            shapes = {name: tuple(getattr(inputs[name], "shape", ())) for name in self.ports}
            self._signature.check_sizes(shapes, ReplayError, self.name)
        # onnxruntime has no base class for its errors
        with raised_as(lambda e: ReplayError(f"onnxruntime fails on these inputs: {first_line(e)}")):
            if self._has_text:
                # an OrtValue cannot contain text; `run` takes arrays and OrtValues and returns arrays
                found = dict(zip(self.outputs, self._session.run(self.outputs, values), strict=True))
            else:
                found = self._call(values)
            return {name: from_value(value) for name, value in found.items()}

    def refuses(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether inputs are refused, since they combine several rows, several new tokens and a filled cache."""
        if not self.shared:
            return False
        tokens = _tokens(inputs)
        return bool(min(tokens.shape[:2]) > 1 and inputs["attention_mask"].shape[1] > tokens.shape[1])

    def run_in_parts(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the file once per row of the batch, or once per token if the batch size is fixed; join the outputs."""
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
        """Join outputs of several calls, one per token, to the outputs that one call with all tokens would return."""
        names = calls[-1].keys() - self.of_last
        return {**calls[-1], **{name: torch.cat([found[name] for found in calls], dim=1) for name in names}}

    def cache(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {name: to_value(name, self._kinds[name], tensor) for name, tensor in tensors.items()}

    def step(
        self, feeds: Mapping[str, torch.Tensor], cache: Mapping[str, Any], *, last_scores: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if self.refuses(feeds):
            calls = []
            for given in one_by_one(feeds):
                outputs, cache = self.step(given, cache)
                calls.append(outputs)
            return self._joined(calls), cache  # type: ignore[return-value] # a result of the last step
        self._steps += 1
        if self._steps == _LONG:
            use_huge_pages(self._session)
        values = {name: to_value(name, self._kinds[name], tensor) for name, tensor in feeds.items()}
        if self.has_kept_scores:  # at each call, since a binding keeps the value of the call before
            values[KEPT_SCORES] = to_value(KEPT_SCORES, value_type("tensor(int64)"), torch.tensor(int(last_scores)))
        buffers: BufferedCache | None = None
        if self.shared:
            buffers = cache if isinstance(cache, BufferedCache) else BufferedCache(self, cache)
            buffers.reserve(new_tokens(feeds))
        slots = [slot for slot in self.slots if slot.port.name not in self.shared]
        values |= {slot.port.name: cache[slot.port.name] for slot in slots}
        with raised_as(lambda error: GenerationError(f"{self.name} stopped: {first_line(error)}")):
            found = self._call(values, buffers)
        outputs, following = split_cache(found, slots, cache)
        if buffers is not None:
            buffers.update(following)
            buffers.grown(new_tokens(feeds))
            following = buffers
        return {name: from_value(value) for name, value in outputs.items()}, following

    def _call(self, values: Mapping[str, Any], buffers: BufferedCache | None = None) -> dict[str, Any]:
        binding = self._session.io_binding() if buffers is None else buffers.binding
        kept = () if buffers is None else buffers.presents.values()
        made = [name for name in self.outputs if name not in kept]
        for name, value in (values if buffers is not None else {**values, **self._adapter}).items():
            binding.bind_ortvalue_input(name, value)
        for name in made:
            # without a shape, so that onnxruntime allocates new memory for the output
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        # in the order in which they were bound: the outputs of the cache are first
        return dict(zip(made, binding.get_outputs()[len(kept) :], strict=True))


def _ports(nodes: Sequence[Any]) -> dict[str, Port]:
    sizes = {node.name: tuple(size if isinstance(size, int) else None for size in node.shape) for node in nodes}
    return {node.name: Port(node.name, sizes[node.name], value_type(node.type).dtype) for node in nodes}


SHARED_CACHE = "yobx_flatten.shared_cache"
"""Metadata key of an ONNX file; the value lists, separated by commas, the inputs that may share memory with outputs."""


class BufferedCache(TensorBuffers):
    """A KV cache for onnxruntime, in buffers that each call updates in place."""

    def __init__(self, runner: OnnxRunner, values: Mapping[str, Any]) -> None:
        super().__init__({**values, **{name: from_value(values[name]) for name in runner.shared}}, runner.shared)
        self.binding = runner._session.io_binding()
        for name, value in runner._adapter.items():  # equal in each step, and so bound once
            self.binding.bind_ortvalue_input(name, value)

    def _move(self, leaves: Mapping[str, torch.Tensor]) -> None:
        from onnxruntime import OrtValue

        super()._move(leaves)
        for name in leaves:
            value = OrtValue.ortvalue_from_numpy(self[name].numpy())  # shares the memory of the tensor
            self.binding.bind_ortvalue_input(name, value)
            self.binding.bind_ortvalue_output(self.presents[name], value)


_TOKENS = ("input_ids", "inputs_embeds")


# Run several new tokens of several rows as several calls, which `GroupQueryAttention` needs.
#
#     two rows, past 7, tokens 7 8 9     one_by_one  ──>  past 7, token 7 │ past 8, token 8 │ past 9, token 9
#                                        row_by_row  ──>  row 0, past 7, tokens 7 8 9 │ row 1, past 7, tokens 7 8 9


def one_by_one(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split the inputs of a call into the inputs of one call per token; inputs without a token axis are not split.

    >>> import torch
    >>> given = {"input_ids": torch.tensor([[7, 8], [5, 6]]), "attention_mask": torch.ones(2, 4)}
    >>> [(feeds["input_ids"].tolist(), feeds["attention_mask"].shape[1]) for feeds in one_by_one(given)]
    [([[7], [5]], 3), ([[8], [6]], 4)]
    """
    new = _tokens(inputs).shape[1]
    for token in range(new):
        cut = dict(inputs)
        for name in _TOKENS:
            if name in inputs:
                cut[name] = inputs[name][:, token : token + 1]
        if "position_ids" in inputs:
            cut["position_ids"] = inputs["position_ids"][..., token : token + 1]
        mask = inputs["attention_mask"]
        cut["attention_mask"] = mask[:, : mask.shape[1] - new + token + 1]
        yield cut


def row_by_row(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Split the inputs of a call, with the KV cache, into the inputs of one call per row of the batch.

    >>> import torch
    >>> given = {"input_ids": torch.tensor([[7, 8], [5, 6]]), "past_key_values.0.key": torch.zeros(2, 1, 3, 4)}
    >>> [[tuple(value.shape) for value in feeds.values()] for feeds in row_by_row(given)]
    [[(1, 2), (1, 1, 3, 4)], [(1, 2), (1, 1, 3, 4)]]
    """
    rows = _tokens(inputs).shape[0]
    split = {name for name, value in inputs.items() if getattr(value, "ndim", 0) and value.shape[0] == rows}
    for row in range(rows):
        yield {name: value[row : row + 1] if name in split else value for name, value in inputs.items()}


def _tokens(inputs: Mapping[str, Any]) -> Any:
    return next(inputs[name] for name in _TOKENS if name in inputs)
