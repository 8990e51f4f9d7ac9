"""KV caches in a pipeline: caches of the caller, which stay in CPU memory, and caches that the model's code creates.

The KV cache of an encoder-decoder consists of two caches, and a dictionary of the layers that have read the encoder.
"""

# forward     the cache is split by its registration: a HeldCache for each microbatch
# phase       gets the cache from before this forward, so masks and positions are the same in all phases
# layer       reads its own entry, which is copied to the device, updated and copied back
# afterwards  the entries are joined and put into the caller's cache; after an exception the cache is unchanged

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from yobx_flatten import register_flattening_functions
from yobx_flatten.core.private_names.of_torch import pytree
from yobx_flatten.huggingface.cache_names import argument_of
from yobx_flatten.registry.recipe.aliases import Kwargs, PyTree, TransformersModel

from ...batch.entries import is_cache
from ...batch.joining import join
from ...batch.spec import Replicate
from ...batch.splitting import split
from ...device.transfer import Static
from ...errors import WRAP_WITH_BATCH, BatchStructureError, CutError
from ..adapters import model_inside, text_config
from .stub import Key

# An entry of a cache: 1 for cross-attention or 0, and the index in the list of layers.
Entry: TypeAlias = tuple[int, int]


class HeldCache(Static):
    """The KV cache of a microbatch, which stays on the host; layers get copies of its entries on their devices."""

    __slots__ = ("_held",)

    def __init__(self, cache: Any) -> None:
        changed: dict[Entry, Any] = {}
        read: dict[int, bool] = {}
        # a closure, so that code that walks through attributes finds no tensors to copy
        self._held: Callable[[], tuple[Any, dict[Entry, Any], dict[int, bool]]] = lambda: (cache, changed, read)

    def before(self) -> Any:
        cache, _, _ = self._held()
        return with_layers(cache, [[copy.copy(layer) for layer in part.layers] for part in parts_of(cache)])

    def after(self) -> Any:
        """Return the KV cache with the keys and values that layers wrote in the running forward."""
        cache, changed, read = self._held()
        lists = []
        for side, part in enumerate(parts_of(cache)):
            count = max([len(part.layers), *(number + 1 for where, number in changed if where == side)])
            lists.append([changed[side, n] if (side, n) in changed else part.layers[n] for n in range(count)])
        return with_layers(cache, lists, read)

    @contextlib.contextmanager
    def opened(self, device: torch.device) -> Iterator[Any]:
        """Context manager that yields the KV cache with tensors on ``device``, and copies them to the host at exit."""
        cache, changed, read = self._held()
        entries = [_Entries(part.layers, device) for part in parts_of(self.after())]
        view = with_layers(cache, entries, read)
        yield view
        host = torch.device("cpu")
        for side, held in enumerate(entries):
            changed.update({(side, number): _moved(held.get(number), host) for number in held.here})
        read.update(getattr(view, "is_updated", {}))


class _ReadEntries(list[Any]):
    """A list of the layers of a KV cache that calls ``on_read`` before a layer is read."""

    def get(self, number: int) -> Any:
        return super().__getitem__(number)

    on_read: Callable[[int], None]

    def __getitem__(self, index: Any) -> Any:
        for number in range(len(self))[index] if isinstance(index, slice) else [range(len(self))[index]]:
            self.on_read(number)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


class _Entries(_ReadEntries):
    """The layers of a KV cache; the tensors of each layer are copied to the device when they are read."""

    def __init__(self, layers: Sequence[Any], device: torch.device) -> None:
        super().__init__(layers)
        self.here: set[int] = set()
        self._device = device

    def on_read(self, number: int) -> None:
        if number not in self.here:
            self.here.add(number)
            self[number] = _moved(self.get(number), self._device)

    def append(self, layer: Any) -> None:
        self.here.add(len(self))
        super().append(layer)


def _is_pair(cache: Any) -> bool:
    return hasattr(cache, "cross_attention_cache")


def parts_of(cache: Any) -> list[Any]:
    return [cache.self_attention_cache, cache.cross_attention_cache] if _is_pair(cache) else [cache]


def with_layers(cache: Any, lists: Sequence[Any], read: Mapping[int, bool] | None = None) -> Any:
    """Return a copy of a KV cache whose lists of layers are replaced by ``lists``."""
    made = copy.copy(cache)
    if _is_pair(cache):
        made.self_attention_cache, made.cross_attention_cache = (
            with_layers(part, [layers]) for part, layers in zip(parts_of(cache), lists, strict=True)
        )
        made.is_updated = {**cache.is_updated, **(read or {})}
    else:
        (made.layers,) = lists
    return made


def has_layers(cache: Any) -> bool:
    return all(hasattr(part, "layers") for part in parts_of(cache))


def _moved(layer: Any, device: torch.device) -> Any:
    made = copy.copy(layer)
    made.__dict__.update({name: _moved_value(value, device) for name, value in vars(layer).items()})
    return made


def _moved_value(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, torch.device):
        return device
    if type(value) in (list, tuple):
        return type(value)(_moved_value(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved_value(item, device) for key, item in value.items()}
    return value


@contextlib.contextmanager
def open_caches(
    args: tuple[Any, ...], kwargs: Kwargs, device: torch.device
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], dict[int, Any]]]:
    """Context manager that yields the arguments with each ``HeldCache`` replaced by a KV cache on ``device``."""
    # yields: the arguments with open caches, and the held caches by the ``id()`` of the open ones
    with contextlib.ExitStack() as stack:
        held = {id(value): value for value in (*args, *kwargs.values()) if isinstance(value, HeldCache)}
        opened = {key: stack.enter_context(value.opened(device)) for key, value in held.items()}
        views = {id(view): held[key] for key, view in opened.items()}
        yield swapped(args, opened), swapped(dict(kwargs), opened), views


def cache_argument(model: nn.Module) -> str | None:
    return argument_of(model_inside(model).forward)


def home(model: TransformersModel) -> Any:
    """Return the empty KV cache that a model creates when it is called without a cache."""
    makes = getattr(model, "_supports_default_dynamic_cache", None)
    if makes is None or not makes() or cache_argument(model) is None:
        return None
    from transformers import DynamicCache, EncoderDecoderCache

    if not getattr(model.config, "is_encoder_decoder", False):
        return DynamicCache(config=model.config)
    # cross-attention has no window, even if the decoder's configuration has one
    return EncoderDecoderCache(DynamicCache(config=text_config(model)), DynamicCache())


def swapped(values: Any, pairs: Mapping[int, Any]) -> Any:
    """Replace items of a tuple or mapping; ``pairs`` maps the ``id()`` of an old item to the new item."""
    if type(values) is tuple:
        return tuple(pairs.get(id(value), value) for value in values)
    for name, value in list(values.items()) if isinstance(values, dict) else ():
        if id(value) in pairs:
            values[name] = pairs[id(value)]
    return values


def split_held(cut: Callable[..., Any] | None) -> Callable[..., Any]:
    # cut: split function for the other arguments; `None` for the default

    def split_input(args: Any, kwargs: Kwargs, num_microbatch: int) -> tuple[list[Any], list[Any]]:
        name, cache = next((name, value) for name, value in kwargs.items() if isinstance(value, HeldCache))
        rest = {key: value for key, value in kwargs.items() if key != name}
        # `cache_position` has no rows, even if it has as many entries as the batch has rows
        rules = {"kwargs['cache_position']": Replicate} if cut is None and "cache_position" in rest else cut
        parts = split(args, rest, None, num_microbatch, split_input=rules)
        made_args, made = [part.args for part in parts], [part.kwargs for part in parts]
        caches = [cache]
        if len(made) > 1:
            names = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
            given = [[*map(named.get, names), *one] for one, named in zip(made_args, made, strict=True)]
            rows = [next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor)) for leaves in given]
            # an additional tensor gives the batch size, because an empty cache has no tensor
            values = {"held": cache.before(), "rows": torch.zeros(sum(rows))}
            with register_flattening_functions(patch_transformers=True):
                caches = [HeldCache(part.kwargs["held"]) for part in split((), values, None, len(rows))]
        return made_args, [{**named, name: held} for named, held in zip(made, caches, strict=True)]

    return split_input


def join_held(cache: Any, parts: Sequence[HeldCache], rows: Sequence[int]) -> None:
    made = [part.after() for part in parts]
    if len(made) > 1:
        with register_flattening_functions(patch_transformers=True):
            made = [join(made, [float(count) for count in rows], rows=rows)]
    for part, other in zip(parts_of(cache), parts_of(made[0]), strict=True):
        part.layers[:] = other.layers
    if _is_pair(cache):
        cache.is_updated.update(made[0].is_updated)


# The class of an entry, and its attributes: their structure, and their values with a `Key` for each tensor.
_Described: TypeAlias = tuple[type, pytree.TreeSpec, tuple[Any, ...]]


# Caches that the model's own code creates and fills, such as the keys and values of a learned prefix:
#
#     phase 0     creates the cache: its tensors are values of the state, through which gradients flow back
#     layer       gets a cache with the entries that it reads; its writes to them are dropped after the call
#     phase 1     creates the cache again
#
# The results are exact, because `check_apart` refuses models in which two layers use the same entry.


@dataclasses.dataclass(frozen=True, slots=True)
class MadeCache:
    """Describes a KV cache that the model created for a layer; a :class:`Key` stands for each tensor of the cache."""

    empty: Any  # the cache without entries
    # description of each entry, by part; `None` for an entry that the layer does not read
    entries: tuple[tuple[_Described | None, ...], ...]

    @classmethod
    def of(cls, cache: Any, named: Callable[[Any], Any], read: frozenset[Entry] | None) -> MadeCache:
        # read: entries to describe, which the layer reads; `None` for all
        found = []
        for side, part in enumerate(parts_of(cache)):
            described: list[_Described | None] = []
            for number, entry in enumerate(part.layers):
                if read is not None and (side, number) not in read:
                    described.append(None)
                    continue
                leaves, spec = pytree.tree_flatten(dict(vars(entry)))
                described.append((type(entry), spec, tuple(named(leaf) for leaf in leaves)))
            found.append(tuple(described))
        return cls(with_layers(cache, [[] for _ in found]), tuple(found))

    def keys(self) -> set[Key]:
        held = [entry for part in self.entries for entry in part if entry is not None]
        return {leaf for _, _, leaves in held for leaf in leaves if isinstance(leaf, Key)}

    def build(self, values: Mapping[Key, torch.Tensor]) -> Any:
        return with_layers(self.empty, [_MadeEntries(_entry(one, values) for one in part) for part in self.entries])


def _entry(described: _Described | None, values: Mapping[Key, torch.Tensor]) -> Any:
    if described is None:
        return None
    kind, spec, leaves = described
    tensors = [values[leaf] for leaf in leaves if isinstance(leaf, Key)]
    device = tensors[0].device if tensors else None
    filled = [
        values[leaf] if isinstance(leaf, Key) else device if isinstance(leaf, torch.device) and device else leaf
        for leaf in leaves
    ]
    made: Any = object.__new__(kind)
    made.__dict__.update(copy.copy(pytree.tree_unflatten(filled, spec)))
    return made


class _MadeEntries(_ReadEntries):
    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__(entries)
        self.read: set[int] = set()

    def on_read(self, number: int) -> None:
        self.read.add(number)
        if self.get(number) is None:
            raise BatchStructureError(
                f"For this batch, a layer reads entry {number} of the cache that the model creates. For the example "
                f"with which the model was split, the layer did not read this entry. {WRAP_WITH_BATCH}"
            )


def entries_read(arguments: PyTree) -> frozenset[Entry]:
    caches = [leaf for leaf in pytree.tree_leaves(arguments) if is_cache(leaf)]
    lists = [(side, part.layers) for cache in caches for side, part in enumerate(parts_of(cache))]
    return frozenset((side, number) for side, held in lists if isinstance(held, _MadeEntries) for number in held.read)


def check_apart(calls: Sequence[str], read: Mapping[int, frozenset[Entry]]) -> None:
    readers: dict[Entry, int] = {}
    for place, entries in sorted(read.items()):
        for entry in sorted(entries):
            other = readers.setdefault(entry, place)
            if other != place:
                raise CutError(
                    "structure",
                    f"{calls[place]} and {calls[other]} use the same keys and values of a cache that the model "
                    "creates, but layers of a pipeline cannot share keys and values in a cache.",
                )


def without_caches(output: PyTree) -> PyTree:
    if isinstance(output, dict):
        for name in [name for name, value in output.items() if is_cache(value)]:
            output[name] = None
        return output
    return tuple(value for value in output if not is_cache(value)) if type(output) is tuple else output
