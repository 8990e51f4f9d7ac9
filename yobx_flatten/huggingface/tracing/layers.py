"""Replace functions of transformers by traceable functions with the signature of the original function.

A function is replaced only if it has all required parameters of the replacement. If the function has parameters that
the replacement lacks, the replacement needs the parameters ``**others`` and ``again``, the original function.

The methods of cache layers are traced as one graph for every number of tokens, without a branch on the tokens seen.
"""

# a model calls          forward(hidden, cache_of_its_release=c, attention_mask=m)
# a version receives     forward(again, self, hidden_states, cache, **others)      one name for the cache
# any other case         again(), again(position_ids=p)                            the original, with its own names

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import NEWEST_TRIED, ReplacedFunctionWarning
from ...registry.recipe.aliases import CacheLayer, Length, Size
from ..cache_names import argument_of, named_for
from ..caches.layers import keeps_dtype
from ..caches.layouts import length_leaf

Function: TypeAlias = Callable[..., Any]
"""A function or method of a model, or its replacement."""
Make: TypeAlias = Callable[[Function], Function]
"""A function that returns the replacement for a function."""
Replacement: TypeAlias = tuple[ModuleType | type, str, Make]
"""A module or a class, the name of its function, and a function that makes the replacement."""
_CACHE = "cache"
_warned: set[str] = set()


def replacement(make: Make) -> Make:
    """Decorate a function that returns the replacement of a given function, so that both have the same signature."""
    # make: returns a version for an original, or the original if a release of transformers needs no replacement

    @functools.wraps(make)
    def made(original: Function) -> Function:
        version = make(original)
        if version is original:
            return original
        own = {_CACHE if name == argument_of(original) else name for name in _named(original)}
        takes = inspect.signature(version).parameters
        reads = {name for name in _named(version) if name != "again"}
        hands_on = "again" in takes and any(one.kind is one.VAR_KEYWORD for one in takes.values())
        lacking = ", ".join(sorted(name for name in reads - own if takes[name].default is inspect.Parameter.empty))
        unknown = "" if hands_on else ", ".join(sorted(own - reads))
        if not lacking and not unknown:
            return _called_as(version, original)
        reason = f"the function has no argument {lacking}" if lacking else f"its argument {unknown} is unknown"
        name = f"{original.__module__}.{original.__qualname__}"
        if name not in _warned:  # once per process for each function
            _warned.add(name)
            warnings.warn(
                f"a trace usually replaces {name}, but the replacement does not fit and is not used: {reason}. If "
                "the exported model then fails its checks, install the newest tested transformers:\n"
                f"    pip install transformers=={NEWEST_TRIED['transformers']}",
                ReplacedFunctionWarning,
                stacklevel=1,
            )
        return original

    return made


def always(version: Function) -> Make:
    return lambda original: version


def traceable(version: Function) -> Make:
    """Return a decorator that replaces a function by ``version``, with the signature of the replaced function."""
    return replacement(always(version))


def _named(function: Function) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]


def _called_as(version: Function, original: Function) -> Function:
    signature = inspect.signature(original)
    own, takes = argument_of(original), inspect.signature(version).parameters
    places = list(signature.parameters)
    takes_others = any(one.kind is one.VAR_KEYWORD for one in takes.values())

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # the signature of the undecorated function: a decorator may accept older names
        kwargs = named_for(original, kwargs)
        bound = signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value if takes_others else {}
            elif kind is not inspect.Parameter.VAR_POSITIONAL:
                named[_CACHE if name == own else name] = value

        def again(**changes: Any) -> Any:
            # arguments as in the call: a decorator may search the keyword arguments
            given, others = list(args), dict(kwargs)
            for name, value in changes.items():
                name = own if own is not None and name == _CACHE else name
                place = places.index(name)
                if place < len(given):
                    given[place] = value
                else:
                    others[name] = value
            return original(*given, **others)

        return version(again=again, **named) if "again" in takes else version(**named)

    return call


# - In a sliding layer that has `kept` keys after `seen` tokens, the attention of `new` tokens covers `kept + new` keys
#   from position `seen - kept`. The layer then keeps the last `window - 1` keys, or all keys if there are fewer.
# - A static sliding layer returns the last `window - 1` keys it has seen, the new keys, and its unused capacity.
# - An empty layer starts from a slice of its first keys, since a trace would make a new tensor a constant, which
#   `run_decompositions` and the ONNX exporter do not find (https://github.com/pytorch/pytorch/issues/179555).


def layer_replacements() -> Iterator[Replacement]:
    cache_utils: Any = sys.modules["transformers.cache_utils"]
    sliding, full = cache_utils.DynamicSlidingWindowLayer, cache_utils.DynamicLayer
    yield sliding, "update", always(_sliding_update)
    yield sliding, "get_mask_sizes", always(_sliding_mask_sizes)
    # the value of the original; transformers' exporters (5.23) replace it by the number of kept keys
    yield sliding, "get_seq_length", always(lambda self, *args: self.cumulative_length)
    yield full, "lazy_initialization", always(_lazy_initialization)
    if "lazy_initialization" in vars(sliding):
        yield sliding, "lazy_initialization", always(_lazy_initialization)
    if "_sliding_window_tensor" in inspect.unwrap(sliding.__init__).__code__.co_names:
        yield sliding, "__init__", _sliding_init
    static = getattr(cache_utils, "StaticSlidingWindowLayer", None) or cache_utils.SlidingWindowLayer  # 4.56
    yield static, "update", always(_static_sliding_update)
    yield static, "get_mask_sizes", always(_static_sliding_mask_sizes)
    if "tensor" in inspect.unwrap(cache_utils.StaticLayer.__init__).__code__.co_names:
        yield cache_utils.StaticLayer, "__init__", _static_init
    indexed = getattr(cache_utils, "DynamicIndexedLayer", None)
    if indexed is not None:
        yield indexed, "lazy_initialization_indexer", always(_lazy_initialization_indexer)
    linear = getattr(cache_utils, "LinearAttentionLayer", None)
    if linear is not None and "conv_kernel_size" in inspect.signature(linear.update_conv_state).parameters:
        yield linear, "update_conv_state", _update_conv_state


def _sliding_update(
    self: Any, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor]:
    if self.keys is None:
        _lazy_initialization(self, key_states, value_states)
    new = key_states.shape[-2]
    self.cumulative_length = self.cumulative_length + new
    keys = torch.cat([self.keys, key_states], dim=-2)
    values = torch.cat([self.values, value_states], dim=-2)
    recording = getattr(self, "record_past", False)
    # a recording layer can return to earlier tokens, so it keeps all keys that the new tokens can see
    last = last_places(keys, self.sliding_window - 1 + (new if recording else 0))
    some = keys.index_select(2, last), values.index_select(2, last)
    (self.keys, self.values), found = ((keys, values), some) if recording else (some, (keys, values))
    return found


def last_places(keys: Tensor, most: Size) -> Tensor:
    """Return the indices of the last ``most`` tokens in ``keys``, or of all tokens if there are fewer."""
    # The slice `keys[:, :, -most:]` would check whether there are enough keys, and its strides whether it covers all
    # keys. These checks would become guards, so that the program refuses lengths on the other side of the window.
    count = keys.shape[-2]
    kept = torch.sym_min(count, most)
    places: Tensor = torch.arange(kept, device=keys.device) + (count - kept)
    return places


def _sliding_mask_sizes(self: Any, query: Tensor | Size) -> tuple[Length, Length]:
    kept = 0 if self.keys is None or self.keys.dim() < 2 else self.keys.shape[-2]
    if getattr(self, "record_past", False):
        # recorded older keys are not attended to
        kept = torch.sym_min(kept, self.sliding_window - 1)
    return kept + _count(query), self.cumulative_length - kept


def _count(query: Tensor | Size) -> Size:
    # 4.56 to 5.0 pass the positions of the new tokens, later versions their number
    return query.shape[0] if isinstance(query, Tensor) else query


def _lazy_initialization(layer: Any, key_states: Tensor, value_states: Tensor | None = None) -> None:
    values = key_states if value_states is None else value_states
    layer.device = key_states.device
    if keeps_dtype(layer.__class__):
        layer.dtype = key_states.dtype
    # slices instead of torch.empty: see above, "An empty layer"
    layer.keys, layer.values = (states[..., :0, :] for states in (key_states, values))
    layer.is_initialized = True


def _lazy_initialization_indexer(self: Any, indexer_key_states: Tensor) -> None:
    self.indexer_dtype, self.indexer_device = indexer_key_states.dtype, indexer_key_states.device
    self.indexer_keys = indexer_key_states[:, :0]
    self.is_indexer_initialized = True


def _sliding_init(original: Function) -> Function:
    def __init__(self: Any, sliding_window: int, *args: Any, **kwargs: Any) -> None:
        # the layer also stores its window in a tensor, which only DDP's gather reads, outside of traces
        with _without_new_tensors():
            original(self, sliding_window, *args, **kwargs)
        # the tensor would be an unused constant of the program
        self.__dict__.pop("_sliding_window_tensor", None)

    return __init__


@contextlib.contextmanager
def _without_new_tensors() -> Iterator[None]:
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    from ...core.private_names.of_torch import unset_fake_temporarily

    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        yield


# A static sliding layer with 4 slots (a-d) and new keys (x, y): the keys that it returns and the keys that it keeps:
#
#   seen  slots    new   shown        kept
#   1     a - - -  x y   a x y - -    a x y -      the layer has unused slots, which are shown and masked
#   3     a b c -  x y   a b c x y    b c x y      the layer becomes full
#   9     a b c d  x y   b c d x y    c d x y      the layer is full; a is outside the window


def _static_sliding_update(
    self: Any, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
) -> tuple[Tensor, Tensor]:
    if self.keys is None:
        count = len(inspect.signature(type(self).lazy_initialization).parameters) - 1
        self.lazy_initialization(*((key_states, value_states)[:count]))  # 4.56 and 4.57 take the keys only
    counter = _counter(self)
    size, new, seen = self.max_cache_len, key_states.shape[-2], length_leaf(vars(self)[counter])
    keys = torch.cat([self.keys, key_states], dim=-2)
    values = torch.cat([self.values, value_states], dim=-2)
    filled = seen.clamp(max=size)

    def chosen(slot: Tensor, first: Tensor) -> Tensor:
        place = slot + first  # indices into the filled slots followed by the new keys
        return torch.where(place < filled, place, torch.where(place < filled + new, place - filled + size, slot))

    shown = chosen(torch.arange(size - 1 + new, device=keys.device), (filled - size + 1).clamp(min=0))
    kept = chosen(torch.arange(size, device=keys.device), (filled + new - size).clamp(min=0))
    # in place, like the original: a caller may hold these tensors
    self.keys.copy_(keys.index_select(2, kept))
    self.values.copy_(values.index_select(2, kept))
    vars(self)[counter] = seen + new
    if counter != "cumulative_length":  # this tensor does not grow after the layer is full
        self.cumulative_length.add_((seen + new <= size) * new)
    return keys.index_select(2, shown), values.index_select(2, shown)


def _static_sliding_mask_sizes(self: Any, query: Tensor | Size) -> tuple[Length, Length]:
    size, seen = self.max_cache_len, vars(self)[_counter(self)]
    first = seen - size + 1
    start = first.clamp(min=0) if isinstance(first, Tensor) else torch.sym_max(first, 0)
    return size - 1 + _count(query), start


def _counter(layer: CacheLayer) -> str:
    return "cumulative_length_int" if "cumulative_length_int" in vars(layer) else "cumulative_length"


def _static_init(original: Function) -> Function:
    def __init__(self: Any, max_cache_len: int, *args: Any, **kwargs: Any) -> None:
        with _without_new_tensors():
            original(self, max_cache_len, *args, **kwargs)
        self.cumulative_length = torch.zeros((), dtype=torch.int64)  # an operator of the graph, not a constant

    return __init__


def _update_conv_state(original: Callable[..., Tensor]) -> Function:
    def update_conv_state(
        self: Any, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        if self.record_past or self.has_previous_state[state_idx]:
            return original(self, conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size)
        # fewer or more tokens than the kernel's width are padded without a branch
        self.has_previous_state[state_idx] = True
        size = self.conv_kernel_size[state_idx]
        full = torch.nn.functional.pad(conv_states, (torch.sym_max(size - conv_states.shape[-1], 0), 0))
        self.conv_states[state_idx].copy_(full[..., -size:])
        return full

    return update_conv_state
