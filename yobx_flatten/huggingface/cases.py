"""Make inputs of decode calls of a transformers model in different sizes, with KV caches that the model fills."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..core.private_names.of_torch import pytree
from ..errors import FlattenError, InvalidArgumentError, describe_class
from ..registry.recipe.aliases import PyTree, TransformersCache, TransformersConfig, TransformersModel
from .cache_names import argument_of, cache_of, forward_of, installed_name, name_in, named_for
from .decoders import has_states_alone, switch_of
from .layer_weights import device_of_inputs

# inputs that decode_inputs can make, without the cache
_DECODER = {"input_ids", "attention_mask", "position_ids", "use_cache"}
_ENCODER_DECODER = {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "attention_mask", "use_cache"}

_LONGEST = 1024
"""Largest number of tokens in a test input, because longer inputs take minutes."""


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Sizes of one call of a decoder: batch size, and numbers of cached, new, padding and encoder tokens.

    Attributes:
        batch: batch size; 2 by default.
        past: number of tokens in the KV cache before the call; 5 by default.
        new: number of tokens that the call reads; 3 by default.
        padding: number of padding tokens on the left of the first sample; 0 by default.
        source: number of tokens that the encoder reads (encoder-decoder models); 7 by default.

    Raises:
        InvalidArgumentError: when a size is not an int, or is too small.

    >>> DecodeSizes(batch=1, past=16, new=1)
    DecodeSizes(batch=1, past=16, new=1, padding=0, source=7)
    """

    batch: int = 2
    past: int = 5
    new: int = 3
    padding: int = 0
    source: int = 7

    def __post_init__(self) -> None:
        least = {"batch": 1, "past": 0, "new": 1, "padding": 0, "source": 1}
        for name, smallest in least.items():
            found = getattr(self, name)
            if type(found) is not int or found < smallest:
                raise InvalidArgumentError(
                    f"DecodeSizes: {name} must be an int of {smallest} or more, found {describe_class(found)}."
                )

    def __str__(self) -> str:
        return self._named(f"past {self.past}, new {self.new}")

    @property
    def without_cache(self) -> str:
        """The sizes of a call without a KV cache as text for a report, such as ``batch 2, length 8``."""
        return self._named(f"length {self.past + self.new}")

    def _named(self, tokens: str) -> str:
        padding = f", {self.padding} padded" if self.padding else ""
        return f"batch {self.batch}, {tokens}{padding}"


def why_not_resizable(model: TransformersModel, kwargs: Mapping[str, Any], cache_is: str) -> str | None:
    # cache_is: the name of the cache among the inputs; `""` without a cache
    if not hasattr(model, "config") or not callable(getattr(model, "get_input_embeddings", None)):
        return f"{type(model).__qualname__} is not a transformers model"
    if "encoder_outputs" in kwargs and not _encoder_reads_tokens(model):
        return f"its encoder reads {model.main_input_name}"
    if not {"input_ids", "decoder_input_ids"} & set(kwargs):
        return "the inputs contain no input_ids"
    cache = kwargs.get(cache_is)
    if type(cache).__name__ == "QuantizedCache" and not _is_fp8(cache):
        return "an empty quantized cache of this kind cannot be made"
    known = {*(_ENCODER_DECODER if "encoder_outputs" in kwargs else _DECODER), cache_is}
    unknown = [name for name, value in kwargs.items() if name not in known and isinstance(value, torch.Tensor)]
    return f"the package does not know which sizes {', '.join(unknown)} must have" if unknown else None


def ambiguous_without(model: TransformersModel, kwargs: Mapping[str, Any]) -> str | None:
    """Return a warning if results can differ between calls because ``token_type_ids`` is missing, else ``None``."""
    # The attention of PaliGemma (`use_bidirectional_attention`) is causal only by a mask, which is made from token
    # types. Without token types transformers drops a mask that looks like SDPA's own causal mask, and the layers then
    # see later tokens. With `attn_implementation="eager"`, with padding, or in a trace transformers keeps the mask.
    if kwargs.get("token_type_ids") is not None or not hasattr(model, "config") or kwargs.get("input_ids") is None:
        return None
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        return None
    text = model.config.get_text_config(decoder=True)
    if not getattr(text, "use_bidirectional_attention", None):
        return None
    return (
        f"{type(model).__qualname__} was called without token_type_ids. transformers then drops the mask in some "
        "calls, and eager results differ between calls. Pass token_type_ids (0 for the prefix, 1 for generated "
        "tokens)."
    )


def default_sizes(model: TransformersModel, cache: object = None) -> tuple[list[DecodeSizes], str | None]:
    """Choose sizes of test calls: fewer, as many and more tokens than the sliding window, some with padding."""
    # cache: the example's cache; a static cache has a limited capacity
    # returns: the sizes, and a remark if no size exceeds the window, or the length at which rotary angles change
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    static = [one for one in getattr(cache, "layers", ()) if hasattr(one, "max_cache_len") and not one.is_sliding]
    room = min([getattr(config, "max_position_embeddings", None) or _LONGEST, *(one.max_cache_len for one in static)])
    window = window if isinstance(window, int) and window >= 3 else None
    remark, limit = None, min(_LONGEST, room)
    if window is not None and 2 * window + 8 > limit:
        remark = f"No test case exceeds the sliding window of {window}: such a case needs more than {limit} tokens."
        window = None
    switch, across = switch_of(config.to_dict()), []
    if switch is not None and switch + 8 > _LONGEST:
        passed = f"No test case exceeds the length of {switch}, at which the model's rotary angles change."
        remark = passed if remark is None else f"{remark} {passed}"
    elif switch is not None and switch > 4:
        across = [DecodeSizes(1, switch - 2, 1), DecodeSizes(2, switch + 3, 2, padding=3)]
    if window is None:
        few, more, most = (max(1, min(past, room - 9)) for past in (6, 9, 17))  # three calls of three tokens follow
        padded = DecodeSizes(2, most, 2, padding=min(3, most))
        return [DecodeSizes(3, few, 1), DecodeSizes(1, more, 3), padded, *across], remark
    return [
        DecodeSizes(3, max(2, window // 2), 2, padding=1),
        DecodeSizes(1, window - 1, 1),
        DecodeSizes(2, window, 3),
        DecodeSizes(4, 2 * window + 3, 1, padding=window + 1),
        DecodeSizes(3, window + 2, 3),
        *across,
    ], remark


def decode_inputs(
    model: TransformersModel,
    sizes: DecodeSizes,
    like: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    tokens: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Make the inputs of one decode call, with a cache filled by running the model.

    Args:
        model: a causal or encoder-decoder Hugging Face model.
        sizes: the batch size, and the numbers of past, new and padding tokens.
        like: example inputs, which determine the names of the inputs and the kind of cache; by default ``input_ids``
            (or ``decoder_input_ids`` and ``encoder_outputs``), ``attention_mask`` and the cache. If ``like`` has no KV
            cache, the returned inputs contain all ``past + new`` tokens.
        seed: seed of the random tokens; 0 by default.
        tokens: the tokens to decode, integers of shape (batch, past + new); random by default.
        source: the tokens that the encoder reads, integers of shape (batch, source); random by default.

    Returns:
        Keyword arguments for the model's ``forward``.

    Raises:
        InvalidArgumentError: when ``model`` is not a Hugging Face model, or its encoder reads no tokens.
        FlattenError: when ``tokens`` or ``source`` does not have the shape that ``sizes`` states.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64)
    >>> inputs = decode_inputs(LlamaForCausalLM(config), DecodeSizes(batch=2, past=5, new=1))
    >>> {name: tuple(inputs[name].shape) for name in ("input_ids", "attention_mask")}
    {'input_ids': (2, 1), 'attention_mask': (2, 6)}
    >>> from yobx_flatten.huggingface.cache_names import cache_of
    >>> cache_of(inputs).get_seq_length()
    5
    """
    if not hasattr(model, "config") or not callable(getattr(model, "get_input_embeddings", None)):
        raise InvalidArgumentError(
            f"decode_inputs: {describe_class(type(model))} is not a Hugging Face model. Make inputs of other "
            'sizes, and pass each as a Case:\n    export_program(module, args, cases=[Case("five rows", other_args)])'
        )
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if encoder_decoder and not _encoder_reads_tokens(model):
        raise InvalidArgumentError(
            f"decode_inputs makes only tokens, but the encoder of {type(model).__qualname__} reads "
            f"{model.main_input_name}. Record a call instead:\n    with record_calls(model) as calls: "
            f"model.generate({model.main_input_name}, max_new_tokens=4)\n    calls.example('decode')"
        )
    if like is None:
        usual = ["input_ids", "attention_mask"]
        if encoder_decoder:
            usual = ["decoder_input_ids", "encoder_outputs", "attention_mask"]
        elif has_states_alone(model):
            usual = ["input_ids"]  # such models accept a mask of the new tokens only, and need none for decoding
        like = dict.fromkeys([*usual, argument_of(forward_of(model)) or installed_name()])
    like = named_for(forward_of(model), like)
    cache_is = name_in(like)
    if sizes.past == 0 and cache_is is not None:
        raise InvalidArgumentError(
            f"decode_inputs: past=0 would make an empty cache ({sizes}). Pass past=1 or more, or pass like= with "
            f"example inputs that have no {cache_is}."
        )
    generator = torch.Generator().manual_seed(seed)
    device = device_of_inputs(model)

    def given_or_random(name: str, given: torch.Tensor | None, length: int) -> torch.Tensor:
        shape = (sizes.batch, length)
        if given is None:
            vocabulary = model.config.get_text_config(decoder=True).vocab_size
            given = torch.randint(0, vocabulary, shape, generator=generator)
        elif tuple(given.shape) != shape:
            raise FlattenError(f"decode_inputs: {name} has shape {tuple(given.shape)}, but {sizes} needs {shape}.")
        return given.to(device)

    tokens = given_or_random("tokens", tokens, sizes.past + sizes.new)
    with torch.no_grad():
        read = given_or_random("source", source, sizes.source) if encoder_decoder else None
        made = _new_inputs(model, sizes, like, cache_is, tokens, read)
    if cache_is is not None:
        made = {name: contiguous(value) for name, value in made.items()}
    # values that are not tensors (use_cache=True, ...) are those of `like`
    return {name: made.get(name, value) for name, value in like.items()}


def _new_inputs(
    model: TransformersModel,
    sizes: DecodeSizes,
    like: Mapping[str, Any],
    cache_is: str | None,
    tokens: torch.Tensor,
    source: torch.Tensor | None,
) -> dict[str, Any]:
    """Return inputs for ``tokens``. If ``like`` has a KV cache, the first ``sizes.past`` tokens are in the cache."""
    # source: the tokens of the encoder; `None` for a model without an encoder
    mask = torch.ones_like(tokens)
    mask[0, : sizes.padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if source is None:
        ids_name, encoded, of_tokens = "input_ids", {}, {"attention_mask": mask, "position_ids": positions}
    else:
        source_mask = torch.ones_like(source)
        source_mask[0, sizes.source - min(2, sizes.source - 1) :] = 0  # encoders are padded on the right
        encoder_outputs = model.get_encoder()(input_ids=source, attention_mask=source_mask)
        encoded = {"encoder_outputs": encoder_outputs, "attention_mask": source_mask}
        ids_name, of_tokens = "decoder_input_ids", {"decoder_attention_mask": mask}
    made = {**encoded, ids_name: tokens, **of_tokens}
    if cache_is is None:
        return made
    past, new = slice(0, sizes.past), slice(sizes.past, None)
    prefill = {ids_name: tokens[:, past], "use_cache": True, **encoded}
    prefill |= {name: value[:, past] for name, value in of_tokens.items() if name in like}
    # an empty cache of the same class as the example's; `None` if the model makes its empty cache itself
    example: TransformersCache = like.get(cache_is)
    kind, fresh = type(example).__name__, None
    if kind == "QuantizedCache" and _is_fp8(example):
        fresh = type(example)("fp8", model.config)
    elif kind == "DynamicCache" and keeps_all(example) and slides(model.config.get_text_config(decoder=True)):
        fresh = type(example)()
    elif kind == "StaticCache":
        from transformers.cache_utils import StaticCache

        longest = max(getattr(layer, "max_cache_len", 0) for layer in example.layers)  # a dummy layer has no capacity
        fresh = StaticCache(config=model.config, max_cache_len=longest)
    filled = model(**prefill, **{cache_is: fresh})
    if source is None and cache_of(filled) is None:
        # generate() always passes a cache, and some models (Granite4Vision) do not make a cache themselves
        fresh = _new_dynamic_cache(model.config.get_text_config(decoder=True))
        filled = model(**prefill, **{cache_is: fresh})
    made |= {ids_name: tokens[:, new], cache_is: cache_of(filled)}
    return {**made, "position_ids": positions[:, new]} if source is None else made


def next_inputs(kwargs: Mapping[str, Any], outputs: Mapping[str, Any], seed: int = 0) -> dict[str, Any] | None:
    """Make inputs of the next decode call: the returned KV cache, new random tokens, and a longer attention mask."""
    cache_is, cache = name_in(kwargs), cache_of(outputs)
    encoder_decoder = "decoder_input_ids" in kwargs
    ids_name = "decoder_input_ids" if encoder_decoder else "input_ids"
    if cache_is is None or cache is None or kwargs[cache_is] is None or ids_name not in kwargs:
        return None
    if not pytree.tree_leaves(kwargs[cache_is]):  # a program for an empty cache does not accept a filled cache
        return None
    # a model can have a second cache, such as the encoder's cache of a streaming speech model
    returned = {name: outputs.get(name) for name in kwargs}
    following = {
        name: returned[name] if type(returned[name]) is type(given) and not isinstance(given, torch.Tensor) else given
        for name, given in kwargs.items()
    }
    following[cache_is] = cache
    ids = kwargs[ids_name]
    if outputs.get("logits") is not None:  # for a module with other outputs, the vocabulary is unknown
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, outputs["logits"].shape[-1], ids.shape, generator=generator)
        following[ids_name] = drawn.to(ids.device)
    mask_name = "decoder_attention_mask" if encoder_decoder else "attention_mask"
    if isinstance(kwargs.get(mask_name), torch.Tensor):
        mask = kwargs[mask_name]
        following[mask_name] = torch.cat([mask, mask.new_ones(ids.shape[:2])], dim=1)
    if isinstance(kwargs.get("position_ids"), torch.Tensor):
        following["position_ids"] = kwargs["position_ids"] + ids.shape[1]
    return following


def _encoder_reads_tokens(model: TransformersModel) -> bool:
    get_encoder = getattr(model, "get_encoder", None)
    return get_encoder is None or "input_ids" in inspect.signature(get_encoder().forward).parameters


def _new_dynamic_cache(config: TransformersConfig) -> TransformersCache:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=config)


def slides(config: TransformersConfig) -> bool:
    return any(getattr(layer, "is_sliding", False) for layer in _new_dynamic_cache(config).layers)


def keeps_all(cache: TransformersCache) -> bool:
    return all(type(layer).__name__ == "DynamicLayer" for layer in cache.layers)


def _is_fp8(cache: TransformersCache) -> bool:
    return {type(layer).__name__ for layer in cache.layers} == {"Fp8QuantizedLayer"}


def contiguous(value: PyTree) -> PyTree:
    """Return an object with all tensors inside it made contiguous. Lists, dicts and caches are changed in place."""
    # A slice (`ids[:, 5:]`, the keys of a layer beyond its window) has unusual strides; code that is compiled for one
    # kind of strides reads the other kind wrongly.
    # value: a tensor, or lists, tuples, dicts and transformers objects with tensors; a repeated tensor stays one tensor
    done: dict[int, tuple[Any, Any]] = {}

    def whole(part: Any) -> Any:
        if id(part) in done:
            return done[id(part)][1]
        done[id(part)] = part, part  # the reference keeps the id in use, and the entry ends a cycle
        found = part
        if isinstance(part, torch.Tensor):
            found = part.contiguous()
        elif type(part) is tuple:
            found = tuple(map(whole, part))
        elif isinstance(part, list):
            part[:] = map(whole, part)
        elif isinstance(part, dict):
            for key, item in list(part.items()):
                part[key] = whole(item)
        elif type(part).__module__.startswith("transformers") and not isinstance(part, (torch.nn.Module, type)):
            held = getattr(part, "__dict__", {})
            held.update((name, whole(item)) for name, item in list(held.items()))
        done[id(part)] = part, found
        return found

    return whole(value)
