"""Run a file of another exporter with the arguments of the module: convert names and types, and add inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ReplayError
from ..export.proof.eager_runs import Case
from ..export.proof.exported_call import ByName
from ..export.proof.replay import Padding
from ..huggingface.cache_names import CACHE, PRESENT
from ..private_names.of_torch import pytree
from ..recipe.aliases import PyTree
from ..runners.ports import Port, Runner
from .names import place_of

BRANCH = "use_cache_branch"
"""Name of the input of a merged decoder file that selects whether the file reads its cache inputs."""

DERIVED = (
    *(BRANCH, "cache_position", "position_ids", "decoder_position_ids", "token_type_ids", "num_logits_to_keep"),
    *("logits_to_keep", "total_sequence_length", "past_sequence_length", "seqlens_k"),
)
"""Names of inputs of a file that are computed from other inputs if the module has no input of that name."""
WINDOW = (
    "._sliding_window_tensor"  # the end of the name of an input with the window of a layer (transformers' exporters)
)


@dataclasses.dataclass(frozen=True)
class Call:
    """One of the calls that an exported file may compute (such as a prefill), with inputs for a comparison."""

    what: str  # a description for the report
    module: torch.nn.Module
    cases: Sequence[Case]  # the first case is the example
    inputs: Mapping[str, str]  # the name of a leaf in our files, by its name in the file
    leaves: Sequence[str]  # the names of all leaves in our files, in order
    remarks: Sequence[str] = ()

    @property
    def window(self) -> int:
        """The number of tokens in the layers' sliding window; 0 if they attend to all tokens."""
        configs = (getattr(module, "config", None) for module in self.module.modules())
        return next(filter(None, (getattr(config, "sliding_window", None) for config in configs)), 0)

    @property
    def reads_cache(self) -> bool:
        """Whether the inputs of the call include a KV cache."""
        return any(place_of(name) for name in self.leaves)


class FileSide(ByName):
    """Runs a file of another exporter in comparisons with its model; see :class:`.exported_call.ByName`."""

    def __init__(self, runner: Runner, call: Call, outputs: Mapping[str, str]) -> None:
        super().__init__(runner, call.leaves)
        self._call, self._inputs, self._outputs = call, call.inputs, outputs
        self.ran = False  # whether any case has run
        self.other_types: dict[str, str] = {}  # the float types of outputs for which the model returns a different type

    def compare(
        self, eager: PyTree, outputs: Mapping[str, Any], names: Sequence[str], padding: Padding
    ) -> dict[str, float]:
        """Compare the outputs of the file with those of the eager model; see :class:`.replay.Side`."""
        leaves = pytree.tree_leaves(eager)
        kept = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if name in outputs]
        if not kept:
            raise ReplayError(f"no output of the file has a known name: found {', '.join(self._runner.outputs)}")
        found = dict(outputs)
        for name, leaf in kept:
            found[name] = self._as_returned(name, found[name], leaf)
        return super().compare([leaf for _, leaf in kept], found, [name for name, _ in kept], padding)

    def feed_back(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of the next call with the file's own KV cache instead of the eager model's cache."""
        lost = [name for name in self._inputs.values() if place_of(name) and ".encoder." not in name]
        lost = [name for name in lost if PRESENT + name.removeprefix(CACHE) not in outputs]
        if lost:
            raise ReplayError(f"the file takes {lost[0]} but does not return it, so the next call has no cache")
        return super().feed_back(kwargs, outputs)

    def _as_returned(self, name: str, value: object, leaf: object) -> object:
        """Return an output in the module's dtype, and a cache without tokens before the sliding window."""
        if not isinstance(value, torch.Tensor) or not isinstance(leaf, torch.Tensor):
            return value
        kept = self._call.window - 1  # a prefill may return all tokens, but the next call reads only the window
        is_first = not self._call.reads_cache and place_of(name) and leaf.dim() == value.dim() == 4
        if is_first and 0 < kept == leaf.shape[2]:
            value = value[:, :, -kept:]
        if value.dtype == leaf.dtype or value.is_floating_point() != leaf.is_floating_point():
            return value
        if value.is_floating_point():
            self.other_types[name] = str(value.dtype).removeprefix("torch.")
        return value.to(leaf.dtype)

    def _found(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        feeds = {name: self._fed(port, inputs) for name, port in self._runner.ports.items()}
        found, self.ran = self._runner.run(feeds), True
        return {self._outputs[name]: value for name, value in found.items() if name in self._outputs}

    def _fed(self, port: Port, inputs: Mapping[str, Any]) -> Any:
        leaf = self._inputs.get(port.name)
        if leaf is None and port.name.endswith(WINDOW):
            return torch.full([size or 1 for size in port.shape], self._call.window)
        value = derived(port, inputs, reads_cache=self._call.reads_cache) if leaf is None else inputs[leaf]
        return value if port.dtype is None or not isinstance(value, torch.Tensor) else value.to(port.dtype).contiguous()


def derived(port: Port, inputs: Mapping[str, Any], *, reads_cache: bool) -> torch.Tensor:
    """Compute an input that only the file has, such as positions, from the inputs of the model."""
    tokens = next(inputs[name] for name in ("input_ids", "decoder_input_ids", "inputs_embeds") if name in inputs)
    rows, new = tokens.shape[:2]
    mask = inputs.get("attention_mask")
    held = [leaf for name, leaf in inputs.items() if place_of(name) and ".encoder." not in name]
    past = mask.shape[1] - new if mask is not None else held[0].shape[2] if held else 0
    if port.name == BRANCH:
        return torch.full((1,) if port.shape else (), reads_cache)
    if port.name.endswith("position_ids"):
        counted = torch.arange(past + new).expand(rows, -1) if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
        return counted[:, past:]
    known = {"cache_position": torch.arange(past, past + new), "token_type_ids": torch.zeros(rows, new)}
    known |= {"total_sequence_length": torch.tensor(past + new), "past_sequence_length": torch.tensor(past)}
    known |= {"seqlens_k": torch.full((rows,), past + new - 1) if mask is None else mask.sum(1) - 1}
    if port.name in known:
        value = known[port.name]
        return value.reshape([size or -1 for size in port.shape]) if value.numel() == 1 else value
    if port.shape in ((), (1,)):  # the number of last tokens with logits; 0 stands for all tokens
        return torch.zeros(port.shape)
    # only the other branch of a merged decoder reads this input
    source = next((leaf.shape[1] for name, leaf in inputs.items() if name == "encoder_attention_mask"), 1)
    axes = [rows, *([source] if not place_of(port.name) else [])]
    return torch.zeros([size or (axes[axis] if axis < len(axes) else 1) for axis, size in enumerate(port.shape)])
