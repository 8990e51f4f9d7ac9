"""Compare two ONNX files node by node, in execution order, and find the first node whose output differs."""

# right file    MatMul ── Add ── Mul ── ...      both files return the values of their nodes as further outputs,
# other file    MatMul ── Add ── Mul ── ...      some values at a time, for the same inputs
#                          ^ the first node that differs; its weights and its operator are compared

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ...core.compare import compare
from ...core.files.document import damage_as, read_onnx
from ...errors import DamagedFileError
from ...runners.onnx_runner import OnnxRunner, row_by_row
from ...runners.onnx_session import open_session, session_options
from ...trace.onnx_repairs import ir

if TYPE_CHECKING:
    import onnx

_AT_A_TIME = 200
"""Number of intermediate values that one run of the ONNX file returns; all of them are in memory at once."""

_NOT_OF_MODEL = re.compile(r"(?:^|/)(?:torch|yobx_flatten)/")  # older files have absolute paths
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.+)')


@dataclasses.dataclass(frozen=True)
class NodeDifference:
    """The first node of an ONNX file whose output differs from the same node's output in a correct file."""

    node: str
    operator: str
    value: str  # name of the value
    index: tuple[int, ...]  # index of the element that differs most; empty if the shapes differ
    found: str  # the element in the file, or the shape
    expected: str  # the element in the correct file, or the shape
    source: str  # the line of the model's code; `""` if the file does not contain it
    causes: tuple[str, ...]  # differences of the node itself: its operator, its attributes, its weights
    others: tuple[str, ...]  # earlier nodes whose values could not be compared

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        lines = [
            f"the first node that differs is {self.node} ({self.operator}): {self.value}{at} is {self.found}, and "
            f"{self.expected} in the model."
        ]
        lines += [f"  of {self.source}"] * bool(self.source)
        lines += [f"  {cause}" for cause in self.causes]
        if self.others:
            lines.append(f"  values before this node that could not be compared: {', '.join(self.others)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Compared:
    values: int
    first: NodeDifference | None  # `None` if no node differs


def compare_nodes(path: pathlib.Path, right: pathlib.Path, inputs: Mapping[str, Any]) -> Compared:
    """Compare the node outputs of an ONNX file with the node outputs of a correct file, up to the first difference."""
    one, other = (_Values(file) for file in (path, right))
    names = [name for name in one.producers if name in other.producers]
    for start in range(0, len(names), _AT_A_TIME):
        chunk = names[start : start + _AT_A_TIME]
        found, expected = one.run(chunk, inputs), other.run(chunk, inputs)
        for count, name in enumerate(chunk, start + 1):
            difference = _difference(found[name], expected[name])
            if difference is None:
                continue
            node, same = one.producers[name], other.producers[name]
            # nodes on which the inputs depend, and whose outputs were not compared
            before, waiting, seen = [], list(node.input), set(names[:count])
            while waiting:
                read = waiting.pop()
                earlier = None if read in seen else one.producers.get(read)
                seen.add(read)
                if earlier is not None and earlier.op_type != "Constant":
                    before.append(earlier)
                    waiting += earlier.input
            nodes = [node, *before]
            causes = [cause for each in nodes for cause in _causes(each, other.producers.get(each.output[0]))]
            causes += _weights(one, other, [read for each in nodes for read in each.input])
            others = tuple(f"{each.name or each.output[0]} ({each.op_type})" for each in before)
            place = node.name or name, node.op_type, name
            first = NodeDifference(*place, *difference, _source(node) or _source(same), tuple(causes), others)
            return Compared(count, first)
    return Compared(len(names), None)


class _Values:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.model = read_onnx(path, failure=DamagedFileError)
        self.producers = {name: node for node in self.model.graph.node for name in node.output if name}

    def run(self, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
        import onnx
        import onnxruntime

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        known = {value.name for value in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
        options = session_options()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        entry = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(entry, str(self.path.parent.absolute()))
        session = open_session(model.SerializeToString(), caller="explain", options=options, failure=DamagedFileError)
        runner = OnnxRunner(session, self.path.name)
        given = {name: inputs[name] for name in runner.ports}
        if runner.refuses(given):  # several tokens in several rows: the first row alone is enough
            given = next(iter(row_by_row(given)))
        return runner.run(given)

    def initializers(self) -> dict[str, ir.TensorProtocol]:
        """Return the weights of the file by name; the data of a weight is read when the weight is used."""
        with damage_as(DamagedFileError, str(self.path)):
            held = ir.load(self.path).graph.initializers
        return {name: value.const_value for name, value in held.items() if value.const_value is not None}


def _difference(found: Any, expected: Any) -> tuple[tuple[int, ...], str, str] | None:
    """Return index and values of the largest difference of two tensors, or ``None`` if rounding explains it."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return None  # a text, which is an input
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (), f"{found.dtype} of shape {tuple(found.shape)}", f"{expected.dtype} of shape {tuple(expected.shape)}"
    if compare(expected, found, "kernels"):
        return None
    one, other = found.double(), expected.double()
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, (one - other).abs()).nan_to_num(torch.inf)
    index = tuple(int(part) for part in numpy.unravel_index(int(apart.argmax()), apart.shape))
    return index, f"{one[index]:.6g}", f"{other[index]:.6g}"


def _causes(node: onnx.NodeProto, same: onnx.NodeProto | None) -> Iterator[str]:
    if same is None:
        return
    if node.op_type != same.op_type:
        yield f"its operator is {node.op_type}; in the model it is {same.op_type}."
    elif list(node.input) != list(same.input):
        yield f"it reads {', '.join(node.input)}; in the model it reads {', '.join(same.input)}."
    texts = [{part.name: part.SerializeToString(deterministic=True) for part in one.attribute} for one in (node, same)]
    for name in sorted(texts[0].keys() | texts[1].keys()):
        if texts[0].get(name) != texts[1].get(name):
            yield f"its attribute {name} differs from the model's."


def _weights(one: _Values, other: _Values, names: Sequence[str]) -> Iterator[str]:
    mine, theirs = one.initializers(), other.initializers()
    for name in dict.fromkeys(names):
        if name not in mine or name not in theirs:
            continue
        pair = [torch.from_numpy(numpy.array(held[name].numpy(), numpy.float64)) for held in (mine, theirs)]
        if pair[0].shape != pair[1].shape:
            yield f"its weight {name} has shape {tuple(pair[0].shape)}, and {tuple(pair[1].shape)} in the model."
        elif not torch.equal(*pair):
            apart = (pair[0] - pair[1]).abs()
            index = tuple(int(part) for part in numpy.unravel_index(int(apart.argmax()), apart.shape))
            yield (
                f"its weight {name} differs from the model's in {int(apart.ne(0).sum())} of {apart.numel()} values: "
                f"[{', '.join(map(str, index))}] is {pair[0][index]:.6g}, and {pair[1][index]:.6g} in the model."
            )


def _source(node: onnx.NodeProto) -> str:
    """Return the line of the model's code that a node comes from, which ``torch.onnx.export`` stores in the file."""
    text = next((part.value for part in node.metadata_props if part.key == "pkg.torch.onnx.stack_trace"), "")
    frames = _FRAME.findall(text)
    own = [frame for frame in frames if not _NOT_OF_MODEL.search(frame[0])]
    if not own:
        return ""
    file, line, function, code = own[-1]
    scopes = next((part.value for part in node.metadata_props if part.key == "pkg.torch.onnx.name_scopes"), "")
    layers = [name for name in re.findall(r"'([^']*)'", scopes)[:-1] if name]
    layer = f"{layers[-1]}, " if layers else ""
    return f"{layer}{pathlib.PurePosixPath(file).name}, line {line}, in {function}: {code.strip()}"
