"""Define Hugging Face models without weights, which run exported files, and the KV cache of such models."""

# generate of transformers ──> get_seq_length, reorder_cache, crop ──> FileCache ──> TextState.cache
#                                                                                    values of the library, not copied

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedCache
from transformers.utils import ModelOutput, find_labels

from ..core.files.document import damage_as
from ..errors import GenerationError, InvalidArgumentError, describe_class
from ..huggingface.builders import make_dynamic_cache
from ..huggingface.cache_names import has_read, named_as, tokens_in
from ..runners.adapters import FolderAdapters
from ..runners.in_place import cache_tensors, copied, cropped, held_before, rewound, select_rows
from ..runners.ports import Runner
from .pictures import Seen, typed
from .steps import Steps, TextState

_MASKS = ("attention_mask", "pixel_mask")  # a mask without zeros has no effect


class ModelWithoutWeights(PreTrainedModel):  # type: ignore[misc] # transformers is untyped
    """A Hugging Face model without weights, whose calls run exported files on any device."""

    # `forward` has the parameters of the exported class, because transformers' loops, pipelines and Trainer read the
    # signature to choose what they pass. An argument that the files do not take is refused if it would change the
    # result.

    accepts_loss_kwargs = False  # otherwise the Trainer passes the number of labels
    taken: ClassVar[tuple[str, ...]] = ()  # the arguments that the files take, in order
    arguments: ClassVar[Mapping[str, Any]] = {}  # the arguments of the exported class, in order, with their defaults

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.anchor = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # transformers reads device and dtype
        self.of_folder = FolderAdapters(None)
        self._chosen: str | None = None  # the adapter of `set_adapter`
        self._enabled = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the files with the arguments of the exported model's ``forward``."""
        by_place = dict(zip(self.arguments, args, strict=False))
        twice = ", ".join(by_place.keys() & kwargs.keys())
        if twice or len(args) > len(self.arguments):
            found = f"{twice} twice" if twice else f"{len(args)} arguments"
            raise InvalidArgumentError(f"{type(self).__name__} takes {', '.join(self.arguments)}; found {found}.")
        given = named_as(self.taken, {**by_place, **kwargs})
        as_dict = given.pop("return_dict", None)
        for name in [name for name in given if name not in self.taken]:
            value = given.pop(name)
            if isinstance(value, torch.Tensor):
                changes_nothing = name in _MASKS and bool(value.all())
            else:
                is_default = isinstance(value, (int, float, str)) and value == self.arguments.get(name)
                # use_cache has no effect on files without a cache
                changes_nothing = value is None or value is False or is_default or name == "use_cache"
            if not changes_nothing:
                raise InvalidArgumentError(self._refusal(name))
        found = self.run_files(**given)
        as_dict = getattr(self.config, "return_dict", True) if as_dict is None else as_dict
        return found if as_dict or not isinstance(found, ModelOutput) else found.to_tuple()

    def run_files(self, **given: Any) -> Any:
        raise NotImplementedError

    def _refusal(self, name: str) -> str:
        takes = ", ".join(one for one in self.taken if one in self.arguments)
        found = f"{name}: the files of this {type(self).__name__} take {takes}"
        if name in find_labels(type(self)):
            return f"{found}. The files return no loss: compute it from their outputs (Trainer: compute_loss_func=)."
        if name.startswith("output_"):
            return f"{found}. The files return only the outputs of the export; for more, call the model itself."
        way = "pass rows of one size" if name in _MASKS else "call the model itself"
        return f"{found}. The outputs would differ from the model's: leave {name} out, or {way}."

    def use_adapter(self, name: str | None) -> None:
        """Use the LoRA adapter ``name`` in all later calls; ``None`` for no adapter."""
        raise InvalidArgumentError(
            "Exported SpeechT5 files cannot switch adapters. Merge the adapter into the weights during the export:\n"
            "    export_folder(ADAPTER_FOLDER, folder)"
        )

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        if len(names) != 1:
            raise InvalidArgumentError(f"set_adapter takes only one of the adapters {', '.join(self.of_folder.names)}.")
        self.use_adapter(names[0])
        self._chosen, self._enabled = names[0], True

    def disable_adapters(self) -> None:
        if self._enabled:
            self.use_adapter(None)
        self._enabled = False

    def enable_adapters(self) -> None:
        if self._chosen is None:
            raise InvalidArgumentError("No adapter was chosen yet: call model.set_adapter(NAME)")
        self.set_adapter(self._chosen)

    def active_adapters(self) -> list[str]:
        return [self._chosen] if self._enabled and self._chosen is not None else []

    def load_adapter(self, *args: Any, **kwargs: Any) -> None:
        raise InvalidArgumentError(
            "Adapters must be added to the exported folder. Add the adapter, and open the folder again:\n"
            "    yobx-flatten adapter DIR NAME=FOLDER"
        )

    add_adapter = load_adapter

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        raise InvalidArgumentError(
            "Exported weights cannot change. Change the model and export it again:\n    export_folder(model, folder)"
        )

    set_input_embeddings = resize_token_embeddings

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        if self.anchor.device.type != "cpu":
            found, self.anchor = self.anchor.device, torch.nn.Parameter(torch.zeros(()), requires_grad=False)
            raise InvalidArgumentError(
                f"The files accept and return CPU tensors, not {found} tensors. Choose the device when you open files: "
                'open_model(folder, device="cuda")'
            )
        return moved

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            f"A {type(self).__name__} that runs files cannot be copied or pickled. Open them again: open_model(folder)"
        )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise InvalidArgumentError("save_pretrained cannot save exported files. Copy the folder: shutil.copytree(a, b)")


# defaults of models for inputs that the caller leaves out: no padding, and one text
_ASSUMED = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}


class PlainFileModel(ModelWithoutWeights):
    """A Hugging Face model without weights, whose ``forward`` runs one exported file."""

    def __init__(self, runner: Runner, stated: dict[str, Any]) -> None:
        super().__init__(config_from(stated, encoder=False))
        self.runner = self._plain = runner
        self.main_input_name = next(iter(runner.ports))
        self.eval()

    def use_adapter(self, name: str | None) -> None:
        plain = self._plain
        self.runner = plain if name is None else self.of_folder.runners({"model": plain}, name)["model"]

    def run_files(self, **given: Any) -> Any:
        """Run the file on inputs that a tokenizer or processor made; outputs have the model's output names."""
        ports = self.runner.ports
        feeds = {name: value for name, value in given.items() if value is not None}
        for name, make in _ASSUMED.items():
            tokens = feeds.get("input_ids")
            if name in ports and name not in feeds and tokens is not None and len(ports[name].shape) == tokens.ndim:
                feeds[name] = make(tokens)
        missing = [name for name in ports if name not in feeds]
        if missing:
            raise InvalidArgumentError(f"{self.runner.name} takes {', '.join(ports)}: also pass {', '.join(missing)}.")
        found = self.runner.run(typed(self.runner, {name: value.detach().cpu() for name, value in feeds.items()}))
        return ModelOutput(found)


class VocoderOfFile(PlainFileModel):
    """A vocoder that runs an exported file: it converts one spectrogram or a batch to audio samples."""

    def run_files(self, **given: torch.Tensor) -> torch.Tensor:
        spectrogram = given["spectrogram"]
        rows = spectrogram if spectrogram.ndim == 3 else spectrogram.unsqueeze(0)
        found: torch.Tensor
        (found,) = super().run_files(spectrogram=rows).values()
        return found if spectrogram.ndim == 3 else found[0]


class SpeakingFileModel(ModelWithoutWeights):
    """A Hugging Face model without weights, whose ``generate_speech`` runs exported files of SpeechT5."""

    # speak: `generate_speech` of a `.Generator`

    def __init__(self, speak: Callable[..., Any], encoder: Runner | None, stated: Mapping[str, Any]) -> None:
        super().__init__(config_from(stated, encoder=True))
        assert encoder is not None
        self.speak = speak
        self.main_input_name = next(name for name in ("input_ids", "input_values") if name in encoder.ports)
        self.eval()

    @classmethod
    def can_generate(cls) -> bool:
        return True

    def generate_speech(self, read: Any, speaker_embeddings: torch.Tensor | None = None, **options: Any) -> Any:
        return self.speak(read, speaker_embeddings, **options)

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        """Generate speech; the method has this name because transformers' pipelines call ``generate``."""
        return self.speak(input_ids, attention_mask=attention_mask, **options)


def config_from(stated: Mapping[str, Any], *, encoder: bool) -> Any:
    """Return ``config.json`` as an object of the transformers class; Python code in the folder never runs."""
    # encoder: whether the model is an encoder-decoder, if ``config.json`` does not state it
    kind = stated.get("model_type")
    made: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401 # its `get` imports nothing
    own = copy.deepcopy(dict(stated))
    with damage_as(GenerationError, "config.json"):
        config = made.from_dict(own) if made is not PretrainedConfig else made(**own)
        if encoder and not getattr(config, "is_encoder_decoder", False):
            config.is_encoder_decoder = True
        return config


def named_class(stated: Mapping[str, Any], bases: tuple[Any, ...], takes: Mapping[str, Any]) -> Any:
    """Make a class with the name and ``forward`` parameters (which the Trainer inspects) of the exported class."""
    # takes: the files' inputs and their defaults; they are the parameters if transformers has no such class
    own, kind = exported_class(stated), inspect.Parameter
    every = [kind(name, kind.POSITIONAL_OR_KEYWORD, default=default) for name, default in takes.items()]
    signature = inspect.Signature([kind("self", kind.POSITIONAL_OR_KEYWORD), *every])
    if own is not None:
        signature = inspect.signature(own.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ModelWithoutWeights.forward(self, *args, **kwargs)

    forward.__doc__, forward.__signature__ = ModelWithoutWeights.forward.__doc__, signature  # type: ignore[attr-defined]
    named = list(signature.parameters.values())[1:]
    named = [one for one in named if one.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
    facts = {"taken": tuple(takes), "arguments": {one.name: one.default for one in named}}
    return type(_class_name(stated) or bases[0].__name__, bases, {"__module__": __name__, "forward": forward, **facts})


def exported_class(stated: Mapping[str, Any]) -> Any:
    """Return the transformers class that a configuration names; ``None`` if the installed version lacks it."""
    import transformers

    found = getattr(transformers, _class_name(stated), None) if _class_name(stated) else None
    # transformers has placeholders, not derived from PreTrainedModel, for classes whose library is not installed
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _class_name(stated: Mapping[str, Any]) -> str:
    names = stated.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in _model_names() else ""


@functools.cache
def _model_names() -> frozenset[str]:
    # the tables contain names only, so that no model is imported
    from transformers.models.auto import modeling_auto

    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    values = [value for table in tables for value in table.values()]
    return frozenset(name for value in values for name in ((value,) if isinstance(value, str) else value))


class FileCache(Cache):  # type: ignore[misc] # transformers is untyped
    """The KV cache of exported files, with the methods that transformers' generation loops call, such as ``crop``."""

    # transformers' loops read these attributes; one entry stands for all layers
    is_compileable, is_croppable = False, True
    is_linear: ClassVar[list[bool]] = [False]
    is_sliding: ClassVar[list[bool]] = [False]

    def __init__(self, steps: Steps) -> None:
        super().__init__(layers=[])
        self.steps = steps
        self.state: TextState | None = None
        self.seen = 0
        # number of last tokens that the files must read again, because `crop` restored the state before their call
        self.again = 0
        # the cache, the number of its tokens, and the features of pictures before the last call
        self._held: tuple[dict[str, Any], int, list[Seen]] | None = None

    @classmethod
    def of(cls, given: Any, steps: Steps) -> FileCache:
        """Convert the caller's empty transformers cache to a :class:`FileCache`, in place."""
        if isinstance(given, FileCache):
            return given
        known = isinstance(given, Cache) and type(given).__module__.startswith("transformers.")
        if not known or any(isinstance(part, QuantizedCache) for part in (given, *vars(given).values())):
            raise InvalidArgumentError(
                f"The cache is {describe_class(given)}, but exported files keep keys and values in the model's dtype. "
                "Pass DynamicCache(), or no cache."
            )
        if has_read(given):
            raise InvalidArgumentError(
                f"The cache is {describe_class(given)} with {tokens_in(given) or 'some'} tokens from another model. "
                "Pass a cache that a call of this model returned, or no cache."
            )
        vars(given).clear()
        given.__class__ = cls
        given.__init__(steps)
        made: FileCache = given
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache with the same tokens, so that several texts can continue one prompt."""
        made = memo[id(self)] = type(self)(self.steps)
        made.__dict__ |= vars(self)  # only the tensors that a library writes in place need a copy
        if self.state is not None:
            made.state = dataclasses.replace(self.state, cache=copied(self.steps.parts.decoder, self.state.cache))
        return made

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidArgumentError(
            "The cache of an exported model cannot be pickled: its keys and values are in the memory of the library "
            "that runs the files. Store the tokens, and run the model on the tokens again. Within this process, "
            "copy.deepcopy(cache) works."
        )

    def hold(self) -> None:
        """Save the current state of the cache, which :meth:`crop` can restore."""
        assert self.state is not None
        self._held = held_before(self.state.cache), self.seen - self.again, self.state.seen

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1  # no limit

    get_max_length = get_max_cache_shape

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    def activate_past_recording(self) -> None:
        """Do nothing, since the cache always saves its state before a call with several tokens."""

    def reset(self) -> None:
        self.state, self.seen, self.again, self._held = None, 0, 0, None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.state is not None:
            rows, state = beam_idx.cpu(), self.state
            state.cache = select_rows(self.steps.parts.decoder, state.cache, rows)
            state.repeat(rows)
            self._held = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.reorder_cache(torch.arange(len(self.state.tokens)).repeat_interleave(repeats))

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of the cache; ``-n`` removes the last ``n`` tokens."""
        kept = tokens if tokens > 0 else self.seen + tokens
        state = self.state
        if state is None or kept >= self.seen:
            return
        found = None if self.again else cropped(self.steps.parts.decoder, state.cache, self.seen, kept)
        if found is not None:
            state.cache = found
        elif self._held is not None and kept >= self._held[1]:
            leaves, seen, seen_by_state = self._held
            state.cache, self.again = rewound(state.cache, leaves, seen), kept - seen
            state.seen = seen_by_state
        elif not self.again or kept < self.seen - self.again:
            raise GenerationError(
                f"{self.steps.parts.decoder.name} has a sliding window or a recurrent state, so its cache cannot "
                f"drop the last {self.seen - kept} tokens. Call generate without this cache."
            )
        else:
            self.again -= self.seen - kept
        state.keep(kept)
        self.seen = kept

    @property
    def self_attention_cache(self) -> Any:
        return self._copy("decoder")

    @property
    def cross_attention_cache(self) -> Any:
        return self._copy("encoder")

    def _copy(self, side: str) -> Any:
        found = {} if self.state is None else cache_tensors(self.state.cache)
        layers: dict[int, dict[str, torch.Tensor]] = {}
        for name, leaf in found.items():
            parts = name.split(".")  # past_key_values.0.decoder.key
            if len(parts) == 4 and parts[2] == side:
                layers.setdefault(int(parts[1]), {})[parts[3]] = leaf
        return make_dynamic_cache([(layers[index]["key"], layers[index]["value"]) for index in sorted(layers)])
