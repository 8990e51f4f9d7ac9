"""Check that each parameter can be copied to a device, and choose the large tables that stay on the host.

A quantized weight holds several tensors. One weight of each kind is rebuilt from copies of its tensors as a trial: the
tensors must be equal, the copy must not refer to tensors of the original, and its layer must compute the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from yobx_flatten import find_unregistered
from yobx_flatten.errors.failures import first_line, result_or

from ..device.composite import Rebuilding, is_composite, is_wrapper, parts_of, plain_numbers, states_of
from ..device.transfer import sent_dtype, sent_nbytes
from ..errors import ConfigError
from .parameters import LayerContents, ParameterSlot, Table, check_gradient, scan

_NOT_ENTERED = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def check_copyable(model: nn.Module) -> None:
    """Check that each parameter of a model can be copied to a device."""
    proved: set[object] = set()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ConfigError(
                f"{name} is on the meta device, and has no values. Load the model, or initialize it, first:\n"
                "    model.to_empty(device='cpu'); model.load_state_dict(state)"
            )
        check_gradient(name, parameter)
        if type(parameter) in (nn.Parameter, torch.Tensor):
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if reason := _reason(owner, parameter, proved):
            kind = type(parameter)
            raise ConfigError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, {reason} Load the model without quantization:\n"
                "    AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16)"
            )


def _reason(owner: nn.Module, parameter: nn.Parameter, proved: set[object]) -> str | None:
    """Return why a parameter cannot be copied to a device, as the end of a sentence; ``None`` if it can."""
    if parameter.requires_grad:
        return _reason_trained(parameter)
    if not is_composite(parameter):
        hidden = _hidden_tensors(parameter)
        return f"which stores tensors in its attribute {hidden!r}, and a copy would miss them." if hidden else None
    kind = (type(owner), type(parameter), tuple((part.dtype, part.dim()) for part in parts_of([parameter])))
    if kind in proved or any(part.is_meta for part in parts_of([parameter])):
        return None
    proved.add(kind)
    # a tensor subclass may raise any error for operators that it does not support
    return result_or(
        lambda: _difference(owner, parameter),
        lambda error: f"which cannot be rebuilt from copies ({type(error).__name__}: {first_line(error):.80}).",
    )


def _reason_trained(parameter: nn.Parameter) -> str | None:
    why = "Quantized weights must be frozen. Train adapters, or all weights without quantization."
    if is_wrapper(parameter):
        return result_or(
            lambda: _copy(parameter),
            lambda error: (
                f"whose class does not copy it ({type(error).__name__}: {first_line(error):.80}), and it trains. {why}"
            ),
        )
    hidden = _hidden_tensors(parameter)
    return f"which stores tensors in its attribute {hidden!r}, and it trains. {why}" if hidden else None


def _copy(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        torch.empty_like(parameter).copy_(parameter)


def _hidden_tensors(parameter: nn.Parameter) -> str | None:
    held = vars(parameter)
    tensors = [name for name, value in held.items() if isinstance(value, torch.Tensor)]
    tensors += [found.path.removeprefix("held")[2:-2] for found in find_unregistered(held, name="held")]
    return tensors[0] if tensors else None


def _difference(owner: nn.Module, parameter: nn.Parameter) -> str | None:
    """Return how a weight differs from a weight rebuilt from copies of its tensors; ``None`` if they are equal."""
    copy = Rebuilding(_clone).parameter(parameter)
    before, after = parts_of([parameter]), parts_of([copy])
    if type(copy) is not type(parameter) or vars(copy).keys() != vars(parameter).keys():
        return "which is of another class, or has other attributes, when it is rebuilt from copies of its tensors."
    if len(before) != len(after) or not all(map(_is_equal, after, before)):
        return "which has different values when it is rebuilt from copies of its tensors."
    if _reached(vars(copy)) & _reached(vars(parameter)):
        return "which stores tensors where the pipeline does not find them, so a copy would read host tensors."
    given = _input_of(owner, parameter)  # other modules are compared when a model is split
    return None if given is None else _other_output(owner, parameter, given)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return plain_numbers(tensor).clone()


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = plain_numbers(one), plain_numbers(other)
    return one.dtype == other.dtype and one.shape == other.shape and bool(same_numbers(one, other))


def _reached(value: object) -> set[int]:
    """Return the ids of all tensors that an object refers to, also from slots."""
    found: set[int] = set()
    seen: dict[int, object] = {}
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NOT_ENTERED):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            found.add(id(one))
        else:
            waiting += gc.get_referents(one)
    return found


def _input_of(owner: nn.Module, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return an input for a linear layer or an embedding; ``None`` for other modules."""
    if isinstance(owner, nn.Linear):
        dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
        return torch.linspace(-1, 1, 2 * owner.in_features, dtype=dtype).reshape(2, owner.in_features)
    return torch.arange(min(8, owner.num_embeddings)) if isinstance(owner, nn.Embedding) else None


def _other_output(owner: nn.Module, parameter: nn.Parameter, given: torch.Tensor) -> str | None:
    """Return a message if a layer computes different values with a copy of its weight."""
    with weights_kept(owner), torch.no_grad():
        # a layer that raises an error with its own weight needs another device, and cannot be compared on the host
        expected = result_or(lambda: type(owner).forward(owner, given), lambda error: None)
    if expected is None:
        return None
    rebuilding, own = Rebuilding(_clone), dict(owner._parameters)
    with weights_kept(owner), torch.no_grad():
        try:
            for name, value in own.items():
                if value is parameter:
                    owner._parameters[name] = rebuilding.parameter(parameter)
            for slot in states_of(owner):
                vars(owner)[slot.name] = rebuilding.state(slot.value)
            found = type(owner).forward(owner, given)
        finally:
            owner._parameters.update(own)
    return None if _is_equal(found, expected) else f"with whose copy {type(owner).__name__} computes different values."


def same_numbers(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return whether a copy of a parameter still has the parameter's values."""
    with torch.no_grad():  # not detached, because a virtual device counts a view of a host tensor as its memory
        if copy.device.type == "cpu" and torch.equal(copy, source):
            return torch.ones((), dtype=torch.bool)
        return ((copy == source) | (copy.isnan() & source.isnan())).all()


def has_few_bits(module: nn.Module) -> bool:
    """Report whether a module, without its submodules, holds a frozen quantized weight."""
    return any(p is not None and is_composite(p) for p in module._parameters.values()) or bool(states_of(module))


@contextlib.contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Context manager that restores quantized weights, and the related state of their modules, when it ends."""
    # Linear4bit of bitsandbytes repacks its weight in evaluation mode on a CPU, and the repacked weight has no gradient
    # in training. Inside the block, modules hold new objects that share the memory of the weights.
    with contextlib.ExitStack() as stack:
        rebuilding = Rebuilding(plain_numbers)
        for module in filter(has_few_bits, model.modules()):
            states = states_of(module)
            stack.callback(vars(module).update, {slot.name: slot.value for slot in states})
            for name, parameter in module._parameters.items():
                if parameter is not None and is_composite(parameter):
                    stack.callback(module._parameters.__setitem__, name, parameter)
                    numbers = None if is_wrapper(parameter) else plain_numbers(parameter)
                    stack.callback(_restore, parameter, numbers, dict(vars(parameter)))
                    vars(parameter).update(vars(rebuilding.parameter(parameter)))
            vars(module).update({slot.name: rebuilding.state(slot.value) for slot in states})
        yield


def _restore(parameter: nn.Parameter, numbers: torch.Tensor | None, before: dict[str, Any]) -> None:
    if numbers is not None:
        now = plain_numbers(parameter)
        if (now.data_ptr(), now.shape, now.dtype) != (numbers.data_ptr(), numbers.shape, numbers.dtype):
            parameter.data = numbers
    vars(parameter).clear()
    vars(parameter).update(before)


LargeTables: TypeAlias = Literal["auto", "whole", "slices"]

# A table of at least this many bytes is large. Copying a smaller table takes about as long as finding its rows.
LARGE = 16 * 2**20

# Bytes of a slice: half of the largest layer, within these bounds.
_SMALLEST_SLICE, _LARGEST_SLICE = 2**20, 2**28

# The number of rows of a slice is a multiple of this number, because kernels are faster then.
_ROWS = 64

# Attribute of a layer that computes logits: the weight from which it computes them.
_HEAD = "_rp_head_weight"

# Attribute of a layer: its compiled code, which does not accept placeholders for parameters.
_TO_COMPILE = "_rp_to_compile"


# Choose the tables of large vocabularies that are not copied to a device whole.
#
#     embedding   copies the rows that occur in a microbatch, and their gradients back
#     head        copies slices of the vocabulary one after the other, and their gradients back
#
# Copying only rows changes no bit of a result, so large embeddings always send rows. Slices are summed in another order
# than a whole product, so slices are used only if a table does not fit, or if the user requests them.


def check_large_tables(value: Any) -> None:
    """Check that a value is valid for the option ``large_tables``."""
    if value not in ("auto", "whole", "slices"):
        raise ConfigError(f'large_tables must be "auto", "whole" or "slices", found {value!r}.')


@dataclasses.dataclass(frozen=True, slots=True)
class TableRule:
    """Decides which large parameters of a model, called tables, are copied to devices in parts instead of whole."""

    by_rows: bool = False  # whether embeddings send rows
    by_slices: bool = False  # whether products with tables are computed by slices
    slice_nbytes: int = _SMALLEST_SLICE
    is_compiled: bool = False  # whether torch compiles layers

    def mark(self, contents: Sequence[LayerContents]) -> list[LayerContents]:
        """Return the layers with their tables: the large parameters that are copied in parts."""
        if not self.by_rows:
            return list(contents)
        return [dataclasses.replace(layer, tables=self._tables(layer)) for layer in contents]

    def _tables(self, layer: LayerContents) -> Mapping[int, Table]:
        if self.is_compiled and getattr(layer.module, _TO_COMPILE, layer.module) is not None:
            return {}
        large = [slot for slot in layer.slots if sent_nbytes(slot.parameter) >= LARGE and _is_plain(slot.parameter)]
        head = getattr(layer.module, _HEAD, None)
        found = {}
        for slot in large:
            is_head = slot.parameter is head
            if self.by_slices if is_head else _looks_up(slot):
                rows = self._slice_rows(slot.parameter) if self.by_slices else None
                found[id(slot.parameter)] = Table(rows, is_head)
        # a parameter used twice in a layer is a table only if both uses are
        others = {id(slot.parameter) for slot in large if slot.parameter is not head and not _looks_up(slot)}
        return {key: table for key, table in found.items() if key not in others}

    def _slice_rows(self, parameter: torch.Tensor) -> int:
        of_row = max(1, parameter.shape[1] * sent_dtype(parameter).itemsize)
        return max(_ROWS, self.slice_nbytes // of_row // _ROWS * _ROWS)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a dense matrix on the host, and not a tensor subclass."""
    is_matrix = parameter.dim() == 2 and parameter.is_floating_point() and parameter.layout == torch.strided
    return type(parameter) is nn.Parameter and is_matrix and parameter.device.type in ("cpu", "meta")


def _looks_up(slot: ParameterSlot) -> bool:
    """Return whether a parameter is the table of an embedding that only looks up rows."""
    owner = slot.owner
    if not isinstance(owner, nn.Embedding) or slot.name != "weight":
        return False
    return owner.max_norm is None and not owner.scale_grad_by_freq and not owner.sparse


def rule_for(
    layers: Sequence[nn.Module],
    option: LargeTables,
    stage_nbytes: float | None,
    gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
    *,
    is_compiled: bool = False,
) -> TableRule:
    """Return the rule that decides which large parameters of these layers are copied in parts."""
    # stage_nbytes: bytes of parameters and gradients that a stage may have; `None` for no limit
    # gradient_dtype: function that returns the dtype in which gradients of a parameter are summed. Default: its own.
    if option == "whole":
        return TableRule()
    contents = scan(layers)
    sliced = TableRule(by_rows=True, by_slices=True, is_compiled=is_compiled)
    marked = sliced.mark(contents)
    # layers without tables have the same size for all options, so options do not change the size of a slice
    largest = max((layer.nbytes() for layer in marked if not layer.tables), default=0)
    nbytes = min(max(largest // 2, _SMALLEST_SLICE), _LARGEST_SLICE)
    sliced = dataclasses.replace(sliced, slice_nbytes=nbytes)
    by_rows = dataclasses.replace(sliced, by_slices=False)
    if option == "slices":
        return sliced
    if stage_nbytes is None:
        return by_rows
    pairs = zip(by_rows.mark(contents), sliced.mark(contents), strict=True)
    heads = [layer for layer, other in pairs if any(table.is_head for table in other.tables.values())]
    is_too_large = any(sum(needed_bytes(layer, gradient_dtype)) > stage_nbytes for layer in heads)
    return sliced if is_too_large else by_rows


def needed_bytes(
    layer: LayerContents, gradient_dtype: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype
) -> tuple[int, int]:
    """Return the bytes that plans count for a layer on a device, and for the gradients of the layer."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    summed = [p for p in trained if id(p) not in layer.tables and gradient_dtype(p) != sent_dtype(p)]
    sums = sum(p.numel() * gradient_dtype(p).itemsize for p in summed)
    return layer.nbytes(), sum(map(layer.nbytes_of, trained)) + sums
