"""Trace a module to a program with named inputs and outputs, and record the state that the program writes to."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import enum
import functools
import io
import logging
import pathlib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind

from .. import errors
from ..core.effects import undisturbed
from ..core.private_names.of_torch import FakeTensor, FakeTensorMode, pytree
from ..diagnose.export_errors import explain_error
from ..diagnose.opaque import explain_leaf
from ..errors.failures import STEP, raised_as, without_records
from ..huggingface.cache_names import CACHE, is_cache
from ..huggingface.layer_weights import Reader, offloaded_readers, paused, streamed_readers
from ..registry.patches import AttributePatch
from ..registry.recipe.aliases import PyTree
from ..runners.ports import present_of
from ..trace.program import arguments_of, text_of
from ..trees.arguments import about_devices, on_other_devices
from ..trees.walk import key_name, node_of, output_names, torch_leaves
from .example import Axis, Example, check_all_read, narrowed, rows_of, swallowed_names, varying_axes
from .proof.eager_runs import Left, clone, draws_random_numbers, returning_left, written_state
from .stated_sizes import asserts_values, environment_of, sizes_by_input, traceable_forward, unasserted_sizes

logger = logging.getLogger("yobx_flatten")

RETURN_THE_CACHE = f"Return the cache as {CACHE!r}, or declare that no further call follows:\n    loop=False"


@dataclasses.dataclass(frozen=True)
class Traced:
    program: ExportedProgram
    input_names: list[str]  # names of the inputs of the graph, in order
    output_names: list[str]  # names of the outputs of the graph, in order
    complex_outputs: list[str]  # names of complex outputs, which files return as pairs of real numbers
    written: Sequence[str]  # buffers and parameters that the program writes to; the program has its own copies
    drawing: Sequence[str]  # operators that draw random numbers
    # functions that read the weights without data in the program, by name of the weight
    readers: Mapping[str, Reader] = dataclasses.field(default_factory=dict)
    left: Left | None = None  # changed arguments that the program returns in addition to the module's outputs
    kept: Mapping[str, int] = dataclasses.field(default_factory=dict)  # see `Signature.kept`
    # sizes that the trace fixed without an assertion, by input and axis: see `stated_sizes.unasserted_sizes`
    unasserted: Mapping[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    # sizes that the first trace did not assert, and that a second trace has fixed
    fixed: Mapping[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    # upper bounds that the model's code sets, and not the caller
    largest: Mapping[tuple[str, int], int] = dataclasses.field(default_factory=dict)
    # numbers, texts and enums among the inputs that are fixed in the program, as text by name
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # numbers, texts and enums among the outputs, by name
    constant_outputs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    # whether the program asserts equalities of numbers that depend on tensor values, which files cannot assert
    asserts_values: bool = False

    @property
    def presents(self) -> dict[str, str]:
        """For each cache input, by name: the name of the output that the next call gets as this input."""
        pairs = {name: present_of(name) for name in self.input_names}
        return {name: present for name, present in pairs.items() if present in self.output_names}

    def remarks(self) -> list[str]:
        found = [] if self.left is None else self.left.remarks()
        if self.written:
            found.append(
                f"forward writes to {', '.join(self.written)}: each call of the program updates the program's copy; "
                "the module is unchanged."
            )
        if self.constants:
            values = ", ".join(f"{name}={value}" for name, value in self.constants.items())
            verb = "is" if len(self.constants) == 1 else "are"
            found.append(f"{values} {verb} fixed in the program and the file: for another value, export again.")
        returned = [f"{name}={text_of(value)}" for name, value in self.constant_outputs.items() if value is not None]
        if returned:
            found.append(
                f"{', '.join(returned)} {'is a constant' if len(returned) == 1 else 'are constants'}: the program "
                "always returns the value of the example, and a file returns tensors only."
            )
        if self.drawing:
            drawn = f"the model draws random numbers ({', '.join(self.drawing)})"
            found.append(f"{drawn}: model and program were compared with one seed.")
        blocks = [node.args for node in self.program.graph.nodes if str(node.target) == "wrap_with_autocast"]
        for device, dtype in dict.fromkeys((device, dtype) for device, dtype, enabled, *_ in blocks if enabled):
            found.append(
                f"forward enters torch.autocast({str(device)!r}, {dtype}), whose rounding differs between kernels, and "
                "onnxruntime lacks kernels for bfloat16 on the CPU. If the export is refused, turn autocast off: "
                "torch.autocast(..., enabled=False)."
            )
        if self.fixed:
            sizes = [f"{name}.shape[{axis}] is fixed at {size}" for (name, axis), size in self.fixed.items()]
            found.append(f"{', '.join(sizes)}, since the model's code rounds a number computed from this size.")
        if self.largest:
            sizes = [f"{name}.shape[{axis}] is {size} at most" for (name, axis), size in self.largest.items()]
            found.append(
                f"{', '.join(sizes)}: for larger sizes, the model's code takes another branch. The program and its "
                "files refuse larger sizes."
            )
        if self.asserts_values:
            found.append(
                "the model's code refuses some inputs by their values. The program checks the values, but files of "
                "ONNX, OpenVINO and ExecuTorch do not: check them before the call."
            )
        if self.unasserted:
            sizes = [f"{name}.shape[{axis}] == {size}" for (name, axis), size in self.unasserted.items()]
            found.append(
                f"the program was traced for {', '.join(sizes)}, since the model's code rounds a number computed from "
                "it. For other sizes, results of the program differ from the model's. export_program fixes such sizes."
            )
        return found


def trace(example: Example, *, strict: bool = False) -> Traced:
    """Trace an example to a program, inside an open ``register_flattening_functions`` block."""
    program, left = _traced(example, strict)
    unasserted = unasserted_sizes(program, example.names)
    fixed: dict[Axis, int] = {}
    others = {place: size for place, size in unasserted.items() if place not in rows_of(example)}
    if others and others != unasserted:  # if these sizes are fixed, the batch size may still vary
        fewer = dataclasses.replace(example, shapes=narrowed(example, varying_axes(example) - others.keys()))
        program, left = _traced(fewer, strict, " with fixed sizes")
        if not unasserted_sizes(program, example.names):
            example, fixed, unasserted = fewer, others, {}
    if unasserted:  # a new trace asserts the sizes, which fixes them
        own = tuple((("==", "size", size), {"size": place}) for place, size in unasserted.items())
        stated = dataclasses.replace(example, relations=(*example.relations, *own))
        program, left = _traced(stated, strict, " with fixed sizes")
        fixed = unasserted
    if example.bounds is not None:
        example.bounds.check_program(example, program)
    return dataclasses.replace(described(program, example, left), fixed=fixed)


def _traced(example: Example, strict: bool, suffix: str = "") -> tuple[ExportedProgram, Left | None]:
    module = example.module
    logger.info("tracing %s%s", type(module).__qualname__, suffix, extra=STEP)
    swallowed = [] if example.shapes is None else swallowed_names(module, example.kwargs)
    with raised_as(functools.partial(_explain, example)):
        leaves = pytree.tree_leaves(example.inputs)
        forward = traceable_forward(module, example.kwargs, example.names, example.relations, swallowed)
        # a trace writes to tensors that are plain attributes, and stores symbols in attributes
        untouched, traceable = undisturbed(module=module), stand_ins(module, leaves)
        # a strict trace ignores forward hooks
        is_returned = example.loop and not strict
        left = returning_left(module, finds=True) if is_returned else contextlib.nullcontext()
        kept = contextlib.nullcontext() if example.shapes is None else kept_sizes(module)
        checked = errors.naming_untried_versions()
        with checked, torch.no_grad(), untouched, traceable, forward, kept, calm(), left as watch:
            args, kwargs = clone((example.args, dict(example.kwargs)))
            how: Any = {"strict": strict, "prefer_deferred_runtime_asserts_over_guards": True}
            program = torch.export.export(module, args, kwargs, dynamic_shapes=example.shapes, **how)
    write_single_values(program)
    check_all_read(module, swallowed, program, example.inputs)
    return program, None if watch is None else watch.left


def described(program: ExportedProgram, example: Example, left: Left | None = None) -> Traced:
    """Return a traced program with the names of its inputs and outputs."""
    module, signature = example.module, program.graph_signature
    # paths become relative to their package: a published file must not show the folders of its author
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            origin = node.meta.get("stack_trace")
            if isinstance(origin, str):
                files = r'(?<=File ")[^"]+(?=", line )'
                node.meta["stack_trace"] = re.sub(files, lambda path: _relative(path[0]), origin)
    for spec in program.call_spec:
        for cls, place, size in [] if spec is None else _sizes(spec):
            raise errors.StaticDataError(
                f"The static part (torch: context) of {cls} holds {size} at {place}, a size that varies in the trace: "
                "the program would always return the size of its example. Return the size among the children of "
                f"{cls}, as an int."
            )
    fill(program, offloaded_readers(module))
    written, drawing = written_state(program), draws_random_numbers(program)
    for name in written:  # a program shares its state with the module, and gets copies of what it writes to
        # a buffer with persistent=False is in `constants`
        held = program.state_dict if name in program.state_dict else program.constants
        copied = held[name].detach().clone()
        if isinstance(held[name], torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=held[name].requires_grad)
        held[name] = copied
    outputs = [spec.arg for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    traced = {node.name: node.meta.get("val") for node in program.graph.nodes}
    # fake tensors, symbols and constants
    values = [arg.value if isinstance(arg, ConstantArgument) else traced.get(arg.name) for arg in outputs]
    returned = pytree.tree_unflatten(values, program.call_spec.out_spec)
    every = output_names(returned, example.names)
    names, fixed_outputs = _in_graph(every, outputs)
    rows = zip(every, values, strict=True)
    complex_outputs = [name for name, value in rows if isinstance(value, torch.Tensor) and value.is_complex()]
    inputs, fixed_inputs = _in_graph(example.names, arguments_of(program))
    given = dict(zip(example.names, pytree.tree_leaves(example.inputs), strict=True))
    constants = {name: text_of(given[name]) for name, value in fixed_inputs.items() if value is not None}
    constants |= {name: text_of(value) for name, value in static_constants(example.inputs)}
    largest: dict[tuple[str, int], int] = {}
    if example.bounds is None:
        # upper bounds from the program's code, not from dynamic shapes, embeddings (a model itself refuses positions
        # that its table lacks) or buffers
        tables = [owner for owner in module.modules() if isinstance(owner, torch.nn.Embedding)]
        stated = {getattr(leaf, "max", None) for leaf in pytree.tree_leaves(example.shapes)}
        stated |= {table.num_embeddings for table in tables}
        stated |= {size for buffer in module.buffers() for size in buffer.shape}
        for axis, size in sizes_by_input(program, example.names).items():
            known = program.range_constraints.get(size.node.expr)
            most = None if known is None or not isinstance(known.upper, sympy.Integer) else int(known.upper)
            if most is not None and most < 2**31 and most not in stated:
                largest[axis] = most
    found: dict[str, Any] = {"constants": constants, "constant_outputs": fixed_outputs, "largest": largest}
    found |= {"unasserted": unasserted_sizes(program, example.names), "readers": streamed_readers(module)}
    found["asserts_values"] = asserts_values(program, example.names)
    return Traced(program, inputs, names, complex_outputs, written, drawing, left=left, **found)


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Hide torch's log of failed calls in a ``with`` block; this package reports failed calls as errors or notes."""
    unwanted = {
        "torch.fx.experimental.symbolic_shapes": "Unable to find user code corresponding to",
        "torch._subclasses.fake_tensor": "failed while attempting to run meta for",
    }
    graphs = contextlib.redirect_stderr(_WithoutGraphs(sys.stderr))
    with without_records(unwanted), graphs, warnings.catch_warnings():
        # torch's recurrent layers list their parameters in an attribute, which a trace replaces and restores
        of_recurrent_layers = r"The tensor attributes (self\.[\w.]*_flat_weights\[\d+\](, )?)+ were assigned"
        warnings.filterwarnings("ignore", of_recurrent_layers, UserWarning)
        yield


class _WithoutGraphs(io.TextIOBase):
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._dropped = stream, False

    def write(self, text: str) -> int:
        # `print` writes the end of the line in a separate call
        is_end = self._dropped and text == "\n"
        self._dropped = text.lstrip().startswith(("def forward(self", "class GraphModule("))  # a failed trace
        return len(text) if self._dropped or is_end else self._stream.write(text)

    def flush(self) -> None:
        if not self._stream.closed:  # Python 3.13 flushes objects that the garbage collector frees
            self._stream.flush()


def fill(program: ExportedProgram, readers: Mapping[str, Reader]) -> None:
    """Load the module's offloaded weights into a program."""
    read: dict[tuple[int, torch.Size], torch.nn.Parameter] = {}
    for name in program.state_dict.keys() & readers.keys():
        tensor = readers[name]()
        found = torch.nn.Parameter(tensor, requires_grad=False)
        program.state_dict[name] = read.setdefault((tensor.data_ptr(), tensor.shape), found)


def _explain(example: Example, error: BaseException) -> errors.FlattenError | None:
    module, inputs, message = example.module, example.inputs, str(error)
    if re.search(r"data-dependent expression|[Dd]ata-dependent branching|Dynamic control flow is not", message):
        text = explain_error(error, module).text.removesuffix(":")
        return errors.InvalidArgumentError(
            f"{type(module).__qualname__} cannot be traced. {text}:\n    torch.where(condition, a, b), "
            "torch.cond(condition, f, g, (x,)), torch._check(n > 3)"
        )
    if re.search(r"constant's list|functorch tensor|Expected Fake|no attribute 'constant'|for tensor subcl", message):
        return errors.InvalidArgumentError(f"{type(module).__qualname__} is not traced. {explain_error(error, module)}")
    if "Unsupported input type" in message:
        return explain_leaf(inputs, message)
    if "in output, which is not a known type" in message:
        with undisturbed(module=module):
            args, kwargs = clone(example.args), clone(dict(example.kwargs))
            return errors.NotRegisteredError(str(explain_error(error, module, args, kwargs)))
    if example.bounds is not None and "user-specified" in message:
        return errors.DynamicShapesError(
            f"{type(module).__qualname__} bounds a size itself, and bounds= contradicts it ({example.bounds}): "
            f"{' '.join(message.split())[:400]}"
        )
    if re.search("to be on the same device|not on the expected device|found two different devices", message):
        leaves = (item for name, value in inputs.items() for item in torch_leaves(value, name))
        tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
        for path, device, weights in on_other_devices(module, tensors):
            return errors.InvalidArgumentError(f"{about_devices(path, device, weights)}\n    {path}.to({weights!r})")
    return None


def _in_graph(names: Sequence[str], arguments: Sequence[Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the inputs (or outputs) that are not constants, and the values of the constants by name."""
    if len(names) != len(arguments):
        raise errors.FlattenError(
            f"The program has {len(arguments)} inputs or outputs, but {len(names)} names: {names}. Export it again."
        )
    rows = zip(names, arguments, strict=True)
    constants = {name: arg.value for name, arg in rows if isinstance(arg, ConstantArgument)}
    return [name for name in names if name not in constants], constants


@contextlib.contextmanager
def stand_ins(module: torch.nn.Module, leaves: Iterable[Any]) -> Iterator[None]:
    """Replace, in a ``with`` block, weights that a trace cannot use (such as meta tensors) by placeholders."""
    # leaves: leaves of the inputs; if they are on `meta`, weights on `meta` are not replaced
    devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]
    device = next((one for one in devices if one.type != "meta"), None if devices else torch.device("cpu"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[int, torch.Tensor | None] = {}  # by id, so that tied weights have the same placeholder
    tables: list[dict[str, Any]] = [held for owner in module.modules() for held in (owner._parameters, owner._buffers)]
    for held, name, tensor in ((table, key, one) for table in tables for key, one in table.items() if one is not None):
        if id(tensor) not in made:
            made[id(tensor)] = _stand_in(tensor, mode, device)
        if made[id(tensor)] is not None:
            found.append((held, name, tensor))
    for held, name, tensor in found:
        held[name] = made[id(tensor)]
    try:
        with paused(module) if any(tensor.is_meta for _, _, tensor in found) else contextlib.nullcontext():
            yield
    finally:
        for held, name, tensor in found:
            held[name] = tensor


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device | None) -> torch.Tensor | None:
    # device: the device of the inputs; `None` if the inputs are on `meta`
    learns, kind = tensor.requires_grad, type(tensor)
    # a torchao tensor of integers can be dequantized unless activations are quantized too
    wraps = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "tensor_data_names")
    rounds = ("activation_quantization", "act_quant_kwargs")
    if device is not None and tensor.is_meta and not isinstance(tensor, FakeTensor):
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    elif wraps and all(getattr(tensor, name, None) is None for name in rounds):
        made, learns = tensor.dequantize(), False
    elif learns and tensor.is_inference():
        made, learns = tensor.detach(), False
    else:
        return None
    return torch.nn.Parameter(made, requires_grad=learns) if isinstance(tensor, torch.nn.Parameter) else made


@functools.lru_cache(maxsize=4096)
def _relative(name: str) -> str:
    path = pathlib.Path(name)
    root = path.parent
    while (root / "__init__.py").is_file() and root.parent != root:
        root = root.parent
    return path.relative_to(root).as_posix()


class _OfSizes(type):
    """Metaclass of a replacement for ``int`` that returns a ``SymInt`` unchanged."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.SymInt):
            return args[0]
        return builtins.int(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, found: type) -> bool:
        return issubclass(found, builtins.int)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.int

    def __hash__(cls) -> builtins.int:
        return hash(builtins.int)


class _Int(builtins.int, metaclass=_OfSizes):
    pass


@contextlib.contextmanager
def kept_sizes(module: torch.nn.Module) -> Iterator[None]:
    """In a ``with`` block, make ``int(size)`` in the module's code return dynamic sizes unchanged."""
    # Python's `int` would return the size of the example, so the Python modules of the classes get their own `int`
    with contextlib.ExitStack() as stack:
        for name in sorted({type(owner).__module__ for owner in module.modules()}):
            found = vars(sys.modules.get(name, builtins))
            if name.startswith("torch.") or found.get("int", _Int) is not _Int:
                continue  # the Python module defines its own `int`
            patch = _PATCHES.setdefault(id(found), AttributePatch(found, "int", _Int))
            stack.enter_context(patch)
        yield


_PATCHES: dict[int, AttributePatch] = {}


def _sizes(spec: pytree.TreeSpec) -> Iterator[tuple[str, str, Any]]:
    if spec.type is not None and not spec.is_leaf():
        name = getattr(spec.type, "__qualname__", str(spec.type))
        for place, size in _within(spec.context, "static"):
            yield name, place, size
        for child in spec.children():
            yield from _sizes(child)


def _within(value: object, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _within(item, f"{place}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _within(item, f"{place}[{key!r}]")


def static_constants(tree: PyTree, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield numbers, strings and enums that are static data (not children) of registered objects in the inputs."""
    node = None if is_cache(tree) else node_of(tree)  # the static data of a cache is the configuration of its layers
    if node is None:
        return
    children = [key_name(key) for key in node.keys]
    if node.recipe is not None and not isinstance(tree, Mapping):
        for attribute, value in getattr(tree, "__dict__", {}).items():
            if attribute not in children and isinstance(value, (bool, int, float, str, enum.Enum)):
                yield f"{name}.{attribute}", value
    for below, child in zip(children, node.children, strict=True):
        yield from static_constants(child, f"{name}.{below}" if name else below)


# Write sizes with one possible value as numbers into a program.
#
#     torch.cat([key_0, keys])            asserts key_0.shape[1] == 2
#     scaled_dot_product_attention(...)   had s88 heads of keys, with 2 <= s88 <= 2; now it has 2
#
# `torch.export` narrows the range of such a symbol, but keeps the symbol. Translations to ONNX need the number: the
# translation of attention divides by the number of heads, and an LSTM has the hidden size as an attribute.


def write_single_values(program: ExportedProgram) -> None:
    single = {symbol: known.lower for symbol, known in program.range_constraints.items() if known.lower == known.upper}
    environment = environment_of(program) if single else None
    if environment is None:
        return
    # torch replaces such symbols itself, but not while it defers assertions
    environment.replacements.update({symbol: sympy.Integer(value) for symbol, value in single.items()})
    environment._update_version_counter()
    if hasattr(environment, "_replacements_version_counter"):  # since torch 2.13
        environment._replacements_version_counter += 1
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(_with_numbers, node.meta["val"])
    for symbol in single:
        del program.range_constraints[symbol]


def _with_numbers(value: PyTree) -> PyTree:
    if isinstance(value, torch.SymInt):
        return int(value.node.expr) if value.node.expr.is_Integer else value
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        return value  # a tensor inside torch.vmap is also returned here; such tensors accept no symbols
    sizes = (*value.shape, *value.stride())
    found = [_with_numbers(size) if isinstance(size, torch.SymInt) else size for size in sizes]
    if all(new is old for new, old in zip(found, sizes, strict=True)):
        return value
    return value.new_empty_strided(found[: value.ndim], found[value.ndim :])
