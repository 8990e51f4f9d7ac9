"""Decode inputs for every family of models, and the loop that continues from them.

The text models get theirs from `yobx_flatten.decode_inputs`; here is what that function is not for: models whose
state is no ``Cache``, prompts with a picture, encoders that read pictures or sounds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from yobx_flatten import DecodeSizes, decode_inputs
from yobx_flatten.huggingface.cache_names import argument_of, cache_of, installed_name, name_in
from yobx_flatten.huggingface.decoders import has_states_alone

from .media import IMAGE_TOKEN, encoder_inputs, picture_of, reads_media
from .particular import PARTICULAR, NoCacheError, carried

__all__ = ["NoCacheError", "cache_name", "decode", "eager_loop", "go_on", "loop"]

# how models name a state of another kind, as input and as output
_STATE_NAMES = ("state", "past_buckets_states", "mems")
# what a call takes for each of its tokens
_PER_TOKEN = ("encoder_inputs_embeds", "image_attention_mask")


def cache_name(model: Any) -> str:
    """Return the name of the argument that takes the cache.

    Raises:
        NoCacheError: when the model has none of the names we know, or takes a picture in every call.
    """
    parameters = dict(inspect.signature(model.forward).parameters)
    picture = parameters.get("pixel_values")
    if picture is not None and picture.default is picture.empty:  # BLIP and its like read it again in every call
        raise NoCacheError(f"{type(model).__name__}.forward takes a picture in every call, and returns no cache")
    found = argument_of(model.forward)
    if found is None and "kwargs" in parameters and hasattr(model, "get_decoder"):
        found = argument_of(model.get_decoder().forward)  # handed on to the language model (VibeVoice)
    found = found or next((name for name in _STATE_NAMES if name in parameters), None)
    if found is None:
        raise NoCacheError(f"{type(model).__name__}.forward takes no cache, and none of {', '.join(_STATE_NAMES)}")
    return found


def decode(model: Any, sizes: DecodeSizes, seed: int = 0) -> dict[str, Any]:
    """Make the inputs of one decode call, with a cache filled by running the model.

    Args:
        model: a model of `models.make_model`.
        sizes: batch, tokens seen, tokens of this call, padding.
        seed: the seed of the tokens.

    Raises:
        NoCacheError: when the model keeps no cache.
        Exception: whatever the model raises.
    """
    name = cache_name(model)
    own = PARTICULAR.get(model.config.model_type)
    kwargs: dict[str, Any] | None
    if own is not None:
        with torch.no_grad():
            kwargs = own(model, sizes, seed)
    elif name in _STATE_NAMES or has_states_alone(model):
        kwargs = _state_inputs(model, sizes, seed, name)
    elif reads_media(model):
        kwargs = _encoded_inputs(model, sizes, seed)
    else:
        kwargs = _picture_inputs(model, sizes, seed) or _text_inputs(model, sizes, seed)
    if kwargs.get(name) is None:
        raise NoCacheError(f"{type(model).__name__} returned no {name}")
    # tokens are cut from a longer row; the strides of the cut would be part of the program in some of the ways
    return {key: value.contiguous() if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}


def _tokens(model: Any, sizes: DecodeSizes, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (sizes.batch, sizes.past + sizes.new), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, : sizes.padding] = 0
    return tokens, mask


def _text_inputs(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    return decode_inputs(model, sizes, seed=seed)


def _state_inputs(model: Any, sizes: DecodeSizes, seed: int, name: str) -> dict[str, Any]:
    """Inputs of one token: most state space models start anew if they get several tokens at once."""
    tokens, mask = _tokens(model, DecodeSizes(sizes.batch, sizes.past, 1, sizes.padding), seed)
    takes = inspect.signature(model.forward).parameters
    prefill = {"attention_mask": mask[:, : sizes.past]} if "attention_mask" in takes and sizes.padding else {}
    with torch.no_grad():
        outputs = model(input_ids=tokens[:, : sizes.past], use_cache=True, **prefill)
    keep = {"use_cache": True} if "use_cache" in takes else {}  # XLNet always does
    return {"input_ids": tokens[:, sizes.past :], name: outputs.get(name, cache_of(outputs)), **keep}


def _encoded_inputs(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any]:
    tokens, _ = _tokens(model, sizes, seed)
    with torch.no_grad():
        read = encoder_inputs(model, sizes.batch, torch.Generator().manual_seed(seed + 1))
        encoded = model.get_encoder()(**read)
        outputs = model(decoder_input_ids=tokens[:, : sizes.past], encoder_outputs=encoded, use_cache=True)
    return {
        "decoder_input_ids": tokens[:, sizes.past :],
        "encoder_outputs": encoded,
        installed_name(): cache_of(outputs),
    }


def _picture_inputs(model: Any, sizes: DecodeSizes, seed: int) -> dict[str, Any] | None:
    """A prompt that begins with a picture; ``None`` when the model takes none, or none that we can make."""
    found = picture_of(model, sizes.batch, torch.Generator().manual_seed(seed + 1))
    if found is None:
        return None
    read, length = found
    tokens, mask = _tokens(model, sizes, seed)
    tokens = tokens % IMAGE_TOKEN
    places = tokens.new_full((sizes.batch, length), IMAGE_TOKEN)
    start = sizes.padding
    tokens = torch.cat([tokens[:, :start], places, tokens[:, start:]], dim=1)
    mask = torch.cat([mask[:, :start], torch.ones_like(places), mask[:, start:]], dim=1)
    past = length + sizes.past
    prefill = {"input_ids": tokens[:, :past], "attention_mask": mask[:, :past], **read}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inspect.signature(model.forward).parameters:
            prefill[name] = (prefill["input_ids"] == IMAGE_TOKEN).long()
    try:
        with torch.no_grad():
            cache = cache_of(model(**prefill, use_cache=True))
    except Exception:  # the form was right for the encoder, but not for the prompt
        cache = None
    positions = _positions(model, mask, past)
    if cache is None:
        return None
    return {"input_ids": tokens[:, past:], "attention_mask": mask, **positions, installed_name(): cache}


def _positions(model: Any, mask: torch.Tensor, past: int) -> dict[str, torch.Tensor]:
    """Positions of time, height and width where a picture takes fewer of them than it has tokens.

    Such models remember the difference of their last prompt, as an attribute; it would be a constant of the program.
    """
    holder = next((one for one in model.modules() if getattr(one, "rope_deltas", None) is not None), None)
    if holder is None:
        return {}
    after = mask.cumsum(-1)[:, past:] - 1 + holder.rope_deltas.view(-1, 1)
    holder.rope_deltas = None
    axes = (model.config.get_text_config(decoder=True).rope_parameters or {}).get("mrope_section", (1, 1, 1))
    return {"position_ids": after.expand(len(axes), -1, -1)}


def following(kwargs: dict[str, Any], outputs: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Make the inputs of the next call: the cache that came out, these tokens, a longer mask."""
    name = _cache_in(kwargs)
    ids = _ids_name(kwargs)
    mask = "attention_mask" if ids == "input_ids" else "decoder_attention_mask"
    after = {**kwargs, name: outputs[name] if name in _STATE_NAMES else cache_of(outputs), ids: tokens}
    after |= {one: value for one, value in carried(outputs).items() if kwargs.get(one) is not None}
    for one in _PER_TOKEN:
        if isinstance(kwargs.get(one), torch.Tensor):
            after[one] = kwargs[one][:, : kwargs[one].shape[1] * tokens.shape[1] // kwargs[ids].shape[1]]
    if isinstance(kwargs.get(mask), torch.Tensor):
        after[mask] = torch.cat([kwargs[mask], kwargs[mask].new_ones(tokens.shape[:2])], dim=1)
    if isinstance(kwargs.get("position_ids"), torch.Tensor):
        after["position_ids"] = kwargs["position_ids"][..., -1:] + 1 + torch.arange(tokens.shape[1])
    return after


def _cache_in(kwargs: dict[str, Any]) -> str:
    return name_in(kwargs) or next(name for name in _STATE_NAMES if name in kwargs)


def _ids_name(kwargs: dict[str, Any]) -> str:
    return "input_ids" if "input_ids" in kwargs else "decoder_input_ids"


def _likeliest(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The next token of each row; of each channel where a step has several."""
    if ids.dim() == 2:
        return logits[:, -1:].argmax(-1)
    if logits.shape[0] == ids.shape[0]:  # only the first channel is predicted
        return logits[:, -1:, None].argmax(-1).expand(-1, -1, ids.shape[2])
    return logits[:, -1].argmax(-1).view(ids.shape[0], 1, ids.shape[2])


def loop(call: Callable[..., Any], kwargs: dict[str, Any], steps: int = 3, seed: int = 7) -> list[torch.Tensor]:
    """Call ``steps`` times, each time with the cache that came out of the call before; return the logits.

    The tokens of the later calls are random and the same for every ``call``, so that two loops can be compared.
    """
    kwargs, logits = copy.deepcopy(kwargs), []
    for step in range(steps):
        with torch.no_grad():
            outputs = call(**kwargs)
        logits.append(outputs.logits)
        ids = kwargs[_ids_name(kwargs)]
        generator = torch.Generator().manual_seed(seed + step)
        tokens = torch.randint(0, outputs.logits.shape[-1], ids.shape, generator=generator)
        kwargs = following(kwargs, outputs, tokens)
    return logits


def eager_loop(model: Any, kwargs: dict[str, Any], steps: int = 3) -> list[torch.Tensor]:
    """What the model itself does in `loop`."""
    return loop(model, kwargs, steps)


def go_on(model: Any, kwargs: dict[str, Any], cache: Any, steps: int = 8) -> list[torch.Tensor]:
    """Generate greedily from a cache, which is changed, and return the logits of each step."""
    name = _cache_in(kwargs)
    kwargs, logits = {**kwargs, name: cache}, []
    for _ in range(steps):
        with torch.no_grad():
            outputs = model(**kwargs)
        logits.append(outputs.logits)
        ids = kwargs[_ids_name(kwargs)]
        kwargs = following(kwargs, outputs, _likeliest(outputs.logits, ids))
    return logits
