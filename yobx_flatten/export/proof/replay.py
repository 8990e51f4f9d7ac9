"""Compare an exported program or file with the eager model, in loops that pass the KV cache from call to call."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ...core.compare import largest_difference, shares_of_nan
from ...core.effects import undisturbed
from ...core.private_names.of_torch import pytree
from ...diagnose.comparison import compare_outputs
from ...errors import FlattenError, ReplayError, without_cause
from ...errors.failures import first_line, result_or
from ...huggingface.cache_names import PRESENT, cache_of
from ...huggingface.decoders import with_returned
from ...registry.recipe.aliases import PyTree
from ...runners.in_place import CheckedRunner, InPlaceCache, cache_tensors
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import open_session
from ...runners.ports import Runner, present_of, presents_of
from ...runners.program_runner import ProgramRunner
from ...trees.walk import leaf_names, output_names
from .eager_runs import Case, EagerRuns, Left, Step, clone, with_present, written_parameters


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The differences between the outputs of an export and the outputs of the eager model in one test case.

    Attributes:
        case: name of the test case that was run.
        runtime: library that ran the program: ``"torch.export"`` or ``"onnxruntime"``.
        steps: number of calls in the test case.
        differences: largest absolute difference to the eager model in all calls, by output name.
        seconds: duration of all calls of the program or file, in seconds.
        error: the message of the error that stopped the test case; ``None`` without an error.
        left_out: names of outputs with padded positions; the padded positions were not compared.
        nan: share of NaN elements in each output of the eager model, by output name, averaged over all calls. For an
            output without finite elements, the share is 1.0.
        allowed: largest allowed difference of each output whose rounding error was measured; for all other outputs, the
            report's tolerance applies.
        cause: the reason why outputs differ; ``""`` if the reason is unknown.
    """

    case: str
    runtime: str
    steps: int
    differences: dict[str, float]
    seconds: float
    error: str | None = None
    left_out: tuple[str, ...] = ()
    nan: Mapping[str, float] = dataclasses.field(default_factory=dict)
    allowed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cause: str = ""

    def worst(self, tolerance: float) -> tuple[str, float, float]:
        """Return the name of the output that differs most relative to its tolerance, the difference, and the tolerance.

        Args:
            tolerance: allowed difference of outputs whose rounding error was not measured.
        """
        rows = [(name, found, self.allowed.get(name, tolerance)) for name, found in self.differences.items()]
        rows = rows or [("-", 0.0, tolerance)]
        # outputs above their tolerance come first, also if the tolerance is 0 or the difference is NaN
        return max(rows, key=lambda row: (not row[1] <= row[2], row[1] / (row[2] or 1.0)))

    def within(self, tolerance: float) -> bool:
        """Return whether the test case ran without an error, and all differences are within the tolerance.

        Args:
            tolerance: allowed difference of outputs whose rounding error was not measured.
        """
        _, found, allowed = self.worst(tolerance)
        return self.error is None and found <= allowed

    @property
    def max_difference(self) -> float:
        """The largest difference of an output to the eager model's; infinite if the test case ended in an error."""
        return max(self.differences.values(), default=0.0) if self.error is None else float("inf")

    def cells(self) -> list[str]:
        """Return the cells of a table row: the largest difference and the name of its output, or only the error."""
        if self.error is not None:
            return [self.error]
        return [f"{self.max_difference:.1e}", max(self.differences, key=self.differences.__getitem__, default="-")]


class Nested:
    """Calls an exported program with the module's arguments, and compares the nested outputs of both."""

    keeps_state = True  # buffers that the module writes keep their values between calls

    def __init__(self, runner: ProgramRunner, cache_is: str, written: Collection[str] = ()) -> None:
        self.runtime: str = runner.runtime
        self._runner, self._cache_is, self._written = runner, cache_is, written

    def from_the_start(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager for the calls of a test case, which restores tensors that the calls write."""
        module = self._runner.module
        state = [dict(module.named_buffers()), [one for one in vars(module).values() if isinstance(one, torch.Tensor)]]
        parameters = written_parameters(module, self._written)
        return undisturbed(state=state, weights=parameters, parameters=parameters)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        with torch.no_grad():
            return self._runner.call(args, clone(dict(kwargs)))

    def compare(self, eager: PyTree, outputs: PyTree, names: Sequence[str], padding: Padding) -> dict[str, float]:
        # eager: nested outputs of the module, with zeros at padded positions
        return compare_outputs(eager, padding.blank_leaves(outputs, names), names)

    def feed_back(self, kwargs: Mapping[str, Any], outputs: PyTree) -> Mapping[str, Any]:
        """Return ``kwargs`` for the next call, with the KV cache in ``outputs`` instead of the eager model's cache."""
        if isinstance(outputs, Mapping) and isinstance(outputs.get(PRESENT), list):  # outputs of a `Continued` module
            return with_returned(kwargs, outputs[PRESENT])
        following, cache = with_present(kwargs, outputs) or dict(kwargs), cache_of(outputs)
        return following if cache is None else {**following, self._cache_is: cache}


class ByName:
    """A file that takes tensors by input name, and complex tensors as real tensors with one more axis of size 2."""

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
        return contextlib.nullcontext()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PyTree:
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        given = dict(zip(self._input_leaves, leaves, strict=True))
        pairs = {name: leaf for name, leaf in given.items() if isinstance(leaf, torch.Tensor) and leaf.is_complex()}
        given |= {name: torch.view_as_real(leaf.detach().resolve_conj()) for name, leaf in pairs.items()}
        found = self._found(given)
        return {name: torch.view_as_complex(value) if name in self._pairs else value for name, value in found.items()}

    def _found(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self._runner.run(inputs)

    def compare(
        self, eager: PyTree, outputs: Mapping[str, Any], names: Sequence[str], padding: Padding
    ) -> dict[str, float]:
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
        leaves, spec = pytree.tree_flatten(dict(kwargs))
        own = []
        for name, leaf in zip(leaf_names(dict(kwargs)), leaves, strict=True):
            found = outputs.get(present_of(name) or f"{PRESENT}.{name}", leaf)
            own.append(int(found) if type(leaf) is int else found)
        return pytree.tree_unflatten(own, spec)  # type: ignore[no-any-return] # a dict, as it was


Side: TypeAlias = Nested | ByName
"""A program or file whose calls are compared with the calls of the eager model."""


class InPlace(ByName):
    """A file whose runtime updates the KV cache in place."""

    _runner: CheckedRunner
    _written: InPlaceCache | None = None  # the cache after the last call
    _goes_on = False  # whether the next call continues with this cache

    def feed_back(self, kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Mapping[str, Any]:
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


class InSharedMemory(OnnxRunner):
    """An ONNX file whose cache inputs and outputs share memory, as in a generation loop."""

    runtime: ClassVar[str] = f"{OnnxRunner.runtime}, shared cache"

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if self.refuses(inputs):
            return self.run_in_parts(inputs)
        slots = presents_of(self.slots)
        feeds = {name: inputs[name] for name in self.ports if name not in slots}
        outputs, cache = self.step(feeds, self.cache({name: inputs[name] for name in slots}))
        total = inputs["attention_mask"].shape[1]
        for name, present in slots.items():
            value = torch.from_numpy(cache[name].numpy())
            outputs[present] = value[:, :, :total].clone() if name in self.shared else value
        return outputs


class Pair(NamedTuple):
    eager: PyTree
    outputs: PyTree
    names: list[str]  # names of the leaves of `eager`
    seconds: float  # duration of the call of the program or file

    def tensors(self, padding: Padding) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the output tensors of the model and of the file, by name, with zeros at padded positions."""
        eager = zip(self.names, pytree.tree_leaves(padding.blank_leaves(self.eager, self.names)), strict=True)
        expected = {n: leaf for n, leaf in eager if isinstance(leaf, torch.Tensor) and n in self.outputs}
        return expected, {name: padding.blank(name, self.outputs[name]) for name in expected}


def side_by_side(
    side: Side, module: torch.nn.Module, case: Case, steps: Sequence[Step], taken: Collection[str], padding: Padding
) -> Iterator[Pair]:
    """Run a program or file, with its own KV cache, on the calls of a test case; yield a :class:`Pair` per call."""
    # taken: names of inputs, see `walk.output_names`
    positional = inspect.signature(module.forward).bind_partial(*case.args).arguments
    outputs: Any = None
    for index, step in enumerate(steps):
        fed = side.feed_back(step.given, outputs) if step.goes_on else step.given
        padding.next_call({**positional, **step.given})
        start = time.perf_counter()
        with undisturbed(seed=index):
            outputs = side.run(clone(case.args), fed)
        yield Pair(step.outputs, outputs, output_names(step.outputs, taken), time.perf_counter() - start)


def replay(
    side: Side,
    runs: EagerRuns,
    case: Case,
    *,
    taken: Collection[str] = (),
    written: Collection[str] = (),
    left: Left | None = None,
    allowed: Mapping[str, float] | None = None,
) -> CaseResult:
    # taken: names of inputs, see `walk.output_names`
    # allowed: allowed differences of outputs whose rounding error was measured
    # all calls of the module run first, since its buffers are restored before the program runs
    expected = runs.steps(case, written, left, twice=side.keeps_state or not written)
    padding, seconds = Padding(), 0.0
    differences: dict[str, float] = {}
    nan: dict[str, list[float]] = {}
    pairs = side_by_side(side, runs.module, case, expected, taken, padding)

    def failed(index: int, reason: str) -> CaseResult:
        return CaseResult(case.name, side.runtime, index, differences, seconds, f"step {index}{reason}")

    with side.from_the_start():
        for index in range(len(expected)):
            # an error of the runtime, of any class, is the result of the case
            pair = result_or(lambda: next(pairs), lambda error: error)
            if isinstance(pair, Exception):
                return failed(index, f": {type(pair).__name__}: {without_cause(pair).strip()[:500]}")
            seconds += pair.seconds
            blank = padding.blank_leaves(pair.eager, pair.names)
            try:
                found = side.compare(blank, pair.outputs, pair.names, padding)
            except ReplayError as error:
                return failed(index, f", {without_cause(error)}")
            for name, difference in found.items():
                differences[name] = max(differences.get(name, 0.0), difference)
            for name, share in shares_of_nan(padding.kept_leaves(pair.eager, pair.names), pair.names).items():
                nan.setdefault(name, []).append(share)
    means = {name: sum(shares) / len(shares) for name, shares in nan.items()}
    how: dict[str, Any] = {"left_out": tuple(padding.left_out), "nan": means, "allowed": allowed or {}}
    return CaseResult(case.name, side.runtime, len(expected), differences, seconds, **how)


def check_last_scores(runner: OnnxRunner, names: Sequence[str], cases: Sequence[Case]) -> None:
    """Check that the last token's logits are equal, up to rounding, with and without the logits of other tokens."""
    if not runner.has_kept_scores:
        return
    for case in cases:
        leaves = pytree.tree_leaves((case.args, dict(clone(case.kwargs))))
        given = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in runner.ports}
        read = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), None)
        if read is None or read.shape[1] < 2 or (runner.shared and runner.refuses(given)):
            continue
        past = [slot.port.name for slot in runner.slots]
        feeds = {name: value for name, value in given.items() if name not in past}

        caches = [runner.cache({name: given[name] for name in past}) for _ in range(2)]
        every = runner.step(feeds, caches[0])[0]["logits"]
        last = runner.step(feeds, caches[1], last_scores=True)[0]["logits"]
        wrong = largest_difference(every[:, -1:], last) if last.shape[1] == 1 else float("inf")
        # computed alone, the sums of the last token's logits are in another order
        if not wrong <= 1e-3 * max(1.0, float(every.nan_to_num().abs().max())):
            raise ReplayError(
                f"{runner.name} was run twice: with logits of all tokens, and with logits of the last token only. The "
                f"last token's logits differ by {wrong:.1e}."
            )
        return


def first_difference(
    path: pathlib.Path, program: ExportedProgram, case: Case, inputs: Sequence[str], tolerance: float
) -> list[str]:
    """Return at most one note, on the first node whose value differs between the ONNX file and the program."""
    # of larger files, the intermediate values would need too much memory
    if path.stat().st_size > 2**28 or any(path.parent.glob("*.data")):
        return []
    import onnx

    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    try:
        with torch.no_grad():
            held, given = {**program.constants, **program.state_dict}, iter(clone(leaves))
            specs = program.graph_signature.input_specs
            values = [next(given) if s.kind is InputKind.USER_INPUT else held[s.target or ""] for s in specs]
            interpreter = torch.fx.Interpreter(program.graph_module, garbage_collect_values=False)
            interpreter.run(*values, enable_io_processing=False)
            expected = {node.name: value for node, value in interpreter.env.items() if node.op == "call_function"}
        model = onnx.load(path)
        outputs = {value.name for value in model.graph.output}
        names = [n for node in model.graph.node for n in node.output if n in expected and n not in outputs]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        session = open_session(model.SerializeToString(), caller="export_onnx")
        found = OnnxRunner(session, path.name).run(dict(zip(inputs, leaves, strict=True)))
    except (FlattenError, RuntimeError, ValueError, KeyError) as error:
        return [f"the values inside the file were not compared: {first_line(error)}"]
    for node in program.graph.nodes:
        value = expected.get(node.name)
        if node.name not in found or not isinstance(value, torch.Tensor):
            continue
        how = "another shape"
        if value.shape == found[node.name].shape:
            difference = largest_difference(value, found[node.name].to(value.dtype))
            size = float(value.double().abs().max()) if value.numel() and not value.is_complex() else 1.0
            if not difference > tolerance * max(1.0, size):
                continue
            how = f"by {difference:.1e}"
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
        where = f", of {lines[-1]}" if lines else ""
        return [f"the first value that differs is {node.name!r} ({node.target}{where}): {how}."]
    return []


# Find the outputs at padded positions, which depend on the implementation.
#
# A row that attends to no position is a softmax without terms. Implementations return different values, and no other
# position reads the result.


class Padding:
    """Records which token positions are padding, over all calls of a test case."""

    def __init__(self) -> None:
        self._new: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self.left_out: list[str] = []

    def next_call(self, inputs: Mapping[str, Any]) -> None:
        before, self._new, self._all = self._all, None, None
        names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
        read = next((name for name in names if isinstance(inputs.get(name), torch.Tensor)), None)
        if read is None:
            return
        # the tokens of a decoder, and the mask over the cache and these tokens
        tokens = inputs[read]
        mask = inputs.get("decoder_attention_mask" if read.startswith("decoder_") else "attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.dtype.is_floating_point:
            return
        new, hidden = tokens.shape[1], mask == 0
        past = mask.shape[1] - new
        if mask.shape[0] != tokens.shape[0] or past < 0 or not new:
            return
        known = before if before is not None and before.shape[1] == past else hidden.new_zeros(len(hidden), past)
        everything = torch.cat([known & hidden[:, :past], hidden[:, past:]], dim=1)
        if bool(everything.any()):
            self._new, self._all = everything[:, past:], everything

    def blank(self, name: str, value: Any) -> Any:
        """Return an output with zeros at its padded positions."""
        hidden, axis = self._hidden(name, value)
        if hidden is None or not bool(hidden.any()):
            return value
        if name not in self.left_out:
            self.left_out.append(name)
        shape = [1] * value.dim()
        shape[0], shape[axis] = hidden.shape
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        return torch.where(hidden.to(value.device).reshape(shape), zero, value)

    def blank_leaves(self, tree: PyTree, names: Sequence[str]) -> PyTree:
        # outputs whose number of leaves differs from the number of names are returned unchanged
        leaves, spec = pytree.tree_flatten(tree)
        if self._all is None or len(leaves) != len(names):
            return tree
        return pytree.tree_unflatten([self.blank(*row) for row in zip(names, leaves, strict=True)], spec)

    def kept_leaves(self, tree: PyTree, names: Sequence[str]) -> list[Any]:
        values = pytree.tree_leaves(tree)
        rows = [(value, *self._hidden(name, value)) for name, value in zip(names, values, strict=True)]
        return [v if hidden is None else v.movedim(axis, 1)[~hidden.to(v.device)] for v, hidden, axis in rows]

    def _hidden(self, name: str, value: object) -> tuple[torch.Tensor | None, int]:
        """Return a mask (batch, tokens) that is true at padded positions, and the token axis of ``value``."""
        if self._new is None or self._all is None or not isinstance(value, torch.Tensor):
            return None, 0
        if value.dim() == 3 and value.shape[:2] == self._new.shape:
            return self._new, 1
        if name.startswith("present.") and name.endswith((".key", ".value")) and ".encoder." not in name:
            rows, length = self._all.shape
            if value.dim() == 4 and value.shape[0] == rows:
                kept = value.shape[2]
                if kept <= length:  # a sliding layer keeps the last positions
                    return self._all[:, length - kept :], 2
                unused = self._all.new_zeros(rows, kept - length)  # a static cache has unused positions at its end
                return torch.cat([self._all, unused], dim=1), 2
        return None, 0
