"""Make ``torch.export`` trace more models inside the ``with`` block of ``register_flattening_functions``.

Replaced functions are active only in a thread that runs a trace; eager models inside the block are unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ..core.private_names.of_torch import fx_config, operator_names, operators_with_kernel, pytree, spec_protocols
from ..errors import InvalidArgumentError
from ..errors.failures import result_or
from ..registry.patches import LOCK, AttributePatch, ImportedPatch, TracePatch, tracing_here
from ..registry.recipe.aliases import DynamicShapes, PyTree
from . import program as programs
from .adapted_shapes import adapted_shapes, refuse_specs_of_keys
from .onnx_repairs import REPAIRS, attention, op
from .trace_settings import OPEN, PLAIN_ATTENTION, TraceSupport, Translation, fake_tensor_cache_off, open_supports


def with_zeros_at_padding(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(
        self: torch.nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        first: Any = self.layers[0]
        if (
            src_key_padding_mask is None
            or mask is not None
            # without the fast path of eager mode, which computes no outputs at padding
            or not torch.backends.mha.get_fastpath_enabled()
            or not getattr(self, "use_nested_tensor", False)
            or not getattr(self, "mask_check", True)
            or not first.self_attn.batch_first
            or first.training
            or src.dim() != 3
            or torch.is_autocast_enabled()
        ):
            return original(self, src, mask, src_key_padding_mask, is_causal)
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=src_key_padding_mask)
        padded = src_key_padding_mask.ne(0)
        # padding is dropped only if it is on the right in every row
        follows = (padded[:, :-1] & ~padded[:, 1:]).any()
        output = torch.where((padded & ~follows).unsqueeze(-1), 0.0, output)
        return output if self.norm is None else self.norm(output)

    return forward


def without_running(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_TypePromotionInterpreter.run_node``, so that nodes with an output stored by the trace are not run."""
    from ..core.private_names.of_torch import type_promotion_rule

    @functools.wraps(original)
    def run_node(self: Any, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or "val" not in n.meta:
            return original(self, n)
        rule = type_promotion_rule(n, self.type_promotion_table)
        if rule:
            with self._set_current_node(n):
                self._maybe_promote_node(n, rule)
        return n.meta["val"]

    return run_node


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_TRANSLATIONS = (
    *(Translation(operator, function) for operator, function in REPAIRS.items()),
    # torch's exporter refuses one key head without `enable_gqa` (Falcon) and tensors without four axes, and translates
    # fully masked queries wrongly
    Translation(_ATTENTION, attention),
    Translation(_ATTENTION, functools.partial(attention, in_one=True), opset=23),
    Translation(
        torch.ops.aten.unsqueeze.default,
        # the last axis holds real and imaginary part, so an axis counted from the end moves by one (rotary embeddings
        # of Llama 4 and DeepSeek V2)
        lambda x, dim: op.Unsqueeze(x, op.Constant(value_ints=[dim if dim >= 0 else dim - 1])),
        is_complex=True,
    ),
)
"""Translations to ONNX of operators for which torch's exporter has no translation, or a wrong translation."""


# The ONNX exporter's tables, read once per process instead of at each conversion: request -> (sources, table).
_TABLES: dict[Any, tuple[Any, Any]] = {}


def _remembered(request: Any, sources: Callable[[], Any], read: Callable[[], Any]) -> Any:
    """Return a cached table of torch's ONNX exporter; read it again if the values that it depends on have changed."""
    with LOCK:
        read_from, table = _TABLES.get(request, (None, None))
    if read_from != sources():
        table = read()
        with LOCK:
            _TABLES[request] = sources(), table  # reading a table imports more sources
    return table


def filled_registry(read: classmethod[Any, Any, Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a copy of torch's ``ONNXRegistry`` with all of its translations, to which the caller may add more."""
    # read: the original classmethod `from_torchlib`

    def sources() -> tuple[Any, ...]:
        registration = sys.modules.get("onnxscript.function_libs.torch_lib.registration")
        functions = getattr(registration, "default_registry", {}).items()
        return operator_names(), [(name, *entry.overloads, *entry.complex) for name, entry in functions]

    request = read, cls, args, tuple(sorted(kwargs.items()))
    table = _remembered(request, sources, functools.partial(read.__get__(None, cls), *args, **kwargs))
    own = copy.copy(table)
    own.functions = {operator: list(entries) for operator, entries in table.functions.items()}
    return own


def remembering_decompositions(original: Callable[[Any], dict[Any, Any]]) -> Callable[[Any], dict[Any, Any]]:
    """Wrap ``create_onnx_friendly_decomposition_table``, so that a table is cached for each set of operators."""

    @functools.wraps(original)
    def create(onnx_registered_ops: Iterable[Any]) -> dict[Any, Any]:
        from ..core.private_names.of_torch import decompositions

        def sources() -> tuple[Any, ...]:
            return operator_names(), operators_with_kernel("CompositeImplicitAutograd"), list(decompositions.items())

        request = original, frozenset(onnx_registered_ops)
        return dict(_remembered(request, sources, functools.partial(original, onnx_registered_ops)))

    return create


class ExportHook:
    def __init__(self) -> None:
        # these modules import all of dynamo or onnxscript, which a block that only flattens does not need
        onnx, loader = "torch.onnx._internal", "torch._export.serde.serialize"
        wrapped: list[tuple[str, str | None, str, Callable[[Any], Any]]] = [
            ("torch.export._trace", None, "_export", self._wrapped),
            (f"{onnx}.exporter._decomp", None, "create_onnx_friendly_decomposition_table", remembering_decompositions),
            (f"{onnx}.fx.passes.type_promotion", "_TypePromotionInterpreter", "run_node", without_running),
            ("torch._inductor.compile_fx", None, "_aoti_flatten_inputs", programs.remembering_strides),
            ("torch.export.pt2_archive._package", "AOTICompiledModel", "__call__", programs.called_contiguous),
            (loader, None, "typing", programs.remembering_hints),
            (loader, "GraphModuleDeserializer", "_parse_sym_expr", programs.remembering_expressions),
        ]
        self._on_import = [ImportedPatch(module, _wrapping(owner, name, make)) for module, owner, name, make in wrapped]
        self._on_import.append(ImportedPatch(f"{onnx}.exporter._registration", self._translations_patch))
        self._at_once: list[AttributePatch | TracePatch] = [
            AttributePatch(ExportedProgram, "__init__", programs.remembering(ExportedProgram.__init__)),
            TracePatch(torch.nn.TransformerEncoder, "forward", with_zeros_at_padding),
        ]
        for number, protocol in spec_protocols.items():
            reader = programs.importing_classes(
                protocol.json_to_treespec, lambda: {one.modules for one in open_supports()}
            )
            self._at_once.append(AttributePatch(spec_protocols, number, protocol._replace(json_to_treespec=reader)))

    @property
    def active(self) -> bool:
        with LOCK:
            return bool(OPEN)

    def acquire(self, support: TraceSupport | None) -> None:
        if support is not None:
            support.acquire()
        with LOCK:
            OPEN.append(support)
            if len(OPEN) > 1:
                return
            for patch in self._at_once:
                patch.acquire()
            _LOADER_LOG.addFilter(_is_sound)
        for imported in self._on_import:
            imported.acquire()

    def release(self, support: TraceSupport | None) -> None:
        if support is not None:
            support.release()
        with LOCK:
            OPEN.remove(support)
            if OPEN:
                return
            for patch in self._at_once:
                patch.release()
            _LOADER_LOG.removeFilter(_is_sound)
            for imported in self._on_import:
                imported.release()

    def _translations_patch(self, module: ModuleType) -> AttributePatch | None:
        registry = vars(module).get("ONNXRegistry")
        if registry is None:
            return None
        original = vars(registry)["from_torchlib"]

        def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
            filled = filled_registry(original, cls, args, kwargs)
            for translation in itertools.chain(_TRANSLATIONS, *(one.translations() for one in open_supports())):
                if filled.opset_version >= translation.opset:
                    # used before others of the same operator; `register_op` would print on the terminal that a plain
                    # function has no ONNX signature
                    entry = module.OnnxDecompMeta(
                        onnx_function=translation.function,
                        fx_target=translation.operator,
                        signature=None,
                        is_custom=True,
                        is_complex=translation.is_complex,
                        skip_signature_inference=True,
                    )
                    filled._register(translation.operator, entry)
            return filled

        return AttributePatch(registry, "from_torchlib", classmethod(from_torchlib))

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _export(
            mod: Any, args: Any, kwargs: Any = None, dynamic_shapes: DynamicShapes = None, *more: Any, **options: Any
        ) -> Any:
            with LOCK:
                # code that imported this function inside a block may call it after the block
                active, supports = bool(OPEN), open_supports()
            if not active:
                return original(mod, args, kwargs, dynamic_shapes, *more, **options)
            if isinstance(mod, torch.nn.Module):
                for support in supports:
                    kwargs = None if kwargs is None else support.named_for(mod.forward, kwargs)
                    if isinstance(dynamic_shapes, Mapping):
                        dynamic_shapes = support.named_for(mod.forward, dynamic_shapes)
                check_nested_kwargs(original, mod, kwargs, dynamic_shapes)
                refuse_specs_of_keys(mod, args, kwargs, dynamic_shapes)
            args, kwargs, members = programs.enums_as_texts(args, kwargs)
            dynamic_shapes = adapted_shapes(mod, args, kwargs, dynamic_shapes)
            args, kwargs = _with_own_memory((args, kwargs))
            with contextlib.ExitStack() as stack:
                stack.enter_context(tracing_here())
                # per thread, so set in the tracing thread: sizes that are equal only in the example stay independent
                stack.enter_context(fx_config.patch(use_duck_shape=False))
                tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                stack.enter_context(fake_tensor_cache_off(len(tensors), is_dynamic=dynamic_shapes is not None))
                stack.enter_context(PLAIN_ATTENTION)
                if isinstance(mod, torch.nn.Module):
                    stack.enter_context(programs.members_in_forward(mod, list(kwargs or {}), members))
                for support in supports:
                    args, kwargs = support.prepare(args), support.prepare(kwargs)
                    stack.enter_context(support.traceable())
                program: Any = original(mod, args, kwargs, dynamic_shapes, *more, **options)
                program = programs.without_needless_assertions(program)
                program.enum_members = members  # in this process only: a stored program contains their texts
                return program

        return _export


def _wrapping(
    owner: str | None, name: str, wrapped: Callable[[Any], Any]
) -> Callable[[ModuleType], AttributePatch | None]:
    def make(module: ModuleType) -> AttributePatch | None:
        # a module that this thread is importing has no functions to wrap yet
        target = module if owner is None else vars(module).get(owner)
        found = None if target is None else vars(target).get(name)
        return None if found is None else AttributePatch(target, name, wrapped(found))

    return make


def _with_own_memory(tree: PyTree) -> PyTree:
    """Return example inputs in which slices, and tensors that are passed twice, are copied."""
    # A program traced with a slice such as `ids[:, 5:]` refuses contiguous tensors ("Guard failed:
    # input_ids.stride()[0] != input_ids.size()[1]"). Permuted tensors (channels last) keep their strides. If a tensor
    # is passed twice, torch makes one input of it, and the program would read this input for both arguments.
    leaves, spec = pytree.tree_flatten(tree)
    made = []
    for place, leaf in enumerate(leaves):
        own = leaf
        if isinstance(leaf, Tensor) and any(leaf is one for one in leaves[:place]):
            own = leaf.clone()
        if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.numel():
            span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
            if span != leaf.numel():  # the memory has gaps between the elements, or the tensor is expanded
                own = leaf.contiguous()
        made.append(own)
    return tree if all(a is b for a, b in zip(made, leaves, strict=True)) else pytree.tree_unflatten(made, spec)


_LOADER_LOG = logging.getLogger("torch._export.serde.serialize")


def _is_sound(record: logging.LogRecord) -> bool:
    # torch 2.13 logs this text with too few arguments when a program whose example inputs contain a cache is loaded;
    # Python then prints the traceback of the broken record to the terminal.
    return not (str(record.msg).startswith("Fallback to weights_only=False") and len(record.args or ()) < 2)


EXPORT_HOOK = ExportHook()


def check_nested_kwargs(
    export: Callable[..., Any], module: torch.nn.Module, kwargs: Mapping[str, Any] | None, shapes: DynamicShapes
) -> None:
    """Refuse nested values in ``**kwargs`` if torch would export a program that raises ``NameError`` at every call."""
    # without dynamic shapes the program has no guard that raises the error
    parameters = inspect.signature(module.forward).parameters
    if shapes is None or not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    more = [(name, value) for name, value in (kwargs or {}).items() if name not in parameters]
    inner = {name: [one for one in pytree.tree_leaves(value) if one is not value] for name, value in more}
    nested = [name for name, leaves in inner.items() if any(isinstance(leaf, Tensor) for leaf in leaves)]
    if nested and _has_defect(export):
        names = ", ".join(nested)
        raise InvalidArgumentError(
            f"{type(module).__qualname__}.forward accepts {names} in its **kwargs. For nested values in **kwargs "
            f"with dynamic sizes, torch {torch.__version__} exports a program that fails with NameError: name 'L' is "
            f"not defined. Name {names} in the signature, or use export_program:\n"
            f"    def forward(self, x, *, {names}, **kwargs):\n    export_program(module, args, kwargs)"
        )


class _Smallest(torch.nn.Module):
    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        added: torch.Tensor = kwargs["extra"]["a"]
        return x + added


@functools.cache
def _has_defect(export: Callable[..., Any]) -> bool:
    """Return whether a small module with nested values in ``**kwargs``, exported by torch, raises ``NameError``."""
    x, kwargs = torch.ones(3, 2), {"extra": {"a": torch.ones(3, 2)}}
    shapes = {"x": {0: Dim.AUTO}, "extra": {"a": {0: Dim.AUTO}}}
    # earlier versions refuse the shapes
    traced = functools.partial(export, _Smallest(), (x,), kwargs, shapes, strict=False, pre_dispatch=True)
    program = result_or(traced, lambda error: None)
    if program is None:
        return False
    try:
        program.module()(x, **kwargs)
    except NameError:
        return True
    return False
