"""Write a program to an ONNX file under a hidden name, and rename it once it is proven."""

from __future__ import annotations

import contextlib
import copy
import logging
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputSpec

from ...errors import FlattenError, InvalidArgumentError, ReplayError
from ...errors.messages import first_line
from ...files.onnx_data import data_files_of
from ...files.scratch import data_path, move_in, publish_files, scratch_for
from ...huggingface.layer_weights import Reader
from ...private_names.of_torch import OpOverload
from ...runners.onnx_session import open_session
from ..program.decompositions import decompose_untranslated
from ..program.flat_program import flat_program
from .axes import name_axes
from .rewrite.attention import fuse_attention
from .rewrite.group_query_attention import share_cache
from .rewrite.heads import put_tokens_first
from .rewrite.last_scores import keep_last_scores
from .rewrite.optimize import optimize_graph
from .rewrite.projections import join_projections
from .rewrite.repair import repair_graph
from .rewrite.rotary import rotate_together
from .rewrite.skip_norm import fuse_skip_norms
from .rewrite.windows import slice_windows
from .rooms import open_rooms, quiet_about
from .weights import read_lazily, write_weights

if TYPE_CHECKING:
    import onnx_ir as ir

LARGE = 2**28
"""Bytes of weights from which on they are written to a second file, next to the model."""


def check_opset(opset_version: int | None) -> None:
    """Refuse a version of ONNX's operators that the installed onnxruntime does not run, before anything is traced."""
    # opset_version: the version; `None` for the exporter's own choice
    if opset_version is None:
        return
    import onnx
    import onnx.helper

    shape = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "probe", [shape], [result])
    versions = [onnx.helper.make_opsetid("", opset_version)]
    probe = onnx.helper.make_model(graph, opset_imports=versions, ir_version=10)
    try:
        open_session(probe.SerializeToString(), caller="export_onnx")
    except ReplayError as error:
        reason = (
            first_line(error.__cause__ or error).rstrip(".").rpartition(". ")[2]
        )  # the last sentence states how far
        raise InvalidArgumentError(
            f"opset_version={opset_version}: the installed onnxruntime does not run it, so nothing could be proven "
            f"({reason}). Take None for the exporter's own choice."
        ) from error


def check_translations(translations: Mapping[Any, Callable[..., Any]] | None) -> None:
    """Refuse translations that are not of operators."""
    # translations: functions by operator; `None` for none
    for operator, function in (translations or {}).items():
        if not isinstance(operator, OpOverload) or not callable(function):
            raise InvalidArgumentError(
                f"translations: expected functions by operator, found {function!r} for {operator!r}:\n"
                "    translations={torch.ops.mine.twice.default: twice}"
            )


def convert(
    program: ExportedProgram,
    input_names: Sequence[str],
    output_names: Sequence[str],
    opset_version: int | None,
    axes: Mapping[tuple[str, int], str] | None = None,
    *,
    fuse: bool = False,
    share: bool = False,
    by_torch: bool = False,
    readers: Mapping[str, Reader] | None = None,
    translations: Mapping[Any, Callable[..., Any]] | None = None,
    rooms: Mapping[str, str] | None = None,
) -> torch.onnx.ONNXProgram:
    """Convert a program."""
    # program: the program; its classes must be registered
    # opset_version: the opset of ONNX; `None` for the exporter's own choice
    # fuse: whether attention takes the cache itself, and is one operator where a model spells it out; not before opset
    # 23
    # by_torch: whether torch decomposes the program as a whole, and not the operators that need it alone
    # readers: what reads weights that have no data in the program, by name; none by default
    # translations: functions of onnxscript by operator of torch; none by default
    # rooms: matrices of adapters that become optional inputs, see `room.rooms_in`; none by default
    with _without_noise():
        converted = torch.onnx.export(
            program if by_torch else _decomposed_where_needed(program),
            opset_version=opset_version,
            dynamo=True,
            verbose=False,
            optimize=False,
            custom_translation_table=dict(translations or {}),
        )
    if converted is None:  # typed as optional, for the other exporter
        raise FlattenError("torch.onnx.export returned nothing.")
    found = converted.model.opset_imports.get("")
    if opset_version is not None and found != opset_version:
        raise InvalidArgumentError(
            f"opset_version={opset_version}: torch's exporter cannot write it for this model, and took {found}. Pass "
            f"opset_version={found}, or None for the exporter's own choice. No file was kept."
        )
    read_lazily(converted.model, readers or {})
    graph = converted.model.graph
    own = len(graph.inputs)
    open_rooms(converted.model, rooms or {})
    with quiet_about(rooms or {}):
        optimize_graph(converted.model)
    # after the passes, one of which makes an output of an input a value of its own
    for values, names in ((graph.inputs[:own], input_names), (graph.outputs, output_names)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    repair_graph(converted.model)
    slice_windows(graph)
    if fuse:
        fuse_attention(converted.model)
    if share:
        share_cache(converted.model)
        join_projections(converted.model)
        rotate_together(converted.model)
        fuse_skip_norms(converted.model)
    if fuse:
        put_tokens_first(converted.model)
    keep_last_scores(converted.model)
    name_axes(converted.model, axes, _example_sizes(program))
    return converted


def _example_sizes(program: ExportedProgram) -> dict[str, int]:
    """The size that each symbol of the inputs has in the example."""
    sizes: dict[str, int] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        dims: Sequence[int | torch.SymInt] = value.shape if isinstance(value, torch.Tensor) else ()
        sizes |= {str(dim): dim.node.hint for dim in dims if isinstance(dim, torch.SymInt) and dim.node.has_hint()}
    return sizes


def _decomposed_where_needed(program: ExportedProgram) -> ExportedProgram:
    """The program with a shorter way to its decompositions, which the exporter asks for."""
    if any(spec.arg.value is not None for spec in program.graph_signature.output_specs if _is_constant(spec)):
        program = flat_program(program)  # the exporter takes no numbers and texts among the outputs
    kind = type(program)

    class Shortened(kind):  # type: ignore[valid-type, misc] # the class that the hook gave the program
        def run_decompositions(self, decomp_table: dict[Any, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            found = None if decomp_table is None or args or kwargs else decompose_untranslated(self, decomp_table)
            return super().run_decompositions(decomp_table, *args, **kwargs) if found is None else found

    shortened = copy.copy(program)
    shortened.__class__ = Shortened
    return shortened


def _is_constant(spec: OutputSpec) -> bool:
    return isinstance(spec.arg, ConstantArgument)


class UnprovenFile:
    """A file in a hidden folder next to its final place."""

    def __init__(self, target: pathlib.Path, folder: pathlib.Path) -> None:
        self.target, self.folder = target, folder
        # other files refer to it, and it to its weights, by their final names
        self.path = folder / target.name

    def save(self, converted: torch.onnx.ONNXProgram) -> int:
        """Write the file; see :meth:`save_model`."""
        return self.save_model(converted.model)

    def save_model(self, model: ir.Model) -> int:
        """Write an ``onnx_ir.Model``; return the number of bytes written, with those of weights in a second file.

        A second file is written tensor by tensor from the memory of the module, and read where it lies; what is in the
        first goes through protobuf, which holds it twice.
        """
        import onnx_ir

        weights = model.graph.initializers.values()
        if sum(value.const_value.nbytes for value in weights if value.const_value is not None) < LARGE:
            onnx_ir.external_data.load_to_model(model)  # of a file whose weights were next to it
            onnx_ir.save(model, self.path)
        else:
            write_weights(model, data_path(self.path, self.target))
            onnx_ir.save(model, self.path)
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def replace_by(self, model: ir.Model) -> int:
        """Write another model in its place, whose weights may be those of the file; return the number of bytes."""
        old = [file for file in self.folder.iterdir() if file.is_file()]
        other = UnprovenFile(self.target, self.folder / "replacement")
        other.folder.mkdir()
        size = other.save_model(model)
        for file in old:
            file.unlink()
        move_in(other.folder, self.folder)
        other.folder.rmdir()
        return size

    def publish(self) -> None:
        """Give it its name, in place of a file of that name and of the weights next to that."""
        publish_files(self.folder, self.target, data_files_of(self.target) - data_files_of(self.path))

    def keep(self, folder: pathlib.Path) -> pathlib.Path:
        """Move it to a folder where it can be looked at; return the path."""
        move_in(self.folder, folder)
        return folder / self.path.name


@contextlib.contextmanager
def unproven_file(target: pathlib.Path) -> Iterator[UnprovenFile]:
    """Yield a file that is gone afterwards unless it was published or kept."""
    # target: the path it is to have. Its folder is made if it is not there.
    with scratch_for(target) as folder:
        yield UnprovenFile(target, folder)


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Keep messages off the terminal that are about the insides of torch, or that ours repeats; others come through."""
    # The ONNX exporter translates four operators of torchvision, and states of each that torchvision is not installed,
    # also for models that use none. What cannot be converted to an opset is one line of ours in place of a traceback.
    unwanted = {
        "torch.onnx._internal.exporter._registration": ("torchvision is not installed",),
        "torch.onnx._internal.exporter._compat": ("Setting ONNX exporter to use operator set version",),
        "onnxscript.version_converter": ("",),
    }

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(unwanted[record.name])

    logs = [logging.getLogger(name) for name in unwanted]
    for log in logs:
        log.addFilter(is_news)
    try:
        with warnings.catch_warnings():
            # torch 2.13 copies its own TreeSpec through its own deprecated LeafSpec; nothing of ours names that class
            warnings.filterwarnings("ignore", r".isinstance\(treespec, LeafSpec\). is deprecated", FutureWarning)
            yield
    finally:
        for log in logs:
            log.removeFilter(is_news)
