"""Define a Hugging Face model that runs exported files in the ``generate`` of transformers."""

# keywords of generate ──> GenerationMixin: processors, samples, beams, candidates, streamers
#                              │ forward(tokens, mask, FileCache)
#                              v
#                    Steps: the inputs of the files ──> runner.step, with the cache in the memory of the library

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from ..core.files.document import damage_as
from ..errors import GenerationError, InvalidArgumentError, describe_class
from ..huggingface.cache_names import CACHE, installed_name
from ..runners.ports import is_present
from .pictures import Pictures
from .sampling import other_loops
from .settings import Documents, refusals_named, settings_of
from .stand_ins import FileCache, ModelWithoutWeights, config_from, exported_class, named_class
from .steps import OF_IMAGES, OF_VIDEOS, READ, Steps, TextState, check_given

_DRAFTS: Any = GenerationMode.ASSISTED_GENERATION
# a quantized cache does not keep exact values, and another loop manages a paged cache
_OTHER_CACHES = ("quantized", "paged")
# mm_token_type_ids is not read: the tokens of the prompt also state where pictures are
_OF_PICTURES = (*OF_IMAGES, *OF_VIDEOS, "pixel_attention_mask", "mm_token_type_ids")


class EncoderOfFiles(torch.nn.Module):
    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps
        ports = steps.parts.encoder.ports if steps.parts.encoder is not None else {}
        self.main_input_name = next((name for name in READ if name in ports), "input_ids")
        # Whisper's loop multiplies these strides to get the number of sound frames per position
        self.conv1, self.conv2 = types.SimpleNamespace(stride=(1,)), types.SimpleNamespace(stride=(2,))

    def forward(
        self,
        read: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        # for word times, Whisper's loop passes output_attentions to the encoder and to the decoder
        known = {"return_dict", "output_attentions"} if self.steps.heads else {"return_dict"}
        for name, value in others.items():
            if value is not None and value is not False and name not in known:
                raise InvalidArgumentError(f"{name}: the exported encoder returns only features. Leave {name} out.")
        given = {"input_features": input_features, "input_values": input_values, "pixel_values": pixel_values}
        if read is not None:
            given |= {self.main_input_name: read}
        found = {name: value for name, value in given.items() if value is not None}
        input_ids = found.pop("input_ids", input_ids)
        context, _batch = self.steps.encode(input_ids, attention_mask, found)
        made = BaseModelOutput(last_hidden_state=context["encoder_hidden_states"])
        for name, keys in context.items():  # entries of the output, because beam search repeats the rows of each entry
            if is_present(name):
                made[name] = keys
        return made


@dataclasses.dataclass(frozen=True)
class Shown:
    """Holds a prompt's pictures and videos in an object that transformers' generation loops leave unchanged."""

    pictures: Sequence[Pictures]  # pictures and videos
    rows: int  # number of rows of the prompt, before a loop repeats rows
    seen: int  # number of tokens in the cache when the pictures were passed


class FileModel(ModelWithoutWeights):
    """A Hugging Face model without weights: transformers' ``generate`` calls ``forward``, which runs exported files."""

    _is_stateful = False

    def __init__(self, steps: Steps) -> None:
        ModelWithoutWeights.__init__(self, config_from(_stated(steps), encoder=steps.parts.encoder is not None))
        self.steps = steps
        self._steps: dict[str | None, Steps] = {None: steps}
        settings = steps.settings
        documents = settings.documents or Documents({}, {})
        own = settings_of(documents.config, documents.generation)
        with damage_as(GenerationError, "generation_config.json"):
            if documents.generation:
                stated = copy.deepcopy(dict(documents.generation))
                stated.pop("_from_model_config", None)  # transformers < 5 compares it with the configuration
                self.generation_config = GenerationConfig.from_dict(stated)
            else:
                self.generation_config = GenerationConfig.from_model_config(self.config)
        of_tokens = ("pad_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
        for name in ("eos_token_id", *of_tokens, "max_new_tokens", "max_length"):
            ours = "eos_token_ids" if name == "eos_token_id" else name
            if (value := getattr(settings, ours)) != getattr(own, ours):
                setattr(self.generation_config, name, list(value) or None if isinstance(value, tuple) else value)
        if steps.parts.encoder is not None:
            encoder = EncoderOfFiles(steps)
            self.main_input_name = encoder.main_input_name
            if hasattr(type(self), "detect_language"):  # Whisper's loop
                self.model = torch.nn.Module()
                self.model.config, self.model.encoder = self.config, encoder
            else:
                self.encoder = encoder
        self.eval()

    def use_adapter(self, name: str | None) -> None:
        if name not in self._steps:
            plain = self._steps[None]
            assert name is not None
            self._steps[name] = Steps(plain.parts.with_adapter(self.of_folder, name), plain.settings)
        self.steps = self._steps[name]
        if self.steps.parts.encoder is not None:
            self.get_encoder().steps = self.steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_given(dict(zip((self.main_input_name,), args, strict=False)) | kwargs)
        return super().__call__(*args, **kwargs)

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def get_encoder(self, modality: str | None = None) -> Any:
        return self.model.encoder if hasattr(self, "model") else self.encoder

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        # kwargs: every keyword of `GenerationMixin.generate`, and what the model's processor returns
        check_given({self.main_input_name: inputs} | kwargs)
        if kwargs.get("return_token_timestamps"):
            kwargs["alignment_heads"] = self._heads_in_files(kwargs)
        if kwargs.get("adapter_names") is not None:
            raise InvalidArgumentError(
                "adapter_names: exported files use the same adapter for all rows of a call. For each adapter, call "
                "model.set_adapter(NAME), and then generate for the rows of this adapter."
            )
        config = copy.deepcopy(kwargs.get("generation_config") or (args[0] if args else None) or self.generation_config)
        if not isinstance(config, GenerationConfig):
            raise InvalidArgumentError(
                f"generation_config must be a GenerationConfig, found {describe_class(config)}. Pass its entries as "
                "keywords:\n    generate(..., max_new_tokens=20)"
            )
        for name, value in kwargs.items():
            if hasattr(config, name):
                setattr(config, name, value)
        if config.cache_implementation in _OTHER_CACHES:
            raise InvalidArgumentError(
                f"cache_implementation={config.cache_implementation!r}: exported files have their own cache. Leave "
                "cache_implementation out, also in generation_config.json:\n"
                "    model.generation_config.cache_implementation = None"
            )
        drafts = config.get_generation_mode(kwargs.get("assistant_model")) == _DRAFTS
        parts = self.steps.parts
        reads_text_only = parts.encoder is None and parts.vision is None  # other files return all scores
        if drafts and reads_text_only and self._scores_of_two.shape[1] != 2:
            raise InvalidArgumentError(
                f"{self.steps.parts.decoder.name} returns the scores of the last token only, but assisted generation "
                'needs the scores of all tokens. Export without logits="last".'
            )
        # an assisted loop has one row and repeats none; other loops would repeat a tensor of patches for each beam
        if parts.vision is not None and kwargs.get("assistant_model") is None:
            pictures = self._pictures({name: kwargs.pop(name, None) for name in _OF_PICTURES})
            prompt = kwargs.get("input_ids") if inputs is None else inputs
            if prompt is not None and any(one.names for one in pictures):
                kwargs.pop("prefill_chunk_size", None)  # the files read a prompt with pictures in one call
                seen = getattr(kwargs.get(installed_name()), "seen", 0)
                kwargs["pixel_values"] = Shown(pictures, len(prompt), seen)
        if (config.num_beams or 1) > 1 and self.steps.parts.encoder is None and not _stated(self.steps):
            self.config.vocab_size = self._scores_of_two.shape[2]
        given = args if inputs is None and not args else (inputs, *args)  # Whisper's first parameter has another name
        generate = super().generate
        return refusals_named("generate", lambda: generate(*given, **kwargs), kwargs, other_loops(config.to_dict()))

    def _heads_in_files(self, kwargs: Mapping[str, Any]) -> list[list[int]]:
        """Return layer and index of each attention head for word timestamps; only exported heads are counted."""
        places = _by_layer(self.steps.heads.values())
        if not places:
            raise InvalidArgumentError(
                "return_token_timestamps needs attention weights, which the files do not return. Export the model with "
                "export_folder(..., word_times=True) (--word-times), or call generate of the original model."
            )
        configs = (kwargs, *(vars(one) for one in (kwargs.get("generation_config"), self.generation_config) if one))
        stated = (one.get("alignment_heads") for one in configs)
        wanted: list[list[int]] = next((heads for heads in stated if heads is not None), [])
        missing = [[layer, head] for layer, head in wanted if head not in places.get(layer, ())]
        if missing or not wanted:
            raise InvalidArgumentError(
                f"alignment_heads is {wanted}, but the files return attention weights only of the heads "
                f"{list(self.steps.heads.values())}. Pass these alignment_heads, or export again with word_times=True."
            )
        return [[layer, places[layer].index(head)] for layer, head in wanted]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make transformers' ``generate`` use a :class:`.FileCache` instead of any KV cache of transformers."""
        name = installed_name()
        if model_kwargs.get(name) is None:
            if generation_config.use_cache is not False:
                model_kwargs[name] = self._cache(None)
            return None
        model_kwargs[name] = self._cache(model_kwargs[name])
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    @functools.cached_property
    def _scores_of_two(self) -> torch.Tensor:
        two = torch.zeros(1, 2, dtype=torch.int64)
        return self.steps.scores(self.steps.begin(two, None, {}, None, ()))

    def _pictures(self, given: Mapping[str, Any]) -> Sequence[Pictures]:
        mask, pixels = given.get("pixel_attention_mask"), given.get("pixel_values")
        if mask is not None and pixels is not None:
            real = pixels.flatten(-3).ne(0).any(-1)
            if not bool(mask.flatten(-2).bool().all(-1)[real].all()):
                raise InvalidArgumentError(
                    "pixel_attention_mask masks a part of a picture, but the exported vision encoder reads whole "
                    "pictures. Let the processor resize pictures to the size that the model reads."
                )
        return self.steps.pictures(given)

    def run_files(self, **given: Any) -> Any:
        read = self._read_text if self.steps.parts.encoder is None else self._read_after_encoder
        return read(self._cache(given.pop(CACHE, None)), **given)

    def _cache(self, given: Any) -> FileCache:
        cache = FileCache(self.steps) if given is None else FileCache.of(given, self.steps)
        if cache.steps is not self.steps:
            raise InvalidArgumentError("The cache is from other files or another adapter. Pass a cache of this model.")
        return cache

    def _read_text(
        self,
        cache: FileCache,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        cache_position: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        pixel_values: torch.Tensor | Shown | None = None,
        **pictures: torch.Tensor | None,
    ) -> Any:
        if input_ids is None:
            raise InvalidArgumentError(f"{self.steps.parts.decoder.name} reads tokens: pass input_ids.")
        shown = pixel_values if isinstance(pixel_values, Shown) else None
        # assisted generation passes the sizes of pictures in every call, and the pictures in the first call
        gives_pictures = pixel_values is not None or pictures.get("pixel_values_videos") is not None
        if shown is None and self.steps.parts.vision is not None and (cache.seen == 0 or gives_pictures):
            shown = Shown(self._pictures({"pixel_values": pixel_values, **pictures}), len(input_ids), cache.seen)
        if shown is not None and shown.seen == cache.seen > 0:
            of_pictures = [one.token_id or 0 for one in shown.pictures if one.names]
            if any(bool(torch.eq(input_ids, token).any()) for token in of_pictures):
                raise InvalidArgumentError(
                    f"The files read pictures only in the first call, but the cache has {cache.seen} tokens. Pass the "
                    f"whole conversation and all of its pictures:\n    generate(**inputs, {installed_name()}=None)"
                )
        self._check_counted("cache_position", cache_position, cache, input_ids)
        total, rows, ports = cache.seen + input_ids.shape[1], len(input_ids), self.steps.parts.decoder.ports
        mask = torch.ones(rows, total, dtype=torch.int64) if attention_mask is None else attention_mask.long()
        if mask.shape != (rows, total):
            raise InvalidArgumentError(
                f"attention_mask has shape {tuple(mask.shape)}; it must have shape {(rows, total)}, with a column for "
                "each token in the cache and in input_ids."
            )
        if position_ids is not None and "position_ids" not in ports:
            count = input_ids.shape[1]
            read, counted = mask[:, -count:].bool(), (mask.cumsum(-1) - 1)[:, -count:]
            every = torch.arange(mask.shape[1])[-count:].expand_as(counted)
            # the file has no input for positions, and counts them with or without padding
            if not any(torch.equal(position_ids.expand_as(one)[read], one[read]) for one in (counted, every)):
                raise InvalidArgumentError(
                    f"position_ids: {self.steps.parts.decoder.name} counts positions itself. Leave position_ids out."
                )
        is_last = not isinstance(logits_to_keep, torch.Tensor) and logits_to_keep == 1
        if cache.state is None:
            scores = self._begin(cache, input_ids, mask, position_ids, shown, is_last=is_last)
        else:
            new = None if position_ids is None else position_ids.expand(rows, -1)[:, -input_ids.shape[1] :]
            cache.state.follow(input_ids, mask, new)
            scores = self._call(cache, input_ids.shape[1], is_last=is_last)
        if token_type_ids is not None:
            self._check_types(cache, token_type_ids)
        filled = {installed_name(): cache} if use_cache is not False else {}
        return CausalLMOutputWithPast(logits=_kept(scores, logits_to_keep), **filled)

    def _read_after_encoder(
        self,
        cache: FileCache,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        cache_position: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_attentions: bool | None = None,
    ) -> Any:
        given = {"input_features": input_features, "input_values": input_values, "pixel_values": pixel_values}
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(None, attention_mask, input_ids=input_ids, **given)
        decoder, hidden, tokens = self.steps.parts.decoder, encoder_outputs[0], decoder_input_ids
        if tokens is None:
            raise InvalidArgumentError(f"{decoder.name} reads tokens: pass decoder_input_ids.")
        self._check_counted("decoder_position_ids", decoder_position_ids, cache, tokens)
        self._check_counted("cache_position", cache_position, cache, tokens)
        if decoder_attention_mask is not None and not bool(decoder_attention_mask.all()):
            raise InvalidArgumentError(
                "decoder_attention_mask contains zeros, but the exported decoder cannot mask its own tokens. Pass one "
                "row at a time, or rows of one length without padding (for Whisper: condition_on_prev_tokens=False)."
            )
        mask = torch.ones(hidden.shape[:2], dtype=torch.int64) if attention_mask is None else attention_mask.long()
        if "encoder_attention_mask" in decoder.ports and mask.shape != hidden.shape[:2]:
            raise InvalidArgumentError(
                f"attention_mask has shape {tuple(mask.shape)}, but the encoder's input has {tuple(hidden.shape[:2])}. "
                "Pass a mask of this shape. Leave prefill_chunk_size out, because it shortens masks."
            )
        context = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
        if isinstance(encoder_outputs, Mapping):
            context |= {name: keys for name, keys in encoder_outputs.items() if is_present(name)}
        if cache.state is None:
            cache.state = TextState(tokens[:, :0], tokens[:, :0], tokens[:, :0], {}, context)
        cache.state.context = context
        ones = torch.ones(len(tokens), cache.seen + tokens.shape[1], dtype=torch.int64)
        cache.state.follow(tokens, ones)
        scores = self._call(cache, tokens.shape[1])
        filled: dict[str, Any] = {installed_name(): cache} if use_cache is not False else {}
        weights, count = cache.state.weights, scores.shape[1]
        if output_attentions and weights:
            rows, _, source = next(iter(weights.values())).shape
            made = [torch.zeros(rows, 0, count, source) for _ in range(self.config.decoder_layers)]
            for layer, heads in _by_layer(weights).items():
                made[layer] = torch.stack([weights[layer, head][:, -count:] for head in heads], dim=1).float()
            filled |= {"cross_attentions": tuple(made), "decoder_attentions": ()}
        kept = _kept(scores, logits_to_keep)
        return Seq2SeqLMOutput(logits=kept, encoder_last_hidden_state=encoder_outputs[0], **filled)

    def _check_counted(self, name: str, given: torch.Tensor | None, cache: FileCache, tokens: torch.Tensor) -> None:
        counted = cache.seen + torch.arange(tokens.shape[1])
        if given is not None and not torch.equal(given.cpu() + 0 * counted, counted.expand_as(given)):
            raise InvalidArgumentError(
                f"{name}: {self.steps.parts.decoder.name} counts positions itself, from {cache.seen}. Leave {name} out."
            )

    def _begin(
        self,
        cache: FileCache,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor | None,
        shown: Shown | None,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        """Run the files on the prompts of a batch, and return scores."""
        steps, every = self.steps, torch.arange(len(tokens))
        factor = 1 if shown is None else len(tokens) // shown.rows  # copies of a prompt by beam search run once
        first = every[::factor]
        state = steps.begin(tokens[first], mask[first], {}, None, () if shown is None else shown.pictures)
        if state.positions is None:
            counted = torch.arange(tokens.shape[1]) if positions is None else positions
            state.positions = counted.expand(len(tokens), -1)[first]
        cache.state, cache.seen = state, 0
        scores = self._call(cache, tokens.shape[1], is_last=is_last)
        if factor > 1:
            cache.batch_repeat_interleave(factor)
            scores = scores.repeat_interleave(factor, dim=0)
        return scores

    def _call(self, cache: FileCache, count: int, *, is_last: bool = False) -> torch.Tensor:
        """Run the files on all tokens that the KV cache lacks, and return the scores of the last ``count`` tokens."""
        state = cache.state
        assert state is not None
        again, total = cache.again, cache.seen + count
        if count > 1:
            cache.hold()
        state.new = state.tokens[:, total - count - again :]
        if cache.seen:
            self.steps.pass_switch(state)
        scores = self.steps.scores(state, last_scores=is_last)
        cache.seen, cache.again = total, 0
        return scores[:, -count:]

    def _check_types(self, cache: FileCache, given: torch.Tensor) -> None:
        state = cache.state
        assert state is not None
        own = torch.zeros_like(given) if state.types is None else state.types[:, -given.shape[1] :]
        if given.shape == own.shape and not torch.equal(given.long(), own.long()) and self.steps.parts.vision is None:
            raise InvalidArgumentError(
                f"The passed token_type_ids differ from those that {self.steps.parts.decoder.name} uses. Leave "
                "token_type_ids out: tokenizer(text, return_token_type_ids=False)"
            )


def _by_layer(heads: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        found.setdefault(layer, []).append(head)
    return found


def model_of_files(steps: Steps, bases: tuple[type, ...] = ()) -> Any:
    """Make a model that runs exported files in the ``generate`` method of transformers."""
    stated = _stated(steps)
    own, loop = exported_class(stated), GenerationMixin
    # a class of another task that was exported has no loop
    if own is not None and issubclass(own, GenerationMixin) and own.generate is not GenerationMixin.generate:
        if not issubclass(own, transformers.WhisperForConditionalGeneration):
            raise GenerationError(
                f"{own.__name__}.generate calls layers of the model, which exported files do not have. Generate with "
                "the original model, or without transformers' keywords:\n    open_generator(folder).generate(input_ids)"
            )
        loop = own
    parts = steps.parts
    if parts.encoder is None:
        takes = {name: value for name, value in _defaults(FileModel._read_text).items() if name not in _OF_PICTURES}
        takes |= {CACHE: None, **(dict.fromkeys(_OF_PICTURES) if parts.vision is not None else {})}
    else:
        unread = {"input_ids", "input_features", "input_values", "pixel_values"} - parts.encoder.ports.keys()
        unread |= set() if steps.heads else {"output_attentions"}
        found = _defaults(FileModel._read_after_encoder)
        takes = {**{name: value for name, value in found.items() if name not in unread}, CACHE: None}
    return named_class(stated, (*bases, FileModel, loop), takes)(steps)


def _stated(steps: Steps) -> Mapping[str, Any]:
    return {} if steps.settings.documents is None else steps.settings.documents.config


def _defaults(method: Any) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.items()
    return {name: one.default for name, one in parameters if one.default is not one.empty}


def _kept(scores: torch.Tensor, asked: int | torch.Tensor) -> torch.Tensor:
    return scores[:, asked if isinstance(asked, torch.Tensor) else slice(-asked or None, None)]
