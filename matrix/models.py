"""Small random-weight models of every type: the names, the configurations, the models. No network, CPU, float32.

A name is ``llama`` for a causal language model, ``seq2seq:t5``, ``image:llava`` and ``speech:whisper`` for the other
families. `make_config` shrinks the default configuration of a type: numbers by the names of well-known fields, lists
with one entry per layer to one layer of every kind, and what is particular to a type by `overrides.OVERRIDES`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .media import TOKENS_OF_MEDIA
from .overrides import ADJUSTMENTS, OVERRIDES, SIZES, WINDOW_FIELDS

__all__ = [
    "FAMILIES",
    "TooLargeError",
    "built",
    "layer_classes",
    "make_config",
    "make_model",
    "small_config",
    "split_name",
    "type_exists",
    "type_names",
    "window_of",
]

# family -> the table of transformers that lists its types, the class that builds them
FAMILIES = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "image": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "AutoModelForImageTextToText"),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
}
# More parameters than this is not a small model: a field that makes it large is missing in SIZES or OVERRIDES.
LARGEST = 60e6
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_blocks")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class TooLargeError(MemoryError):
    """The configuration of a type could not be made small."""


def type_names() -> list[str]:
    """Return the names of all types, causal language models first, each model class once."""
    import transformers.models.auto.modeling_auto as tables

    names: list[str] = []
    seen: set[tuple[str, Any]] = set()
    for family, (table, _) in FAMILIES.items():
        for model_type, model_class in getattr(tables, table).items():
            key = (model_type, model_class if isinstance(model_class, str) else tuple(model_class))
            if key not in seen:
                seen.add(key)
                names.append(model_type if family == "causal" else f"{family}:{model_type}")
    return names


def type_exists(name: str) -> bool:
    """Return whether the installed transformers has the model type or the class of a name, in any family.

    >>> type_exists("llama"), type_exists("masked_lm:BertForMaskedLM"), type_exists("image:no_such_type")
    (True, True, False)
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return split_name(name)[1] in CONFIG_MAPPING_NAMES or hasattr(transformers, split_name(name)[1])


def split_name(name: str) -> tuple[str, str]:
    """Return family and model type of a name.

    >>> split_name("llama"), split_name("speech:whisper")
    (('causal', 'llama'), ('speech', 'whisper'))
    """
    family, _, model_type = name.rpartition(":")
    return family or "causal", model_type


def make_config(name: str) -> Any:
    """Make the small configuration of a type.

    Args:
        name: see `type_names`.

    Returns:
        A configuration whose model has some 100,000 parameters.

    Raises:
        KeyError: when transformers does not know the type.
        Exception: whatever the configuration's own checks raise.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, model_type = split_name(name)
    own = {**OVERRIDES.get(model_type, {}), **OVERRIDES.get(name, {})}
    own.pop("model", None)
    named = own.pop("config", None)
    config = small_config(getattr(transformers, named) if named else CONFIG_MAPPING[model_type], own)
    if family == "causal" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True  # encoders that can also decode keep a cache only then
    return config


def small_config(cls: Any, own: dict[str, Any]) -> Any:
    """Make the small configuration of a class of configurations.

    Args:
        cls: the class.
        own: fields that are particular to it, as in `overrides.OVERRIDES`.

    Raises:
        Exception: whatever the configuration's own checks raise.
    """
    config = _small(cls, own)
    for field, token in TOKENS_OF_MEDIA.items():
        if isinstance(_read(config, field), int):
            with contextlib.suppress(AttributeError):  # some work it out
                setattr(config, field, token)
    return config


def _small(cls: Any, own: dict[str, Any] | None = None, default: Any = None) -> Any:
    """The small configuration of a class; ``own`` wins over what is known by the names of fields."""
    own = dict(own or {})
    default = default if default is not None else cls(**own.pop("default", {}))
    below: dict[str, Any] = {}
    for key in getattr(cls, "sub_configs", None) or {}:
        inner = getattr(default, key, None)
        if hasattr(inner, "to_dict"):
            overrides = own.pop(key, {})
            below[key] = overrides if hasattr(overrides, "to_dict") else _small(type(inner), overrides, inner)
    numbers, lists = _numbers(default), _lists(default, own)
    last: Exception | None = None
    for fields in _attempts({**numbers, **lists}, set(lists)):
        chosen = {key: value for key, value in {**fields, **own, **below}.items() if value is not ...}
        try:
            return cls(**chosen)
        except Exception as error:  # a check of the configuration; the next attempt states less
            last = last or error
    raise last if last is not None else RuntimeError(cls)


def _attempts(fields: dict[str, Any], lists: set[str]) -> Iterator[dict[str, Any]]:
    """Fields to construct a configuration with: all, then without those that a few of them compute themselves."""
    for without in (set(), {"head_dim"}, lists, lists | {"head_dim"}, {"head_dim", "v_head_dim"}):
        yield {key: value for key, value in fields.items() if key not in without}


def _numbers(default: Any) -> dict[str, Any]:
    held = {key: _read(default, key) for key in [*SIZES, *_TOKENS]}
    numbers = {
        key: SIZES[key] for key in SIZES if isinstance(held[key], (int, float)) and not isinstance(held[key], bool)
    }
    numbers |= {key: value for key, value in _TOKENS.items() if isinstance(held[key], (int, list))}
    for field, fields in ADJUSTMENTS:
        if _read(default, field) is not None:
            numbers |= {key: value for key, value in fields.items() if _read(default, key) is not None}
    return numbers


def _lists(default: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Lists with one entry per layer, cut to the first layer of every kind, and two layers at least."""
    count = next((name for name in _LAYER_COUNTS if isinstance(_read(default, name), int)), None)
    if count is None or count in own:
        return {}
    layers = _read(default, count)
    held = {key: value for key, value in vars(default).items() if isinstance(value, list) and len(value) == layers > 2}
    kinds = [tuple(str(value[index]) for value in held.values()) for index in range(layers)]
    chosen = sorted({kinds.index(kind) for kind in kinds})[:4]
    chosen = chosen if len(chosen) > 1 else [0, 1]
    if not held:
        return {}
    return {count: len(chosen), **{key: [value[index] for index in chosen] for key, value in held.items()}}


def _read(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # a few attributes are properties that need others
        return None


def make_model(name: str, *, seed: int = 0) -> Any:
    """Build the model of a type, in evaluation mode, with random weights.

    Args:
        name: see `type_names`.
        seed: the seed of the weights.

    Raises:
        TooLargeError: when the small configuration still makes a large model.
        Exception: whatever transformers raises when it cannot build the model here.
    """
    import transformers

    family, model_type = split_name(name)
    config = make_config(name)
    named = OVERRIDES.get(model_type, {}).get("model")
    build = getattr(transformers, named) if named else getattr(transformers, FAMILIES[family][1]).from_config
    model = built(build, config, seed)
    language = getattr(config, "default_language", ...)
    if language is None:  # adapters per language: which one is part of the input
        model.set_default_language(config.languages[0])
    return model


def built(build: Callable[[Any], Any], config: Any, seed: int) -> Any:
    """Build a small model, in evaluation mode, with random weights.

    Args:
        build: makes it of the configuration.
        config: its configuration.
        seed: the seed of the weights.

    Raises:
        TooLargeError: it is large nevertheless.
        Exception: whatever transformers raises when it cannot build the model here.
    """
    with torch.device("meta"):
        size = sum(weight.numel() for weight in build(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise TooLargeError(f"{size / 1e6:.0f} million parameters with the small configuration")
    torch.manual_seed(seed)
    model = build(config).eval()
    _break_ties(model)
    return model


def _break_ties(model: Any) -> None:
    """Make constant weights random: a router of zeros likes every expert alike, and who breaks the tie is left open.

    Norms of ones and biases of zeros would also hide that a program leaves them out.
    """
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.numel() > 1 and weight.min() == weight.max():
                weight += 0.1 * torch.randn_like(weight)


@functools.cache
def layer_classes(name: str) -> tuple[str, ...]:
    """Return the classes of the cache layers that the configuration of a type asks for, without building the model.

    Empty when the configuration does not state it.
    """
    try:
        return layer_classes_of(make_config(name))
    except Exception:  # no configuration
        return ()


def layer_classes_of(config: Any) -> tuple[str, ...]:
    """Return what :func:`layer_classes` does, of a configuration."""
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # no cache of that kind
        return ()
    return tuple(sorted({type(layer).__name__ for layer in layers}))


def window_of(config: Any) -> int | None:
    """Return the number of tokens after which something is forgotten, ``None`` when nothing is."""
    text = config.get_text_config(decoder=True)
    for field in WINDOW_FIELDS:
        window = getattr(text, field, None)
        if isinstance(window, int) and window > 0:
            return window
    return None
