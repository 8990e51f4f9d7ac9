"""List the tensors that pass between the modules of a split model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from yobx_flatten.core.private_names.of_torch import pytree

from ..adapters import example_inputs, without_cache
from .call_log import BoxUse, CallLog, Tree
from .check import evaluating
from .cut import Cut
from .cut_plan import CutPlan, CutState, begin
from .pieces import LayerCall
from .stub import Key


@dataclasses.dataclass(frozen=True)
class PassedTensor:
    """A tensor that passes between the modules of a split model.

    Attributes:
        name: name of the argument of the first layer that takes the tensor, or name of a captured output.
        kind: where the tensor comes from. ``"hidden"``: the hidden state, passed from layer to layer. ``"side"``: a
            tensor, such as a mask, that code outside of the layers passes to layers. ``"carried"``: an output of a
            layer, except the hidden state, that code after the layer reads. ``"captured"``: captured in a layer by
            hooks for the output of the model.
        shape: shape of the tensor for the example inputs.
        bytes: number of bytes of the tensor for the example inputs.
        made: index of the module that produces the tensor.
        read: indices of the modules that receive the tensor, in order.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    made: int
    read: tuple[int, ...]


def passed_tensors(made: Cut, example: Mapping[str, Any] | None = None) -> list[PassedTensor]:
    """Return the tensors that pass between the modules of a split model, in the order of their creation.

    The arguments of the model are not included, because every module that runs code outside of the layers gets them.

    Args:
        made: split model, whose parameters may be on ``meta``.
        example: keyword arguments of the model, named as in the example for the split. Default: a few tokens.

    Returns:
        The tensors that pass between modules; an empty list if the model was not split.

    Raises:
        BatchStructureError: the model's forward takes a different branch for ``example`` than when the model was split.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from roundpipe_runtime import cut
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> for found in passed_tensors(cut(LlamaForCausalLM(config)))[:2]:
    ...     print(found.kind, found.name, found.shape, found.made, found.read)
    hidden hidden_states (2, 12, 16) 0 (1,)
    side attention_mask (2, 1, 12, 12) 0 (1, 2)
    """
    if made.program is None:
        return []
    kwargs = without_cache(made.model, dict(example if example is not None else example_inputs(made.model)))
    if any(p.is_meta for p in made.model.parameters()):
        kwargs = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
    seen: dict[Any, tuple[torch.Tensor, int, list[int]]] = {}  # tensor, module that made it, modules that read it
    state = begin((), kwargs, made.model)
    last = len(made.pieces) - 1
    with evaluating(made.model), torch.no_grad():
        for number, piece in enumerate(made.pieces[:last]):
            read = [*_contents(state)]  # code outside of layers may read any tensor
            state = piece(state) if number else piece(**kwargs)
            if isinstance(piece, LayerCall):
                call = state.call_log.calls.get(piece.place)
                boxes = {use.number for use in call.boxes()} if call is not None else set()
                keys = call.arguments.keys() if call is not None else set()
                read = [key for key in read if (key in keys if isinstance(key, Key) else key[0] in boxes)]
            for key in read:
                seen[key][2].append(number)
            for key, tensor in _contents(state).items():
                seen.setdefault(key, (tensor, number, []))
    for key in _contents(state):
        seen[key][2].append(last)
    words = _Names(made.program, state.call_log, made.layers)
    return [
        PassedTensor(
            words.name(key), words.kind(key, tuple(read), number), tuple(one.shape), one.nbytes, number, tuple(read)
        )
        for key, (one, number, read) in seen.items()
        if read
    ]


def _contents(state: CutState) -> dict[Any, torch.Tensor]:
    # the key of a tensor inside a list or dictionary: number of the container, and path of the tensor in it
    boxes = [(number, pytree.tree_flatten_with_path(content)[0]) for number, content in state.boxes.items()]
    held = [(number, path, leaf) for number, leaves in boxes for path, leaf in leaves]
    inside = {(n, pytree.keystr(path)): leaf for n, path, leaf in held if isinstance(leaf, torch.Tensor)}
    return {**state.values, **inside}


class _Names:
    """Finds names and kinds of passed tensors from the arguments of the layers that receive the tensors."""

    def __init__(self, program: CutPlan, call_log: CallLog, layers: Mapping[str, nn.Module]) -> None:
        self._program = program
        self._names: dict[Any, str] = {}
        self._hidden: set[str] = set()
        self._captured = {
            leaf: path for tree in call_log.captured.values() for path, leaf in _leaves(tree) if isinstance(leaf, Key)
        }
        for place, call in sorted(call_log.calls.items()):
            parameters = list(inspect.signature(layers[program.calls[place].layer].forward).parameters)
            for path, leaf in _leaves(call.arguments):
                if not isinstance(leaf, (Key, BoxUse)):
                    continue
                which = path[1]  # path[0] is args or kwargs
                if isinstance(which, pytree.MappingKey):
                    name = f"{which.key}{pytree.keystr(path[2:])}"
                else:
                    known = which.idx < len(parameters)
                    name = f"{parameters[which.idx] if known else f'args[{which.idx}]'}{pytree.keystr(path[2:])}"
                self._names.setdefault(leaf.number if isinstance(leaf, BoxUse) else leaf, name)
                if self._is_main(leaf) and leaf.call == place - 1:
                    self._hidden.add(name)

    def name(self, key: Any) -> str:
        if not isinstance(key, Key):
            return f"{self._names.get(key[0], 'box')}{key[1]}"
        if key in self._captured:
            return str(self._captured[key][0].key)
        name = self._names.get(key)
        return name or (f"output {key.leaf}" if self._program.is_extra(*key) else "hidden_states")

    def kind(self, key: Any, read: tuple[int, ...], made: int) -> str:
        if key in self._captured:
            return "captured"
        if isinstance(key, Key) and key.call < 0:
            is_first = self._names.get(key) in self._hidden and read == (made + 1,)
            return "hidden" if is_first else "side"
        return "hidden" if self._is_main(key) and read[0] == made + 1 else "carried"

    def _is_main(self, key: Any) -> TypeGuard[Key]:
        return isinstance(key, Key) and not self._program.is_extra(*key)


def _leaves(tree: Tree) -> Iterator[tuple[Any, Any]]:
    numbered = pytree.tree_unflatten(list(range(len(tree.leaves))), tree.spec)
    for path, number in pytree.tree_flatten_with_path(numbered)[0]:
        yield path, tree.leaves[number]
