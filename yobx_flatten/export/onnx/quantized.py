"""Quantize a checked ONNX file, and measure the difference between the file's outputs and the model's outputs."""

# file in float ──> replay: the structure is right ──> quantize one weight after the other ──> file
#                                                                  model ──> distance <── replay

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import open_session, session_options
from ...trace.onnx_repairs import ir
from ..proof.eager_runs import Texts
from ..proof.quality import Quality
from ..proof.report import ExportReport
from ..quantization import Bits, Quantization, are_exact, find_bits, first_bits, measure, reads_once, rounding_calls
from ..source import Source
from .file import UnprovenFile
from .quantize import QuantizedWeights, check_quantized, quantize_model, remark_quantized
from .rewrite.graph import Nodes
from .rounding import RoundedMatrices, input_moments, input_splits, read_matrix, round_by_text, round_with_feedback
from .weights import Grids, InputSplits, is_in_main_graph, new_value, products_of, replace_product

_NOTICED = 3e-4
"""Divergence, in nats, at which about one greedy token in a hundred differs from the model's."""

_NEAR = 0.1
"""Largest relative difference of outputs (root mean square) that one scale per token may cause."""

_CLOSE = 2e-3
"""Largest divergence, in nats, of a file with rounded weights and with activations rounded in two parts."""

_LEFT = 16
"""Two parts are tried for 4-bit weights if activations in one part lose at most 16 times what weights lose."""

_FLOATS = {
    "auto": 'the activations are not quantized: activations="split" (--activations split) and "int8" are faster, and '
    "less exact.",
    "split": "the activations are not quantized: there is no text that the file reads from its first token, to find "
    "the large channels. For a file that can: Quantization(calibration=tokens)",
}
"""Notes on why the activations of a file stay in float, by the value of the option ``activations``."""


@dataclasses.dataclass(frozen=True)
class FileQuantizer:
    """Quantizes the weights of an ONNX file that has passed its checks."""

    file: UnprovenFile
    quantization: Quantization
    source: Source
    report: ExportReport
    grids: Grids = dataclasses.field(default_factory=Grids)

    def run(self) -> Quality | None:
        """Replace the file by a file with quantized weights; return the :class:`Quality` of the new file."""
        file, quantization, source, report = self.file, self.quantization, self.source, self.report
        with report.timed("quantize"):
            found = quantize_model(ir.load(file.path), quantization, grids=self.grids)
            check_quantized(found, quantization, report)
        roles = found.roles
        if quantization.activations == "token" or (quantization.may_be_by_token and self._is_by_token()):
            quality, is_enough = self._by_token()
            if is_enough:
                return quality
        rounded: RoundedMatrices = {}
        if not are_exact(first_bits(roles, quantization.bits), roles):
            with report.timed("round"):
                rounded = round_by_text(file, quantization, source, self.grids)

        def quantized(bits: Bits, *, rounds_inputs: bool, splits: InputSplits | None) -> tuple[Any, QuantizedWeights]:
            with report.timed("quantize"):
                model = ir.load(file.path)  # large weights are memory-mapped
                how: dict[str, Any] = {"rounds_inputs": rounds_inputs, "splits": splits}
                return model, quantize_model(model, quantization, bits, self.grids, rounded, **how)

        def try_bits(bits: Bits, *, rounds_inputs: bool, splits: InputSplits | None = None) -> Quality:
            return self._measured(
                *quantized(bits, rounds_inputs=rounds_inputs, splits=splits), source.example.runs.texts
            )

        bits: Bits = dict.fromkeys(roles, quantization.bits)
        is_kept, asked, quality = quantization.weights == "keep", quantization.activations, None
        rounds_inputs = asked == "int8" or (asked == "auto" and not is_kept)
        splits = self._splits() if asked == "split" else {}
        # quantized activations cause larger errors than 8-bit weights, and smaller errors than 4-bit weights
        inputs_first = quantization.bits == 8 and not is_kept
        if source.cases:
            measured = functools.partial(try_bits, rounds_inputs=rounds_inputs, splits=splits)
            searched = functools.partial(find_bits, roles, quantization.bits)
            bits, quality = (bits, measured(bits)) if is_kept or inputs_first else searched(measured)
            if rounds_inputs and asked == "auto" and _loss(quality) > _NOTICED:
                as_is = functools.partial(try_bits, bits, rounds_inputs=False)
                quality, rounds_inputs, splits = self._choose_inputs(quality, as_is, is_fine=inputs_first)
            if inputs_first and not quality.ok:
                bits, quality = searched(functools.partial(try_bits, rounds_inputs=rounds_inputs, splits=splits))
        if not rounds_inputs and asked in ("auto", "split") and not splits:
            report.remark(_FLOATS[asked])
        self._write(*quantized(bits, rounds_inputs=rounds_inputs, splits=splits), bits)
        return quality

    def _is_by_token(self) -> bool:
        """Return whether the file is a float32 text encoder in which 8-bit quantization would change every matrix."""
        if not self.source.cases or not reads_once(self.source.example.kwargs):
            return False
        weights = [weight for _, weight in products_of(ir.load(self.file.path), self.quantization.block_size)]
        are_floats = all(value.const_value.dtype.name == "FLOAT" for value, _ in weights)
        return are_floats and not any(self.grids.is_exact(value, 8, transposed=turned) for value, turned in weights)

    def _by_token(self) -> tuple[Quality | None, bool]:
        """Quantize activations per token and weights per output channel, and return the measured quality."""
        # all other products are quantized in blocks; the file is replaced (`True`) only if the quality is sufficient
        with self.report.timed("quantize"):
            model, found = ir.load(self.file.path), QuantizedWeights()
            groups = _grouped(products_of(model, self.quantization.block_size))
            for group in self._with_moments(groups, model.graph):
                _replace(group, model, found)
            found = quantize_model(model, self.quantization, grids=self.grids, found=found)
        quality = self._measured(model, found, []) if self.source.cases else None
        is_asked = self.quantization.activations == "token"
        if quality is not None and not is_asked and not (quality.ok and quality.relative_difference <= _NEAR):
            return quality, False
        self._write(model, found)
        return quality, True

    def _with_moments(self, groups: list[_Group], graph: ir.Graph) -> Iterator[_Group]:
        """Yield all groups of weight matrices; groups whose inputs were measured on the calibration text come first."""
        example = self.source.example
        calls = rounding_calls(example, self.quantization)
        names = {name: group for group in groups for name in group.inputs}
        sizes = {name: _rows(group) for name, group in names.items() if is_in_main_graph(group.inputs[name], graph)}
        done: list[_Group] = []
        if calls is not None and sizes:
            cases, tokens = calls
            missing = dict.fromkeys(sizes)
            for name, moments in input_moments(self.file, sizes, cases, example.names, tokens):
                group = names[name]
                group.moments = moments if group.moments is None else group.moments + moments
                del missing[name]
                if not missing.keys() & group.inputs:
                    done.append(group)
                    yield group
                    group.moments = None
        yield from (group for group in groups if group not in done)

    def _write(self, model: Any, found: QuantizedWeights, bits: Bits | None = None) -> None:
        remark_quantized(found, self.quantization, self.report, bits)
        with self.report.timed("quantize"):
            self.report.onnx_bytes = self.file.replace_by(model)

    def _measured(self, model: Any, found: QuantizedWeights, known: list[Texts]) -> Quality:
        # known: losses and logits of the model on the text; the first call fills the list, so that later calls reuse it
        trial = UnprovenFile(self.file.target, self.file.folder / "trial")
        trial.folder.mkdir()
        try:
            with self.report.timed("quantize"):
                trial.save(model)
            with self.report.timed("measure"):
                options = session_options()
                options.enable_cpu_mem_arena = False  # an arena would keep twice the memory of the logits of a text
                session = open_session(trial.path, caller="export_onnx", options=options)
                runner, size = OnnxRunner(session, self.file.path.name), found.block_size
                return measure(runner, self.quantization, self.source, block_size=size, known=known)
        finally:
            shutil.rmtree(trial.folder)

    def _splits(self) -> InputSplits:
        with self.report.timed("splits"):
            return input_splits(self.file, self.quantization, self.source)

    def _choose_inputs(
        self, whole: Quality, measured: Callable[..., Quality], *, is_fine: bool
    ) -> tuple[Quality, bool, InputSplits]:
        """Choose whether to quantize activations to 8 bits, to a sum of two 8-bit tensors, or not at all."""
        # whole: the quality with activations that are quantized whole
        # measured: returns the quality for these splits; without splits, activations stay in float
        # is_fine: whether the error of the weights is so small that two parts are tried first
        # returned: the quality, whether activations are quantized whole, and how they are split
        splits = self._splits() if is_fine else {}
        parted = measured(splits=splits) if splits else None
        if parted is None or _loss(parted) > min(_CLOSE, _loss(whole) / 2):
            exact = measured(splits={})
            if _loss(whole) <= 2 * _loss(exact):
                return whole, True, {}
            if not is_fine and _loss(whole) <= _LEFT * _loss(exact) and (splits := self._splits()):
                parted = measured(splits=splits)
            if parted is None or _loss(parted) > 2 * _loss(exact):
                self.report.remark(
                    f"the activations are not quantized: 8 bits would raise the divergence from {_loss(exact):.1e} to "
                    f"{_loss(whole):.1e} nats."
                )
                return exact, False, {}
        self.report.remark(
            "the activations are quantized to 8 bits in two parts, small values and the remainder of large values: "
            f'{_loss(parted):.1e} nats of divergence instead of {_loss(whole):.1e} in one part. activations="float" '
            "(--activations float) is slower and does not quantize activations."
        )
        return parted, False, splits


def _loss(quality: Quality) -> float:
    """Return the divergence, in nats, of the file's logits from the model's; 0 for outputs that are not logits."""
    found = quality.divergence if quality.text_divergence is None else quality.text_divergence
    return found or 0.0


_BITS = 7

_ALPHA = 0.6
"""The exponent alpha of SmoothQuant; values from 0.5 to 0.7 change results of all-MiniLM-L6-v2 by 1e-4."""

_LEAST = 1e-12  # divisor for a token whose activations are all zero

_STEPS, _MIDDLE = 127, 128  # activations are stored as uint8 with the zero point 128


# Multiply in 8 bits with one scale for each token, and one for each output of a matrix.
#
#     x ── Mul(1 / s) ──┬── Abs ── ReduceMax ── largest ─────────────────────────────┐
#                       └── Div by it ── QuantizeLinear ── MatMulIntegerToFloat ── Mul ──> y
#                                                          integers of W * s, scales
#
# With one scale for a whole row of integers, many tokens take half the time, since blocks would be summed one by one.
# But a few channels are much larger than the others, and decide the scale of their token. Therefore each channel is
# divided by a number, and its weights are multiplied with this number (SmoothQuant, Xiao et al. 2022).
#
# Weights have 7 bits. Without the VNNI instructions, x86-64 adds two products in 16 bits, which can represent
# 2 * 255 * 64 and not 2 * 255 * 127: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html


@dataclasses.dataclass
class _Group:
    """Weight matrices that multiply the same inputs, and therefore share one divisor for each input channel."""

    nodes: list[tuple[Any, tuple[str, bool]]] = dataclasses.field(default_factory=list)  # with the key of its weight
    weights: dict[tuple[str, bool], Any] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    moments: torch.Tensor | None = None  # sum of the second moments of the inputs on the calibration text


def _grouped(products: list[tuple[Any, tuple[Any, bool]]]) -> list[_Group]:
    """Group matrix products with common inputs or common weights, since layers may share weights (ALBERT)."""
    groups: list[_Group] = []
    for node, (value, transposed) in products:
        x, key = node.inputs[0], (value.name, transposed)
        readers = [use.node.op_type for use in value.uses()]
        if not readers or not (set(readers) <= {"MatMul", "Gemm"} or readers == ["Transpose"]):
            continue  # a matrix that is tied to an embedding
        joined = _Group([(node, key)], {key: value}, {x.name: x})
        for group in [one for one in groups if one.weights.keys() & joined.weights or x.name in one.inputs]:
            joined.nodes += group.nodes
            joined.weights |= group.weights
            joined.inputs |= group.inputs
            groups.remove(group)
        groups.append(joined)
    return groups


def _rows(group: _Group) -> int:
    (_, transposed), value = next(iter(group.weights.items()))
    return int(value.const_value.shape[1 if transposed else 0])


def _replace(group: _Group, model: ir.Model, found: QuantizedWeights) -> None:
    weights = {key: read_matrix(value, key[1]) for key, value in group.weights.items()}
    channels, moments = torch.ones(_rows(group)), group.moments
    if moments is None:
        moments = torch.eye(len(channels))  # rounds weights to nearest
    else:
        channels = _channels(moments, [one.abs().amax(1) for one in weights.values()])
        moments = moments / channels[:, None] / channels
    graph, stored = model.graph, {}
    for (name, transposed), weight in weights.items():
        grid = round_with_feedback(weight * channels[:, None], moments, len(channels), torch.float32, _BITS)
        numbers = grid.numbers.reshape(len(grid.numbers), -1).T.astype(numpy.int16) - grid.middle
        parts = numpy.ascontiguousarray(numbers.astype(numpy.int8)), grid.scales[:, 0]
        stem, value = f"{name}{'_T' if transposed else ''}", group.weights[name, transposed]
        stored[name, transposed] = [
            _constant(graph, f"{stem}_{kind}", part) for kind, part in zip(("Q8", "scales"), parts, strict=True)
        ]
        found.add(value, sum(part.nbytes for part in parts))
        found.blocks[0] = found.blocks.get(0, 0) + numbers.size
        found.by_token += 1
    step = _constant(graph, "step_of_a_token", numpy.float32(1 / _STEPS))
    zero = _constant(graph, "zero_of_a_token", numpy.uint8(_MIDDLE))
    # by input: the integers with one scale per token, and the largest value of each token
    divided: dict[Any, tuple[ir.Value, ir.Value]] = {}
    for node, key in group.nodes:
        x, made = node.inputs[0], Nodes()
        if (node.graph, x) not in divided:
            smooth = x
            if not bool((channels == 1).all()):
                smooth = made.add("Mul", x, _constant(graph, f"{x.name}_channels", channels.reciprocal().numpy()))
            last = _constant(graph, "last_axis", numpy.array([-1], numpy.int64))
            most = made.add("ReduceMax", made.add("Abs", smooth), last, keepdims=1)
            positive = made.add("Max", most, _constant(graph, "least_of_a_token", numpy.float32(_LEAST)))
            whole = made.add("QuantizeLinear", made.add("Div", smooth, positive), step, zero)
            divided[node.graph, x] = whole, positive
        whole, largest = divided[node.graph, x]
        weights_in_8_bits, scales = stored[key]
        given = [whole, weights_in_8_bits, step, scales, zero]
        product = made.add("MatMulIntegerToFloat", *given, domain="com.microsoft", name=node.name)
        made.add("Mul", product, largest)
        replace_product(node, product, made)
    for (name, _), value in group.weights.items():
        if not value.uses() and name in graph.initializers:
            del graph.initializers[name]


def _channels(moments: torch.Tensor, sizes: list[torch.Tensor]) -> torch.Tensor:
    """Return a divisor for each input channel by which inputs are divided before they are quantized."""
    # sizes: largest weight of each channel in each matrix
    inputs, weights = moments.diagonal().sqrt(), torch.stack(sizes).amax(0)
    least = [one.max().clamp(min=1e-30) * 1e-5 for one in (inputs, weights)]
    logs = _ALPHA * inputs.clamp(min=least[0]).log() - (1 - _ALPHA) * weights.clamp(min=least[1]).log()
    return (logs - logs.mean()).exp()  # with geometric mean 1


def _constant(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    known = graph.initializers.get(name)
    found: ir.Value = new_value(graph, name, ir.tensor(array)) if known is None else known
    return found
