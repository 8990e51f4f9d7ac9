"""Private names of torch. torch modules that import dynamo, sympy or inductor are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import GetAttrKey, KeyEntry, MappingKey, SequenceKey, is_namedtuple_class

from . import Private, lookup_in

if TYPE_CHECKING:
    from torch._C import DispatchKey
    from torch._dispatch.python import enable_python_dispatcher
    from torch._export.utils import _check_valid_to_preserve as check_valid_to_preserve
    from torch._export.utils import _is_cia_op as is_composite
    from torch._higher_order_ops.scan import scan
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake, unset_fake_temporarily
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.export.dynamic_shapes import _combine_args as combine_args
    from torch.export.dynamic_shapes import _DimHint as DimHint
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from torch.utils._python_dispatch import _pop_mode as pop_mode
    from torch.utils._python_dispatch import _push_mode as push_mode
    from torch.utils._sympy.functions import FloorDiv, Max, Min

    # modules and tables without types for mypy
    decompositions: Any
    dynamo_config: Any
    fx_config: Any
    type_promotion_rule: Any

# -- the pytree ------------------------------------------------------------------------------------------------------
# A replacement is torch.utils.pytree, torch's public module; since 2.13 it has functions, but no tables.

NODE_REGISTRY_LOCK = pytree._NODE_REGISTRY_LOCK
get_node_type = pytree._get_node_type
dict_flatten_with_keys = pytree._dict_flatten_with_keys
register_python_node = pytree._private_register_pytree_node
serialised_node = pytree._SerializeNodeDef
# version of the format -> how specs of programs are stored and read
spec_protocols = pytree._SUPPORTED_PROTOCOLS


def cxx_pytree_exists() -> bool:
    return bool(pytree._cxx_pytree_exists)  # needs optree


def cxx_pytree_is_imported() -> bool:
    return bool(pytree._cxx_pytree_imported)


def cxx_pytree_pending() -> list[Any]:
    return pytree._cxx_pytree_pending_imports  # registrations that wait for the import of the C++ pytree


# -- tensors and modes that see each operator ------------------------------------------------------------------------
# torch.overrides and torch.utils._python_dispatch have the modes; a wrapper subclass has no public constructor.

DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
TensorBase = torch._C.TensorBase
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
functorch = torch._C._functorch
# the number of active `TorchDispatchMode` objects, which is at least one in a trace
dispatch_depth = torch._C._len_torch_dispatch_stack
# counts the references to a tensor storage; `None` if torch lacks the function
storage_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
# matrix products in which each group of rows has a different weight
grouped_products: set[Any] = {getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None)}
grouped_products.discard(None)  # torch lacks the function


def is_jit_tracing() -> bool:
    return torch._C._get_tracing_state() is not None  # `torch.jit.is_tracing` is slower


def tensor_use_count(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor, including those of autograd graphs; 1 if torch cannot count."""
    count = getattr(tensor, "_use_count", None)
    return 1 if count is None else int(count())


def clipping_functions() -> list[tuple[Any, str]]:
    inner, public = torch.nn.utils.clip_grad, torch.nn.utils
    name = "_clip_grads_with_norm_"
    norm = [(inner, name)] if hasattr(inner, name) else [(one, "clip_grad_norm_") for one in (inner, public)]
    return [*norm, (inner, "clip_grad_value_"), (public, "clip_grad_value_")]


def norm_and_scaling() -> tuple[Any, str, str] | None:
    """Return the module and the names of torch's functions that compute a gradient norm and scale gradients."""
    inner, names = torch.nn.utils.clip_grad, ("_get_total_norm", "_clip_grads_with_norm_")
    return (inner, *names) if all(hasattr(inner, name) for name in names) else None


def transforms_are_active() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode AD is active in the running code."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return getattr(forward_ad, "_current_level", -1) >= 0 or (active is not None and bool(active()))


def setter_of_parametrizations() -> tuple[Any, str]:
    """Return the module and the name of torch's function that sets a parameter with a parametrization."""
    return importlib.import_module("torch.nn.utils.parametrize"), "_maybe_set"


def cached_parametrizations() -> dict[tuple[int, str], torch.Tensor]:
    found: dict[tuple[int, str], torch.Tensor] = getattr(torch.nn.utils.parametrize, "_cache", {})
    return found


def set_version(tensor: torch.Tensor, version: int) -> None:
    setter = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if setter is not None:
        setter((tensor,), (version,))


# -- operators -------------------------------------------------------------------------------------------------------


operator_names = torch._C._dispatch_get_all_op_names
operators_with_kernel = torch._C._dispatch_get_registrations_for_dispatch_key


def has_instructions(name: str) -> bool:
    """Return whether the CPU has the instruction set ``"AVX2"`` or ``"AVX512"``."""
    return bool(getattr(torch.cpu, f"_is_{name.lower()}_supported")())


def default_store() -> Any:
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()


def backend_options(device: torch.device) -> Any:
    return torch.distributed.group.WORLD._get_backend(device).options  # type: ignore[union-attr] # the group exists


# -- inductor: documented by torch under these names -----------------------------------------------------------------


def aot_compile(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module("torch._inductor").aoti_compile_and_package(*args, **kwargs)


def cpp_kernels() -> type | None:
    """Return inductor's class that writes the loops of C++ kernels; ``None`` if this torch does not have the class."""
    return getattr(importlib.import_module("torch._inductor.codegen.cpp"), "CppKernelProxy", None)


def aot_load(path: str) -> Any:
    return importlib.import_module("torch._inductor").aoti_load_package(path)


# -- names that are imported on use --------------------------------------------------------------------------------

_FAKE, _DISPATCH = "torch._subclasses.fake_tensor", "torch.utils._python_dispatch"
_UTILS, _SHAPES = "torch._export.utils", "torch.export.dynamic_shapes"
_OVERRIDES, _ENTERED = "torch.overrides", "nothing: torch's modes are entered and left by public functions"
_NAMES = {
    "DispatchKey": Private("torch._C", "DispatchKey", "trace the attention as its single steps, which are slower"),
    "DimHint": Private(_SHAPES, "_DimHint", "type(torch.export.Dim.AUTO)"),
    "FakeTensor": Private(_FAKE, "FakeTensor", "a tensor on the meta device, which has one device only"),
    "FakeTensorMode": Private(_FAKE, "FakeTensorMode", "the meta device"),
    "FloorDiv": Private("torch.utils._sympy.functions", "FloorDiv", "sympy.floor"),
    "Max": Private("torch.utils._sympy.functions", "Max", "sympy.Max"),
    "Min": Private("torch.utils._sympy.functions", "Min", "sympy.Min"),
    "NormBase": Private("torch.nn.modules.batchnorm", "_NormBase", "the public classes of batch and instance norm"),
    "OpOverload": Private("torch._ops", "OpOverload", "type(torch.ops.aten.add.Tensor)"),
    "check_valid_to_preserve": Private(_UTILS, "_check_valid_to_preserve", "decompose all composite operators"),
    "combine_args": Private(_SHAPES, "_combine_args", "inspect.signature(forward).bind(*args, **kwargs).arguments"),
    "compute_local_shape_and_global_offset": Private(
        "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "DTensor.__create_chunk_list__"
    ),
    "dynamo_config": Private("torch._dynamo", "config", "torch.compiler.config"),
    "enable_python_dispatcher": Private(
        "torch._dispatch.python", "enable_python_dispatcher", "ExportedProgram.run_decompositions of the whole program"
    ),
    "fx_config": Private("torch.fx.experimental", "_config", "torch.compiler.config"),
    "is_composite": Private(_UTILS, "_is_cia_op", "OpOverload.decompose, if it does not raise"),
    "is_fake": Private(_FAKE, "is_fake", "isinstance(tensor, FakeTensor)"),
    "optimizer_post_hooks": Private(
        "torch.optim.optimizer", "_global_optimizer_post_hooks", "ignore global optimizer hooks in steps by layer"
    ),
    "dispatch_modes": Private(_DISPATCH, "_get_current_dispatch_mode_stack", _ENTERED),
    "function_modes": Private(_OVERRIDES, "_get_current_function_mode_stack", _ENTERED),
    "pop_function_mode": Private(_OVERRIDES, "_pop_mode", "TorchFunctionMode as a context manager"),
    "push_function_mode": Private(_OVERRIDES, "_push_mode", "TorchFunctionMode as a context manager"),
    "pop_mode": Private(_DISPATCH, "_pop_mode", "TorchDispatchMode as a context manager"),
    "push_mode": Private(_DISPATCH, "_push_mode", "TorchDispatchMode as a context manager"),
    "decompositions": Private("torch._decomp", "decomposition_table", "the default table of run_decompositions"),
    "scan": Private("torch._higher_order_ops.scan", "scan", "a loop over tokens, in a program for one number of them"),
    "type_promotion_rule": Private(
        "torch.onnx._internal.fx.passes.type_promotion", "get_type_promotion_rule", "run every operator, as torch does"
    ),
    "unset_fake_temporarily": Private(_FAKE, "unset_fake_temporarily", "make the tensor outside of the trace"),
}
if not TYPE_CHECKING:
    __getattr__ = lookup_in("torch", _NAMES)
