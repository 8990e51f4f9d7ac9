"""Wrap every ``torch.export`` call inside a block, and the programs that it returns.

* Dimensions that happen to be equal in the example stay apart (duck shapes off), and slices are made whole.
* Model libraries put their traceable versions in place (see :mod:`yobx_flatten.huggingface.tracing.support`).
* ``torch.onnx.export`` knows a few operators more (see :mod:`yobx_flatten.trace.onnx_operators`).
* A package of AOTInductor gets the strides that it was compiled for (see :mod:`yobx_flatten.trace.compiled_packages`).
* A program remembers which classes it takes and returns. Called where they are not registered it states it; torch alone
  ends in ``KeyError: <class ...>``. It also refuses what stands where the example had ``None``.

The replacements are active during the trace only, in the thread that traces; models that run eagerly inside a block
are not touched.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import NotRegisteredError
from ..private_names.of_torch import fx_config, pytree, spec_protocols
from ..recipe.aliases import DynamicShapes, PyTree
from ..registry.claims import REGISTRY
from ..registry.locking import LOCK
from ..registry.patches import AttributePatch, ImportedPatch
from .adapted_shapes import adapted_shapes
from .compiled_packages import called_contiguous, remembering_strides
from .dynamic_specs import refuse_specs_of_keys
from .ignored_inputs import refusal_of_ignored_inputs
from .integer_inputs import with_integers
from .nested_kwargs import check_nested_kwargs
from .onnx_operators import TRANSLATIONS, Translation, add_translation
from .onnx_registry import filled_registry, remembering_decompositions
from .stored_programs import importing_classes, remembering_expressions, remembering_hints
from .type_promotion import without_running

__all__ = ["EXPORT_HOOK", "ExportHook", "TraceSupport", "require_registered"]


class TraceSupport(Protocol):
    """What a model library needs while its models are traced, and while programs of them are loaded."""

    modules: str

    def acquire(self) -> None:
        """Put in place what programs of its models need wherever they are called: a block opens."""

    def release(self) -> None:
        """Put it back: a block closes."""

    def named_for(self, forward: Callable[..., Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return keyword arguments, or their dynamic shapes, under the names that a forward has for them."""

    def named_as(self, names: Collection[str], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call under the names that a program has for them."""

    def prepare(self, tree: PyTree) -> PyTree:
        """Return the example inputs as the trace should see them."""

    def traceable(self) -> contextlib.AbstractContextManager[None]:
        """Put the traceable versions in place."""

    def translations(self) -> Iterable[Translation]:
        """Return the translations to ONNX of the operators that the library defines."""


class ExportHook:
    """Wraps torch's export functions while at least one block is open."""

    def __init__(self) -> None:
        self._supports: list[TraceSupport | None] = []
        # these modules bring all of dynamo, or of onnxscript, along, which a block that only flattens does not need
        self._on_import = [
            ImportedPatch("torch.export._trace", self._trace_patch),
            ImportedPatch("torch.onnx._internal.exporter._registration", self._translations_patch),
            ImportedPatch(
                "torch.onnx._internal.exporter._decomp",
                _wrapping(None, "create_onnx_friendly_decomposition_table", remembering_decompositions),
            ),
            ImportedPatch(
                "torch.onnx._internal.fx.passes.type_promotion",
                _wrapping("_TypePromotionInterpreter", "run_node", without_running),
            ),
            ImportedPatch("torch._inductor.compile_fx", _wrapping(None, "_aoti_flatten_inputs", remembering_strides)),
            ImportedPatch(
                "torch.export.pt2_archive._package", _wrapping("AOTICompiledModel", "__call__", called_contiguous)
            ),
            ImportedPatch("torch._export.serde.serialize", _wrapping(None, "typing", remembering_hints)),
            ImportedPatch(
                "torch._export.serde.serialize",
                _wrapping("GraphModuleDeserializer", "_parse_sym_expr", remembering_expressions),
            ),
        ]
        self._on_program = AttributePatch(ExportedProgram, "__init__", _remembering(ExportedProgram.__init__))
        self._on_load = [
            AttributePatch(spec_protocols, number, protocol._replace(json_to_treespec=self._importing(protocol)))
            for number, protocol in spec_protocols.items()
        ]

    @property
    def supports(self) -> list[TraceSupport]:
        """What the model libraries of the open blocks need, each once."""
        with LOCK:
            return [support for support in dict.fromkeys(self._supports) if support is not None]

    @property
    def active(self) -> bool:
        """Whether exports are wrapped at present."""
        with LOCK:
            return bool(self._supports)

    def acquire(self, support: TraceSupport | None) -> None:
        """Open: exports from now on are wrapped, with ``support`` if given."""
        if support is not None:
            support.acquire()
        with LOCK:
            self._supports.append(support)
            if len(self._supports) > 1:
                return
            for patch in (self._on_program, *self._on_load):
                patch.acquire()
            _LOADER_LOG.addFilter(_is_sound)
        for imported in self._on_import:
            imported.acquire()

    def release(self, support: TraceSupport | None) -> None:
        """Close what :meth:`acquire` opened."""
        if support is not None:
            support.release()
        with LOCK:
            self._supports.remove(support)
            if self._supports:
                return
            for patch in (self._on_program, *self._on_load):
                patch.release()
            _LOADER_LOG.removeFilter(_is_sound)
            for imported in self._on_import:
                imported.release()

    def _trace_patch(self, module: ModuleType) -> AttributePatch | None:
        # a module that is being imported in this very thread has no functions yet, and no exports to wrap
        found = vars(module).get("_export")
        return None if found is None else AttributePatch(module, "_export", self._wrapped(found))

    def _translations_patch(self, module: ModuleType) -> AttributePatch | None:
        registry = vars(module).get("ONNXRegistry")
        if registry is None:
            return None
        original = vars(registry)["from_torchlib"]

        def from_torchlib(cls: Any, *args: Any, **kwargs: Any) -> Any:
            filled = filled_registry(original, cls, args, kwargs)
            for translation in self._translations():
                add_translation(filled, module, translation)
            return filled

        return AttributePatch(registry, "from_torchlib", classmethod(from_torchlib))

    def _translations(self) -> list[Translation]:
        return [*TRANSLATIONS, *(translation for support in self.supports for translation in support.translations())]

    def _importing(self, protocol: Any) -> Callable[..., Any]:
        """Read a stored tree spec; import the modules of the classes it names: libraries register them on import."""
        return importing_classes(protocol.json_to_treespec, lambda: {one.modules for one in self.supports})

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _export(
            mod: Callable[..., Any],
            args: Any,
            kwargs: Any = None,
            dynamic_shapes: DynamicShapes = None,
            *more: Any,
            **options: Any,
        ) -> Any:
            with LOCK:
                # someone who imported this function inside a block may call it when the block is long gone
                active, supports = bool(self._supports), [s for s in dict.fromkeys(self._supports) if s is not None]
            if not active:
                return original(mod, args, kwargs, dynamic_shapes, *more, **options)
            if isinstance(mod, torch.nn.Module):
                for support in supports:
                    kwargs = None if kwargs is None else support.named_for(mod.forward, kwargs)
                    if isinstance(dynamic_shapes, Mapping):
                        dynamic_shapes = support.named_for(mod.forward, dynamic_shapes)
                check_nested_kwargs(original, mod, kwargs, dynamic_shapes)
                refuse_specs_of_keys(mod, args, kwargs, dynamic_shapes, REGISTRY.recipe_in_force)
            dynamic_shapes = adapted_shapes(mod, args, kwargs, dynamic_shapes, REGISTRY.recipe_in_force)
            args, kwargs = _without_slices(args), _without_slices(kwargs)
            with contextlib.ExitStack() as stack:
                stack.enter_context(_duck_shapes_off())
                if dynamic_shapes is not None and _sizes_differ(args, kwargs):
                    stack.enter_context(_fake_tensor_cache_off())
                stack.enter_context(_PLAIN_ATTENTION)
                for support in supports:
                    args, kwargs = support.prepare(args), support.prepare(kwargs)
                    stack.enter_context(support.traceable())
                return _concise(original(mod, args, kwargs, dynamic_shapes, *more, **options))

        return _export


def _wrapping(
    owner: str | None, name: str, wrapped: Callable[[Any], Any]
) -> Callable[[ModuleType], AttributePatch | None]:
    """Make a patch of a function of a module, or of a class in it, where it is there."""

    def make(module: ModuleType) -> AttributePatch | None:
        target = module if owner is None else vars(module).get(owner)
        found = None if target is None else vars(target).get(name)
        return None if found is None else AttributePatch(target, name, wrapped(found))

    return make


def _without_slices(tree: PyTree) -> PyTree:
    """Example inputs whose tensors are not slices of larger ones.

    ``ids[:, 5:]`` has strides that nothing else has: the program would refuse all contiguous tensors ("Guard
    failed: input_ids.stride()[0] != input_ids.size()[1]"). Permuted tensors (channels last) keep their strides.
    """
    if not any(map(_is_slice, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda leaf: leaf.contiguous() if _is_slice(leaf) else leaf, tree)


class _PlainAttention:
    """Trace the attention with the strides of its plain kernel, those that every other kernel's callers may rely on.

    The attention stays one operator, but a ``contiguous`` after it is dropped where the CPU's fused kernel happens to
    return strides that make it needless. The ONNX exporter then cannot view the result ("Cannot view a tensor with
    shape", T5 and AFMoE in torch 2.13). The fused kernel also asks whether there is one row
    (https://github.com/pytorch/pytorch/issues/180202).

    torch keeps the choice of kernels for the process, not for a thread: the first trace makes it, and the last one puts
    back what was found. In a forked child the traces of other threads are over.
    """

    def __init__(self) -> None:
        self._holders: list[int] = []  # threads
        self._choice = contextlib.ExitStack()
        # torch 2.15 notes the choice in a context variable also, which must be put back in the context that set it:
        # one of our own, since the thread of the first trace is not always that of the last
        self._context = contextvars.Context()

    def __enter__(self) -> None:
        with LOCK:
            if not self._holders:
                self._context.run(self._choice.enter_context, sdpa_kernel(SDPBackend.MATH))
            self._holders.append(threading.get_ident())

    def __exit__(self, *exception: object) -> None:
        with LOCK:
            self._holders.remove(threading.get_ident())
            if not self._holders:
                self._context.run(self._choice.close)

    def forget_others(self) -> None:
        """End the traces of all other threads."""
        with LOCK:
            held = bool(self._holders)
            self._holders = [thread for thread in self._holders if thread == threading.get_ident()]
            if held and not self._holders:
                self._context.run(self._choice.close)


_PLAIN_ATTENTION = _PlainAttention()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_PLAIN_ATTENTION.forget_others)


def _is_slice(leaf: object) -> bool:
    """Return whether a tensor leaves out memory between its first and its last element (or expands one)."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.numel() == 0:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return span != leaf.numel()


_LOADER_LOG = logging.getLogger("torch._export.serde.serialize")


def _is_sound(record: logging.LogRecord) -> bool:
    """Leave out one record of torch 2.13 that has fewer arguments than its text needs.

    Loading a program whose example inputs hold a cache unpickles them and states it; Python then prints the traceback
    of the broken record to the terminal.
    """
    return not (str(record.msg).startswith("Fallback to weights_only=False") and len(record.args or ()) < 2)


@contextlib.contextmanager
def _duck_shapes_off() -> Iterator[None]:
    # a setting per thread (a ContextVar), so it is set in the thread that traces and not where the block is entered
    found = fx_config.use_duck_shape
    fx_config.use_duck_shape = False
    try:
        yield
    finally:
        fx_config.use_duck_shape = found


_FEW_TENSORS = 5  # of an encoder: tokens, a mask, positions, types


def _sizes_differ(*trees: Any) -> bool:
    """Return whether torch's cache of what operators return is a loss.

    It finds results again where layers have equal shapes (an encoder: without it, a trace takes 1.6 times as long).
    With keys and values each layer has its own sizes: few results are found, an entry costs more than its operator, and
    a decoder is traced in two thirds of the time without it.
    """
    return sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(trees)) > _FEW_TENSORS


@contextlib.contextmanager
def _fake_tensor_cache_off() -> Iterator[None]:
    # Also a setting per thread; imported here because it brings all of dynamo.
    from ..private_names.of_torch import dynamo_config

    found = dynamo_config.fake_tensor_cache_enabled
    dynamo_config.fake_tensor_cache_enabled = False
    try:
        yield
    finally:
        dynamo_config.fake_tensor_cache_enabled = found


class _RememberingProgram(ExportedProgram):
    """An ``ExportedProgram`` that explains itself when its classes are not registered."""

    def module(self, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        classes = _classes_of(self)
        require_registered(classes, "This program")  # torch reads its guards' paths off the inputs here, wrongly then
        module = super().module(*args, **kwargs)
        refuse = refusal_of_ignored_inputs(self)
        if refuse is not None:
            module.register_forward_pre_hook(refuse, prepend=True, with_kwargs=True)
        integers = with_integers(self)
        if integers is not None:
            module.register_forward_pre_hook(integers, prepend=True, with_kwargs=True)
        renamed = _renaming(self)
        if renamed is not None:
            module.register_forward_pre_hook(renamed, prepend=True, with_kwargs=True)
        if classes:
            module.register_forward_pre_hook(functools.partial(_require_before_call, classes), prepend=True)
        return module

    def run_decompositions(self, decomp_table: dict[Any, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        require_registered(_classes_of(self), "This program")
        attention = torch.ops.aten.scaled_dot_product_attention.default
        with contextlib.ExitStack() as stack:
            if self.range_constraints and len(self.graph_signature.user_inputs) > _FEW_TENSORS:
                stack.enter_context(_fake_tensor_cache_off())
            if decomp_table is not None and attention not in decomp_table:
                stack.enter_context(_PLAIN_ATTENTION)
            return _decomposed(super().run_decompositions(decomp_table, *args, **kwargs))


def _renaming(program: ExportedProgram) -> Callable[..., Any] | None:
    """Make a hook that gives a program its arguments under the names with which it was exported."""
    spec = program.call_spec.in_spec
    names = [] if spec is None else spec.children()[1].context
    supports = EXPORT_HOOK.supports
    if not names or not supports:
        return None

    def rename(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if kwargs.keys() == set(names):
            return None
        for support in supports:
            kwargs = support.named_as(names, kwargs)
        return args, kwargs

    return rename


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _own_specs(self)
        _remember(self)

    return __init__


def _own_specs(program: ExportedProgram) -> None:
    """Give a program static parts of its own: a list that the user appends to would change what it accepts.

    Recipes of ours hand out copies of lists; a flatten function of a user may not, and a configuration is an object.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():  # what cannot be copied, or compared, stays shared
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, about the class of its own leaves
        copied = copy.deepcopy(program._module_call_graph)
        if copied == program._module_call_graph:  # not so for a sentinel that is found by its identity
            program._module_call_graph = copied


def _remember(program: ExportedProgram) -> ExportedProgram:
    if type(program) is ExportedProgram:
        program.__class__ = _RememberingProgram
    return program


def _concise(program: ExportedProgram) -> ExportedProgram:
    # imported here because it brings sympy, as the first export itself does: half a second
    from .needless_assertions import without_needless_assertions

    return without_needless_assertions(program)


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    return _remember(_concise(program))


def _classes_of(program: ExportedProgram) -> tuple[type, ...]:
    """The classes in a program's inputs and outputs that are ours to explain."""
    found: dict[type, None] = {}
    specs = [spec for spec in program.call_spec if spec is not None]
    while specs:
        spec = specs.pop()
        if spec.type is not None and REGISTRY.remedy(spec.type) is not None:
            found[spec.type] = None
        specs.extend(spec.children())
    return tuple(found)


def _require_before_call(classes: tuple[type, ...], module: torch.nn.Module, args: Any) -> None:
    require_registered(classes, "This program")


def require_registered(classes: tuple[type, ...], subject: str) -> None:
    """Say which classes are not registered, and the line that registers them."""
    missing = [cls for cls in classes if cls not in pytree.SUPPORTED_NODES]
    if missing:
        names = ", ".join(cls.__qualname__ for cls in missing)
        raise NotRegisteredError(
            f"{subject} takes or returns {names}, which torch does not know how to flatten here. Call it where the "
            f"class is registered:\n    {REGISTRY.remedy(missing[0])}"
        )


EXPORT_HOOK = ExportHook()
