"""The flattening list: every class that this package can register, with its leaves and its static data."""

from __future__ import annotations

import dataclasses
import importlib

from ..errors import describe_class, is_installed
from ..registry.recipe.contract import Recipe

_TABLES = "torch (Python), torch (C++), torch.fx"
_OTHERS_TABLES = "torch (Python), torch (C++)"  # where `torch.utils._pytree.register_pytree_node` registers a class


@dataclasses.dataclass(frozen=True)
class FlatteningRow:
    """One item of the list that :func:`flattening_list` returns: a class, and how the class is flattened.

    Attributes:
        kind: what the class is: ``"layer"`` (of a KV cache), ``"cache"``, ``"output"`` or ``"container"``.
        cls: module and name of the class.
        code: name of the class in saved programs (``"D"`` for ``DynamicLayer``); ``"-"`` if transformers registers it.
        leaves: names of the leaves or children that the class is flattened into.
        counters: names of the leaves or attributes that count the tokens in a cache.
        static: static data of the class; an exported program accepts only the static data of its example inputs.
        registered_by: the library that registers the class: ``"yobx_flatten"`` (in the context manager) or
            ``"transformers"``; ``"-"`` for a layer, which is flattened with its cache.
        tables: names of the pytree registries that contain the class; empty for a cache layer, which is not registered.
        since: the first tested version of transformers (4.56, 4.57, 5.0, 5.17, 5.23) that has the class; empty if the
            class belongs to a single model.
    """

    kind: str
    cls: str
    code: str
    leaves: str
    counters: str
    static: str
    registered_by: str
    tables: str
    since: str


def flattening_list() -> list[FlatteningRow]:
    """List the classes that ``register_flattening_functions(patch_transformers=True)`` can register.

    The list contains the layers and caches of the installed ``transformers.cache_utils``, and the classes of all model
    modules that are imported.

    Returns:
        One :class:`FlatteningRow` per class, sorted into layers, caches, outputs and containers. The list is empty if
        transformers is not installed.

    >>> [(row.code, row.leaves) for row in flattening_list() if row.cls.endswith(".DynamicLayer")]
    [('D', 'key, value')]
    """
    if not is_installed("transformers"):
        return []
    import transformers.cache_utils as cache_utils

    from ..huggingface.caches.layers import LETTERS, OTHER_LETTERS
    from ..huggingface.outputs import ModelClasses
    from ..huggingface.recipes import transformers_recipes

    layers, letters = [], {**LETTERS, **OTHER_LETTERS}
    for cls in vars(cache_utils).values():
        if isinstance(cls, type) and cls.__module__ == cache_utils.__name__ and cls.__name__ in letters:
            letter = letters[cls.__name__]
            words = letter, *_LAYERS[letter], "-", "", _since(cls)
            layers.append(FlatteningRow("layer", describe_class(cls), *words))
    mixins = ("CacheLayerMixin", "LinearAttentionCacheLayerMixin")
    bases = tuple(getattr(cache_utils, name) for name in mixins if hasattr(cache_utils, name))
    for cls in ModelClasses(lambda cls: issubclass(cls, bases))():
        words = cls.__name__.replace("_", ""), *_BY_ATTRIBUTES, "-", "", ""
        layers.append(FlatteningRow("layer", describe_class(cls), *words))
    # classes are found in imported modules only; these modules contain the documented classes
    for name in ("modeling_outputs", "tokenization_utils_base", "feature_extraction_utils"):
        importlib.import_module(f"transformers.{name}")
    nodes = [_node(cls, recipe) for cls, recipe in transformers_recipes().items()]
    return layers + sorted(nodes, key=lambda row: ("cache", "output", "container").index(row.kind))


# Classes that are newer than 4.56, the oldest tested version. A renamed class has the version of its first name
_SINCE = {
    "5.17": {"MtpCache", "DFlashCache", "DynamicIndexedLayer", "StaticIndexedLayer"},
    "5.23": {"KVSharingDict", "Fp8QuantizedLayer", "DummyLayer"},
}


def _since(cls: type) -> str:
    if cls.__module__.startswith("transformers.models."):
        return ""
    name = cls.__name__
    if name.startswith("LinearAttention"):
        return "5.17"
    return next((version for version, names in _SINCE.items() if name in names), "4.56")


# by letter: leaves, counters, static data
_LAYERS: dict[str, tuple[str, str, str]] = {
    "D": ("key, value", "the length of its keys", "none"),
    "W": ("key, value", "length", "window; whether it records its past"),
    "S": ("key, value, position", "position", "room in tokens"),
    "X": ("key, value, position", "position, length", "window"),
    "I": ("key, value, indexer_keys", "the length of its keys", "what its configuration fixes"),
    "J": ("key, value, position, indexer_keys, indexer_cumulative_length", "position", "room in tokens"),
    "L": ("conv_states, recurrent_states", "none", "number of states, kernel sizes, which states there are"),
    "LD": ("conv_states, recurrent_states, key, value", "the length of its keys", "as L"),
    "LW": ("conv_states, recurrent_states, key, value", "length", "as L; window"),
    "LS": ("conv_states, recurrent_states, key, value, position", "position", "as L; room in tokens"),
    "LX": ("conv_states, recurrent_states, key, value, position", "position, length", "as L; window"),
    "Q": ("key, value, quantized keys and values", "length", "bits, axes, group size, residual length"),
    "H": ("key, value, quantized keys and values", "length", "bits, axes, group size, residual length"),
    "F": ("key, value, quantized keys and values with their scales", "length", "none"),
    "Z": ("none", "none", "none"),
}
_BY_ATTRIBUTES = ("its tensors, by attribute", "integers that count, by attribute; length", "every other attribute")


_CACHES: dict[str, tuple[str, str, str]] = {
    "EncoderDecoderCache": ("its two caches", "in its two caches", "is_updated, where the layers do not show it"),
    "KVSharingDict": ("the tensors of its tuples", "none", "its keys"),
}
_LAYERED = ("those of its layers; its own tensors", "in its layers", "its layers' codes; every other attribute")


def _node(cls: type, recipe: Recipe | None) -> FlatteningRow:
    from transformers.cache_utils import Cache
    from transformers.utils.generic import ModelOutput

    name, bases = cls.__name__, {base.__name__ for base in cls.__mro__}
    if bases & {"BatchEncoding", "BatchFeature"}:
        static = "keys, skip_tensor_conversion" if "BatchFeature" in bases else "keys"
        kind, words = "container", ("the values of .data", "-", static)
    elif issubclass(cls, ModelOutput):
        kind, words = "output", ("the fields that are set", "-", "their names")
    elif dataclasses.is_dataclass(cls):
        kind, words = "output", ("every field", "-", "their names")
    else:
        kind = "cache"
        words = _CACHES.get(name) or (_LAYERED if issubclass(cls, Cache) else _BY_ATTRIBUTES)
    code, by, tables = ("-", "transformers", _OTHERS_TABLES)
    if recipe is not None:
        code, by, tables = recipe.name, "yobx_flatten", _TABLES
    return FlatteningRow(kind, describe_class(cls), code, *words, by, tables, _since(cls))
