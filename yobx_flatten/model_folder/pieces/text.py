"""Split a model into modules to export, with example inputs and test cases of different sizes."""

# text                 tokens ──> model ──> logits, cache           one file; it also takes an empty cache
# text, sound, image   encoder_model ──> decoder_model (first token) ──> decoder_with_past_model (every other)
# image and text       see `vision_language`

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.export import Dim

from ...core.effects import undisturbed
from ...core.private_names.of_torch import pytree
from ...errors import GenerationError, InvalidArgumentError
from ...errors.failures import result_or
from ...export.proof.eager_runs import Case
from ...huggingface import decoders
from ...huggingface.builders import make_dynamic_cache, make_encoder_decoder_cache
from ...huggingface.cache_names import CACHE, argument_of, cache_of, installed_name
from ...huggingface.cases import DecodeSizes, decode_inputs, default_sizes, keeps_all, slides
from ...huggingface.decoders import pair_of
from ...registry.recipe.aliases import PlainCache, TransformersCache, TransformersModel
from ...trees.shapes import dynamic_shapes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Piece:
    stem: str  # file name without suffix
    module: torch.nn.Module  # the module to export
    kwargs: Mapping[str, Any]  # the example
    cases: Sequence[Case]  # test cases of other sizes
    dynamic_shapes: Any = "auto"  # `"auto"`, a specification, or `None` if every size is fixed
    has_rows: bool = True  # whether the first axis of the inputs is the batch
    narrower: Any = None  # a specification with fewer dynamic sizes, used if the export with `dynamic_shapes` fails
    remarks: Sequence[str] = ()  # notes for the report
    keeps_more: bool = False  # whether the cache keeps tokens that the model's own cache would drop


@dataclasses.dataclass(frozen=True)
class Split:
    rows: int | None = None  # a fixed number of rows of every example and case; `None` for a dynamic number
    # whether sliding-window layers keep all tokens in the cache, and mask the tokens outside their window
    whole_cache: bool = False
    logits: str = "all"  # positions whose scores a decoder returns: `"all"` or `"last"`
    proof: str = "full"  # a decoder gets only the cases of this proof, because each case needs a call of the model
    word_times: bool = False  # whether a Whisper decoder returns the attention weights for word times
    for_genai: bool = False  # whether to make the files for onnxruntime-genai, see `genai`

    def named(self, words: Sequence[str], make: Callable[..., T], *sizes: tuple[int, ...]) -> dict[str, T]:
        """Make the inputs of test cases of several sizes; the names of the test cases are like ``batch 3, past 4``."""
        found = [(self.rows or rows, *others) for rows, *others in sizes]
        names = [", ".join(f"{word} {size}" for word, size in zip(words, one, strict=False)) for one in found]
        return {name: make(*one) for name, one in zip(names, found, strict=True)}


EVERY = Split()  # files for all batch sizes, with all test inputs
_VARYING = {0: Dim.AUTO, 2: Dim.AUTO}  # dynamic axes of a cache that is passed as a list: rows and length


def pieces_of_calls(
    modules: Mapping[str, torch.nn.Module],
    example: Sequence[Mapping[str, Any]],
    others: Mapping[str, Sequence[Mapping[str, Any]]],
    shapes: Mapping[str, Mapping[str, Any]],
    steps: int = 1,
) -> list[Piece]:
    """Return, for each module, a description of its exported file: inputs, dynamic shapes and test cases."""
    # shapes: dynamic shapes of single inputs, by file; steps: number of calls of the last module in each case
    pieces = []
    for place, (stem, module) in enumerate(modules.items()):
        inputs, count = dict(example[place]), steps if place + 1 == len(modules) else 1
        varying = dynamic_shapes(inputs)
        if "cache" in inputs:
            varying["cache"] = pytree.tree_map(lambda _: _VARYING, inputs["cache"])
        cases = [Case(name, (), made[place], steps=count) for name, made in others.items()]
        pieces.append(Piece(stem, module, inputs, cases, {**varying, **shapes.get(stem, {})}))
    return pieces


def decoder_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    own = model
    model = decoders.StateDecoder(model) if decoders.StateDecoder.fits(model) else model
    takes = inspect.signature(model.forward).parameters
    cache_is = argument_of(model.forward)
    if cache_is is None or (decoders.has_states_alone(model) and not isinstance(model, decoders.StateDecoder)):
        raise GenerationError(
            f"{type(model).__qualname__} takes no {CACHE} that can begin empty, so one file cannot serve both the "
            "first call and later calls. Export two files, and pass the file for the first call as prefill:\n"
            "    OnnxGenerator(path, prefill=first_path)"
        )
    names = [name for name in ("input_ids", "attention_mask", "position_ids", cache_is) if name in takes]
    like: dict[str, Any] = dict.fromkeys(names)
    if split.logits not in ("all", "last"):
        raise InvalidArgumentError(f'logits must be "all" or "last", found {split.logits!r}.')
    if split.logits == "last":
        if "logits_to_keep" not in takes:
            raise InvalidArgumentError(f'{type(model).__qualname__} takes no logits_to_keep. Leave logits="last" out.')
        like["logits_to_keep"] = 1
    if split.whole_cache and slides(model.config.get_text_config(decoder=True)):
        from transformers.cache_utils import DynamicCache

        like[cache_is] = DynamicCache()
    every = (DecodeSizes(), *default_sizes(model)[0])
    first, *others = [dataclasses.replace(sizes, batch=split.rows or sizes.batch) for sizes in every]
    if split.proof == "sample":
        others = [max(others, key=lambda sizes: sizes.batch * (sizes.past + sizes.new))]
    elif split.proof == "none":
        others = []
    example = decode_inputs(model, first, like)
    remarks = note_on_other_inputs(own, example)
    cases = [
        Case(str(sizes), (), decode_inputs(model, sizes, like, seed), steps=3) for seed, sizes in enumerate(others, 1)
    ]
    shapes: Any = "auto"
    if decoders.counts_by_itself(example[cache_is]) and decoders.why_not_sliding(model, example, cache_is) is None:
        decoder = decoders.SlidingDecoder(model, example, cache_is)
        cases = [Case(case.name, (), decoder.inputs(case.kwargs)) for case in cases]
        model, shapes, example = decoder, decoder.shapes(dynamic_shapes(example)), decoder.inputs(example)
    cache = cache_of(example)
    slid = type(cache).__name__ == "DynamicCache" and slides(own.config.get_text_config(decoder=True))
    return [Piece("model", model, example, cases, shapes, remarks=remarks, keeps_more=slid and keeps_all(cache))]


class Encoder(torch.nn.Module):
    def __init__(self, model: TransformersModel) -> None:
        super().__init__()
        self.encoder = model.get_encoder()


class TextEncoder(Encoder):
    def forward(self, input_ids: Any, attention_mask: Any) -> dict[str, Any]:
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return {"last_hidden_state": found.last_hidden_state}


class MediaEncoder(Encoder):
    """An encoder of inputs other than tokens: a spectrogram, sound samples (Moonshine) or pictures (TrOCR)."""

    def forward(self, **read: Any) -> dict[str, Any]:
        return {"last_hidden_state": self.encoder(*read.values()).last_hidden_state}


_READ = ("input_ids", "input_features", "input_values", "pixel_values")


class _Decoder(torch.nn.Module):
    def __init__(self, model: TransformersModel, read_as: Callable[..., Any], heads: Sequence[Head] = ()) -> None:
        super().__init__()
        self.model, self.heads, self.read_as = model, heads, read_as
        self.cache_is = argument_of(model.forward) or installed_name()

    def decode(self, tokens: Any, hidden: Any, mask: Any, cache: Any) -> Any:
        masks = {} if mask is None else {"attention_mask": mask}
        read = self.read_as(last_hidden_state=hidden)  # Moonshine accepts only its own class
        with recorded_weights(self.model, {layer for layer, _ in self.heads}) as found_weights:
            found = self.model(
                decoder_input_ids=tokens, encoder_outputs=read, use_cache=True, **{self.cache_is: cache}, **masks
            )
        by_layer: dict[str, dict[str, torch.Tensor]] = {}
        for layer, head in self.heads:
            by_layer.setdefault(str(layer), {})[str(head)] = found_weights[layer][:, head]
        return found, {"cross_attentions": by_layer} if by_layer else {}


class FirstDecoder(_Decoder):
    """The decoder's first call, which returns keys and values of the encoder's features and of the first tokens."""

    def forward(self, input_ids: Any, encoder_hidden_states: Any, encoder_attention_mask: Any = None) -> dict[str, Any]:
        found, weights = self.decode(input_ids, encoder_hidden_states, encoder_attention_mask, None)
        cache = cache_of(found)
        own, cross = cache.self_attention_cache, cache.cross_attention_cache
        # a cache may have as many layers as the encoder (Donut), and the decoder fills fewer
        sides = [pair for pair in zip(own.layers, cross.layers, strict=True) if pair[0].keys is not None]
        layers = [{"decoder": pair_of(decoder), "encoder": pair_of(encoder)} for decoder, encoder in sides]
        return {"logits": found.logits, **weights, "present": layers}


class NextDecoder(_Decoder, decoders.Continued):
    """The decoder's later calls, which read the whole KV cache, and return only self-attention keys and values."""

    def forward(
        self, input_ids: Any, cache: PlainCache, encoder_attention_mask: Any = None, encoder_hidden_states: Any = None
    ) -> dict[str, Any]:
        keys = features_of(cache)
        projection = getattr(self.model, "enc_to_dec_proj", None)  # its input has the width of the encoder
        hidden = keys if projection is None else keys.new_zeros(*keys.shape[:2], projection.in_features)
        found, weights = self.decode(input_ids, hidden, encoder_attention_mask, filled_cache(cache))
        layers = cache_of(found).self_attention_cache.layers
        return {"logits": found.logits, **weights, "present": [{"decoder": pair_of(layer)} for layer in layers]}


def filled_cache(cache: PlainCache) -> TransformersCache:
    own, cross = ([(layer[side]["key"], layer[side]["value"]) for layer in cache] for side in ("decoder", "encoder"))
    return make_encoder_decoder_cache(make_dynamic_cache(own), make_dynamic_cache(cross))


def features_of(cache: PlainCache) -> torch.Tensor:
    """Return a placeholder for the encoder's features, of which a decoder with a filled cache reads only the shape."""
    keys: torch.Tensor = cache[0]["encoder"]["key"]
    return keys.transpose(1, 2).flatten(2)


def encoder_decoder_pieces(model: TransformersModel, split: Split = EVERY) -> list[Piece]:
    heads = heads_of(model) if split.word_times else ()
    reads = input_name(model)
    if reads not in _READ:
        raise GenerationError(
            f"{type(model).__qualname__} reads {reads}, but exported encoders read only {', '.join(_READ)}. "
            "Record a call and export it:\n    with record_calls(model) as calls: model.generate(...)"
        )
    if reads != "input_ids" and model.get_encoder().main_input_name == "input_ids":  # BLIP-2 with T5
        raise GenerationError(
            f"{type(model).__qualname__} inserts {reads} between the encoder's tokens, which folders do not support. "
            "Export one call, with decoder_input_ids among its inputs:\n    export_onnx(model, kwargs=inputs, "
            "path=...)"
        )
    encoder = TextEncoder(model) if reads == "input_ids" else MediaEncoder(model)
    read_as = encoder_output_class(model)
    first, following = FirstDecoder(model, read_as, heads), NextDecoder(model, read_as, heads)

    @torch.no_grad()
    def calls(batch: int, source: int, past: int, new: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        masks: dict[str, Any] = {}
        if reads != "input_ids":
            read = {reads: encoder_input(model, batch, 400 * source)}
        else:
            mask = torch.ones(batch, source, dtype=torch.int64)
            mask[0, source - 2 :] = 0
            read = {"input_ids": random_tokens(model, (batch, source)), "attention_mask": mask}
            masks["encoder_attention_mask"] = mask
        hidden = encoder(**read)["last_hidden_state"]
        begun = {"input_ids": random_tokens(model, (batch, past)), "encoder_hidden_states": hidden, **masks}
        cache = first(**begun)["present"]
        gone_on = {"input_ids": random_tokens(model, (batch, new)), "cache": cache, **masks}
        return read, begun, gone_on

    modules = {"encoder_model": encoder, "decoder_model": first, "decoder_with_past_model": following}
    # all sizes and their sum differ, because a trace would fix the result of a comparison of two sizes
    new, call = 3, calls(split.rows or 2, 7, 5, 3)[2]
    try:
        with torch.no_grad(), undisturbed(decoder=following):
            following(**call)
    except (AssertionError, ValueError, IndexError, RuntimeError):  # ProphetNet refuses several new tokens
        new = 1
    example = calls(split.rows or 2, 7, 5, new)
    others = split.named(("batch", "source", "past", "new"), calls, (1, 9, 1, 1), (3, 5, 4, 1))
    shapes: dict[str, dict[str, Any]] = {"decoder_with_past_model": {"input_ids": {0: Dim.AUTO}} if new == 1 else {}}
    if reads == "pixel_values":  # pictures have the size in the configuration
        shapes["encoder_model"] = {"pixel_values": {0: Dim.AUTO}}
    if reads == "input_ids":  # the decoders use the same name for this axis
        shapes["encoder_model"] = {name: {0: Dim.AUTO, 1: "encoder_sequence_length"} for name in example[0]}
    return pieces_of_calls(modules, example, others, shapes, steps=3)


def input_name(model: TransformersModel) -> str:
    """Return the name of a model's main input; for a speech encoder-decoder, the encoder's main input."""
    name: str = model.main_input_name
    is_either = name == "inputs" and getattr(model.config, "is_encoder_decoder", False)
    return model.get_encoder().main_input_name if is_either else name


@torch.no_grad()
def encoder_output_class(model: TransformersModel) -> Callable[..., Any]:
    reads = input_name(model)
    if reads == "input_ids":
        tokens = random_tokens(model, (1, 4))
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    else:
        given = {reads: encoder_input(model, 1, 4000)}
    found = model.get_encoder()(**given)
    return (lambda last_hidden_state: (last_hidden_state,)) if isinstance(found, tuple) else type(found)


def encoder_input(model: TransformersModel, batch: int, samples: int) -> torch.Tensor:
    reads = input_name(model)
    if reads == "input_features":
        names = ("num_mel_bins", "max_source_positions")
        missing = next((name for name in names if not hasattr(model.config, name)), None)
        if missing is not None:
            raise GenerationError(
                f"{type(model).__qualname__} is an audio encoder-decoder unlike Whisper: its configuration has no "
                f"{missing}, so folders do not support it. Record a call and export that:\n    with "
                "record_calls(model) as calls: model.generate(...)"
            )
        # the encoder halves the number of frames, and accepts only this number
        frames = 2 * model.config.max_source_positions
        return random_values(model, (batch, model.config.num_mel_bins, frames), batch)
    shape: tuple[int, ...] = (batch, samples)
    if reads == "pixel_values":
        config = getattr(model.config, "encoder", model.config)
        shape = (batch, getattr(config, "num_channels", 3), *image_size(config))
    return random_values(model, shape, batch)


def image_size(config: Any) -> tuple[int, int]:
    """Return height and width of a model's pictures, from its (possibly nested) configuration; 224 by default."""
    inner = (config, *(getattr(config, name, None) for name in ("vision_config", "backbone_config")))
    found = next((size for size in (getattr(one, "image_size", None) for one in inner) if size), 224)
    return (found, found) if isinstance(found, int) else (int(found[0]), int(found[1]))


def random_values(model: TransformersModel, shape: Sequence[int], seed: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) if seed is None else seed)
    return torch.randn(tuple(shape), generator=generator).to(model.dtype)


def random_tokens(model: TransformersModel, shape: tuple[int, int]) -> torch.Tensor:
    # CANINE reads characters, and has no vocab_size
    vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or 256
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(sum(shape)))


Head = tuple[int, int]  # of cross-attention: the index of the decoder layer, and of the head in this layer


def heads_of(model: TransformersModel) -> list[Head]:
    """Return the attention heads that a model's generation configuration names for word timestamps."""
    stated = getattr(getattr(model, "generation_config", None), "alignment_heads", None)
    if not stated or not hasattr(model, "_extract_token_timestamps"):
        raise InvalidArgumentError(
            "word_times=True needs a Whisper model whose generation_config has alignment_heads, but this "
            f"{type(model).__qualname__} has none. Set model.generation_config.alignment_heads, a list of [layer, "
            "head], or leave word_times= out."
        )
    layers, heads = model.config.decoder_layers, model.config.decoder_attention_heads
    for layer, head in stated:
        if not (0 <= layer < layers and 0 <= head < heads):
            raise InvalidArgumentError(
                f"generation_config.alignment_heads has [{layer}, {head}], but the decoder has {layers} layers of "
                f"{heads} heads. Set alignment_heads to pairs [layer, head] of this decoder."
            )
    return sorted({(int(layer), int(head)) for layer, head in stated})


@contextlib.contextmanager
def recorded_weights(model: TransformersModel, layers: Collection[int]) -> Iterator[dict[int, torch.Tensor]]:
    """In a ``with`` block, record the cross-attention weights of decoder layers in the returned dict, by layer."""
    found: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as undone:
        for index in layers:
            attention = model.model.decoder.layers[index].encoder_attn
            # eager attention, because fused attention returns no weights
            before, eager = attention.config, copy.copy(attention.config)
            eager._attn_implementation = "eager"

            def keep(_module: Any, _given: Any, returned: Any, index: int = index) -> None:
                found[index] = returned[1]

            undone.callback(setattr, attention, "config", before)
            attention.config = eager
            undone.callback(attention.register_forward_hook(keep).remove)
        yield found


_NAMES = ("max_position_embeddings", "max_target_positions", "n_positions", "n_ctx")
_MOST = 2048  # largest number of tokens in a call that tests whether the table of positions ends


@torch.no_grad()
def positions_of(model: TransformersModel, *, is_large: bool) -> int | None:
    """Return the size of a model's table of position embeddings; ``None`` without a table, or if unknown."""
    # is_large: whether a call of many tokens takes too long; models that take position_ids are tested with one token
    config = model.config.get_text_config(decoder=True)
    stated = next((getattr(config, name) for name in _NAMES if type(getattr(config, name, None)) is int), 0)
    takes = inspect.signature(model.forward).parameters
    is_decoder = not getattr(model.config, "is_encoder_decoder", False)
    if stated < 2 or (is_decoder and model.main_input_name != "input_ids"):
        return None
    by_position = is_decoder and "position_ids" in takes
    if not by_position and (is_large or stated > _MOST):
        return None

    def call(last: int) -> bool:
        tokens = torch.zeros(1, 1 if by_position else last + 1, dtype=torch.int64)
        with undisturbed(model=model):  # a model may recompute its rotary angles for large positions
            if is_decoder:
                more = {"position_ids": torch.tensor([[last]])} if by_position else {}
                model(input_ids=tokens, use_cache=False, **more)
            else:
                of_encoder = getattr(model.config, "encoder", model.config)  # a model of two configurations
                size = getattr(of_encoder, "d_model", None) or of_encoder.hidden_size
                read = encoder_output_class(model)(last_hidden_state=torch.zeros(1, 2, size, dtype=model.dtype))
                model(decoder_input_ids=tokens, encoder_outputs=read, use_cache=False)
        return True

    def is_read(last: int) -> bool:
        return result_or(lambda: call(last), lambda error: False)  # each model has its own errors

    # the last position can be read, and the next one cannot
    return stated if is_read(stated - 1) and not is_read(stated) else None


# arguments that an export may leave out: positions, masks, labels, options
_NO_DATA = re.compile(
    r"input_ids|inputs_embeds|token_type_ids|position_ids|(?!pixel_mask|attention_mask).*_mask|.*mask_.*|.*labels?|"
    r"(start|end)_positions|p_mask|"
    r"is_impossible|cls_index|loss_.*|return_.*|output_.*|use_.*|training|encoder_.*|decoder_.*|cross_.*|"
    r"interpolate_.*|.*cache.*|mems|logits_to_keep|kwargs|cu_seq.*|max_(length|seq).*|mm_.*|"
    r"past_.*|state|shared_kv_states|per_layer_inputs|bool_masked_pos|noise|speaker_id|speaking_rate|perm_mask|target_mapping|cls_idx|num_.*"
)


def note_on_other_inputs(model: TransformersModel, names: Collection[str]) -> list[str]:
    takes = inspect.signature(model.forward).parameters.values()
    others = [one.name for one in takes if "Tensor" in str(one.annotation) and not _NO_DATA.fullmatch(one.name)]
    others = [name for name in others if name not in names and name != argument_of(model.forward)]
    if not others:
        return []
    return [
        f"{type(model).__qualname__} also takes {', '.join(others)}, and the file is exported without these inputs. To "
        "export them: export_onnx(model, kwargs=inputs, path=...)"
    ]
