"""Call an exported program or file like its module, with the cache that the previous call returned."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...core.compare import largest_difference
from ...core.effects import undisturbed
from ...diagnose.spec_diff import compare_outputs
from ...errors import ReplayError
from ...errors.tried_versions import without_cause
from ...huggingface.cache_names import PRESENT, cache_of
from ...huggingface.decoders import with_returned
from ...private_names.of_torch import pytree
from ...recipe.aliases import PyTree
from ...runners.in_place import CheckedRunner, InPlaceCache
from ...runners.onnx_runner import OnnxRunner
from ...runners.ports import Runner, present_of, presents_of
from ...runners.program_runner import ProgramRunner
from ...runners.rewind import cache_tensors
from ...trees.walk import leaf_names
from .eager_runs import clone
from .left import with_present, written_parameters
from .replay import Padding


class Nested:
    """An exported program that is called like the module. Outputs are compared with their classes and static parts."""

    keeps_state = True

    def __init__(self, runner: ProgramRunner, cache_is: str, written: Collection[str] = ()) -> None:
        self.runtime: str = runner.runtime
        self._runner, self._cache_is, self._written = runner, cache_is, written

    def from_the_start(self) -> contextlib.AbstractContextManager[object]:
        """Return a ``with`` block for the calls of a case, which restores the program's state at its end."""
        module = self._runner.module
        state = [dict(module.named_buffers()), [one for one in vars(module).values() if isinstance(one, torch.Tensor)]]
        parameters = written_parameters(module, self._written)
        return undisturbed(state=state, weights=parameters, parameters=parameters)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        """Run the program once; return its nested outputs."""
        with torch.no_grad():
            return self._runner.call(args, clone(dict(kwargs)))

    def compare(self, eager: PyTree, outputs: PyTree, names: Sequence[str], padding: Padding) -> dict[str, float]:
        """Compare structure, classes and leaves; see :class:`.replay.Side`."""
        return compare_outputs(eager, padding.blank_leaves(outputs, names), names)

    def feed_back(self, kwargs: Mapping[str, Any], outputs: PyTree) -> Mapping[str, Any]:
        """Return the inputs of the next call, with the program's own cache instead of the eager model's cache."""
        if isinstance(outputs, Mapping) and isinstance(outputs.get(PRESENT), list):  # outputs of a `Continued` module
            return with_returned(kwargs, outputs[PRESENT])
        following, cache = with_present(kwargs, outputs) or dict(kwargs), cache_of(outputs)
        return following if cache is None else {**following, self._cache_is: cache}


class ByName:
    """A file in a comparison, which takes and returns tensors by name.

    A complex tensor is a real tensor with an additional axis of size 2 in the file.
    """

    # input_leaves: names of the leaves of the module's inputs, in order
    # pairs: names of complex outputs
    # constants: constant outputs of the program, which the file does not return

    keeps_state = False

    def __init__(
        self,
        runner: Runner,
        input_leaves: Sequence[str],
        pairs: Collection[str] = (),
        constants: Mapping[str, object] | None = None,
    ) -> None:
        self.runtime: str = runner.runtime
        self._runner, self._input_leaves, self._pairs = runner, input_leaves, pairs
        self._constants = constants or {}

    def from_the_start(self) -> contextlib.AbstractContextManager[object]:
        """Return a ``with`` block for the calls of a case; it does nothing, since files keep no state."""
        return contextlib.nullcontext()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        """Run the file once; return its outputs by name."""
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        given = zip(self._input_leaves, leaves, strict=True)
        found = self._found({name: _as_pairs(leaf) for name, leaf in given})
        return {name: torch.view_as_complex(value) if name in self._pairs else value for name, value in found.items()}

    def _found(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self._runner.run(inputs)

    def compare(
        self, eager: PyTree, outputs: Mapping[str, Any], names: Sequence[str], padding: Padding
    ) -> dict[str, float]:
        """Return the difference of each output; values other than tensors are compared with the program's constants."""
        shown = {name: padding.blank(name, value) for name, value in outputs.items()}
        differences = {}
        for name, value in zip(names, pytree.tree_leaves(eager), strict=True):
            if name not in shown:
                if isinstance(value, torch.Tensor):
                    raise ReplayError(f"output {name!r} is missing")
                if name in self._constants and self._constants[name] != value:
                    raise ReplayError(
                        f"output {name!r}: the module returns {value!r}, but the program always returns the value of "
                        f"the example, {self._constants[name]!r}. Return a tensor."
                    )
                continue
            try:
                differences[name] = largest_difference(value, shown[name])
            except ReplayError as error:
                raise ReplayError(f"output {name!r}: {without_cause(error)}") from None
        return differences

    def feed_back(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of the next call, with the file's own cache instead of the eager model's cache."""
        leaves, spec = pytree.tree_flatten(dict(kwargs))
        own = [
            _like(leaf, outputs.get(present_of(name) or f"{PRESENT}.{name}", leaf))
            for name, leaf in zip(leaf_names(dict(kwargs)), leaves, strict=True)
        ]
        return pytree.tree_unflatten(own, spec)  # type: ignore[no-any-return] # a dict, as it was


class InPlace(ByName):
    """A file whose runtime updates the KV cache in place; each call of a case continues with that cache."""

    _runner: CheckedRunner
    _written: InPlaceCache | None = None  # the cache after the last call
    _goes_on = False  # whether the next call continues with this cache

    def feed_back(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of the next call, which continues with the cache in the runtime."""
        self._goes_on = True
        return super().feed_back(kwargs, outputs)

    def _found(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        runner, slots = self._runner, {slot.port.name: slot.present for slot in self._runner.slots}
        goes_on, self._goes_on = self._goes_on, False
        cache = self._written if goes_on else runner.cache({name: inputs[name] for name in slots})
        assert cache is not None
        outputs, following = runner.step({name: inputs[name] for name in runner.ports if name not in slots}, cache)
        assert isinstance(following, InPlaceCache)
        self._written, leaves = following, cache_tensors(following)
        return {**outputs, **{present: leaves[name] for name, present in slots.items() if present is not None}}


def _as_pairs(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor) and leaf.is_complex():
        return torch.view_as_real(leaf.detach().resolve_conj())
    return leaf


def _like(given: object, found: Any) -> Any:
    """Convert a 0-d tensor to an int if the input that it replaces is an int."""
    return int(found) if type(given) is int else found


class InSharedMemory(OnnxRunner):
    """An ONNX file that is called as in a generation loop, with a cache buffer that is longer than the text."""

    runtime: ClassVar[str] = f"{OnnxRunner.runtime}, shared cache"

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run one call; see :meth:`.ports.Runner.run`. The returned keys and values end at the filled length."""
        if self.refuses(inputs):
            return self.run_in_parts(inputs)
        slots = presents_of(self.slots)
        given = {name: inputs[name] for name in self.ports}
        feeds = {name: value for name, value in given.items() if name not in slots}
        outputs, cache = self.step(feeds, self.cache({name: given[name] for name in slots}))
        total = given["attention_mask"].shape[1]
        filled = {}
        for name, present in slots.items():
            value = torch.from_numpy(cache[name].numpy())
            filled[present] = value[:, :, :total].clone() if name in self.shared else value
        return {**outputs, **filled}
