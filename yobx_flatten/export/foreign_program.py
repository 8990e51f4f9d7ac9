"""Check a program that other code traced against its module.

.. code-block:: text

    transformers' exporters, torch.export, ...  --> program --> replay --> ExportedModel --> every runtime
                     inside the block
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch.export import ExportedProgram

from ..declare.scopes import options_in_use, register_flattening_functions
from ..diagnose.spec_diff import compare_specs
from ..errors import InvalidArgumentError, SpecMismatchError, describe_class
from ..huggingface.cache_names import name_in
from ..private_names.of_torch import pytree
from ..trace.program_inputs import with_members
from ..trees.arguments import check_arguments, has_no_data
from ..trees.shapes import dynamic_shapes
from .example.example import Example, sizes_of
from .exported_model import ExportedModel, finish
from .program.one_value import write_single_values
from .program.traced import described
from .proof.case import Case, Proof, clone
from .proof.fitting import shapes_taken
from .source import Asked, noted, prove


def prove_program(
    program: ExportedProgram,
    module: torch.nn.Module,
    *,
    cases: Iterable[Case] | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    proof: Proof = "auto",
) -> ExportedModel:
    """Check a program that other code exported against its module; return the same as ``export_program``.

    ``torch.export.export`` or ``transformers.exporters`` (whose result has it in ``.program``) have to make it inside
    ``register_flattening_functions``, where every cache has this package's registration.

    Args:
        program: what ``torch.export.export`` returned. Its example is the first case. Buffers that it writes to are
            replaced in it by copies, so that the module's stay as they are.
        module: the module that it was exported from, in the mode (``eval()``) of the export.
        cases: what to replay in addition; by default, for a transformers model, the cases of
            :func:`~yobx_flatten.export_program` whose sizes the program has not fixed. The report names the others.
        steps: number of calls per case, 3 by default; after the first, each gets the cache that the call before
            returned. A program of fixed sizes is called once.
        tolerance: see :func:`~yobx_flatten.export_program`; by default 1e-4, and for weights in half precision what the
            type costs.
        proof: what is replayed, see :func:`~yobx_flatten.export_program`; ``"auto"`` by default.

    Returns:
        The program with a report. Its ``to_onnx``, ``to_openvino``, ``to_executorch`` and ``to_aotinductor`` write the
        files of runtimes from it, as it is.

    Raises:
        InvalidArgumentError: when it is not a program, or has no example inputs.
        SpecMismatchError: when it was made under another registration.
        StaticDataError: when a size of the trace is part of an output's static data.
        ReplayError: when a case fails or differs by more than ``tolerance``; ``error.report`` holds all of them.

    >>> linear = torch.nn.Linear(3, 2)
    >>> rows = {0: torch.export.Dim.AUTO}
    >>> program = torch.export.export(linear, (), {"input": torch.zeros(4, 3)}, dynamic_shapes={"input": rows})
    >>> checked = prove_program(program, linear, cases=[Case("9 rows", (), {"input": torch.ones(9, 3)})])
    >>> [(result.case, result.differences) for result in checked.report.cases]
    [('the example', {'output': 0.0}), ('9 rows', {'output': 0.0})]
    """
    if not isinstance(program, ExportedProgram):
        raise InvalidArgumentError(
            f"prove_program: expected a torch.export.ExportedProgram, found {describe_class(program)}. The result of "
            "transformers' DynamoExporter contains one:\n    prove_program(exported.program, model)"
        )
    asked = Asked.of(module, cases, steps, tolerance, proof)
    report = asked.report()
    with register_flattening_functions(**options_in_use()):
        example = _example_of(program, module)
        write_single_values(program)
        traced = described(program, example)
        noted(example, traced, report)
        if example.shapes is None:
            asked = dataclasses.replace(asked, steps=1)
        source = prove(example, traced, asked, report, only_fitting=True)
        return finish(dataclasses.replace(source, is_given=True), report)


def _example_of(program: ExportedProgram, module: torch.nn.Module) -> Example:
    """The example that a program was made from. The block must be open."""
    if program.example_inputs is None:
        raise InvalidArgumentError(
            "This program has no example inputs, so there is nothing to compare. Export it again inside the block:\n"
            "    program = torch.export.export(module, args, kwargs, dynamic_shapes=...)"
        )
    args, kwargs = program.example_inputs
    check_arguments(module, args, kwargs)
    differences = compare_specs(program, (args, kwargs), names=("program", "here"))
    if differences:
        found = "\n".join(map(str, differences))
        raise SpecMismatchError(
            "This program was exported while its inputs were registered differently:\n"
            f"{found}\n"
            "Export it inside the block:\n"
            "    with register_flattening_functions(patch_transformers=True):\n"
            "        exported = DynamoExporter().export(model, inputs, config)"
        )
    args, kwargs = with_members(args, kwargs, getattr(program, "enum_members", {}))
    no_data = has_no_data(module, pytree.tree_leaves((args, kwargs)), {})
    if not no_data:
        # a program keeps the counter of all layers of a cache as one tensor; rebuilt, each layer has its own number
        args, kwargs = clone((args, kwargs))
    why_not, remarks = sizes_of(module, args, kwargs)
    varies = any(any(type(size) is not int for size in shape) for shape in shapes_taken(program))
    shapes = dynamic_shapes(kwargs) if varies else None
    cache_is = name_in(kwargs) or ""
    return Example(module, args, kwargs, shapes, {}, cache_is, no_data, no_data or why_not, tuple(remarks))
