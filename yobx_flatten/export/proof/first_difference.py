"""Find the first node of a file whose value differs from the program's.

.. code-block:: text

    program, node by node:   linear ── mul ── add ── relu      values by name
    file, all at once:       linear ── mul ── add ── relu      the same names, as further outputs
                                        ^ the first that differs
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ...core.compare import largest_difference
from ...errors import FlattenError
from ...errors.messages import first_line
from ...private_names.of_torch import pytree
from ...runners.onnx_runner import OnnxRunner
from ...runners.onnx_session import open_session
from .case import Case, clone

_LARGEST = 2**28
"""Bytes of a file above which its values are not looked at: all of them are in memory at once."""


def first_difference(
    path: pathlib.Path, program: ExportedProgram, case: Case, inputs: Sequence[str], tolerance: float
) -> list[str]:
    """Return a note on the first value of a file that differs from its program's; none where none is found."""
    # inputs: names of all leaves of the inputs, in order
    if path.stat().st_size > _LARGEST or any(path.parent.glob("*.data")):
        return []
    leaves = pytree.tree_leaves((case.args, dict(case.kwargs)))
    try:
        with torch.no_grad():
            expected = _Values(program).of(clone(leaves))
        found = _values_of_file(path, expected, dict(zip(inputs, leaves, strict=True)))
    except (FlattenError, RuntimeError, ValueError, KeyError) as error:
        return [f"the values inside the file were not compared: {first_line(error)}"]
    for node in program.graph.nodes:
        value = expected.get(node.name)  # the node of the outputs has none, and a name that an output may have
        if node.name not in found or not isinstance(value, torch.Tensor):
            continue
        if value.shape != found[node.name].shape:
            return [f"the first value that differs is {_described(node)}: another shape."]
        difference = largest_difference(value, found[node.name].to(value.dtype))
        size = float(value.double().abs().max()) if value.numel() and not value.is_complex() else 1.0
        if difference > tolerance * max(1.0, size):
            return [f"the first value that differs is {_described(node)}: by {difference:.1e}."]
    return []


class _Values(torch.fx.Interpreter):
    """Runs a program and keeps the value of every node."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self._program = program
        self._found: dict[str, Any] = {}

    def of(self, leaves: list[Any]) -> dict[str, Any]:
        """Return the values by name of the node."""
        held = {**self._program.constants, **self._program.state_dict}
        given = iter(leaves)
        specs = self._program.graph_signature.input_specs
        arguments = [next(given) if spec.kind is InputKind.USER_INPUT else held[spec.target or ""] for spec in specs]
        self.run(*arguments, enable_io_processing=False)
        return self._found

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self._found[n.name] = result
        return result


def _values_of_file(path: pathlib.Path, wanted: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a file whose values are outputs as far as they have the name of a node."""
    import onnx

    model = onnx.load(path)
    outputs = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name in wanted and name not in outputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(model.SerializeToString(), caller="export_onnx")
    return OnnxRunner(session, path.name).run(inputs)


def _described(node: torch.fx.Node) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    where = f", of {lines[-1]}" if lines else ""
    return f"{node.name!r} ({node.target}{where})"
