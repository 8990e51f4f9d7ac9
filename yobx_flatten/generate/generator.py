"""Run the token loop of generation with ONNX files or exported programs of a model."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from ..errors import GenerationError, InvalidArgumentError, describe_class, require
from ..export.exported_model import ExportedModel
from ..runners.adapters import FolderAdapters
from ..runners.onnx_session import Providers, mapped_options, only_for_onnxruntime, require_onnxruntime
from ..runners.open import RUNTIMES, open_runner
from ..runners.program_runner import ProgramRunner, open_program
from .sampling import Sampling, choose, score_rules
from .settings import GenerationSettings, find_parts, folder_of, read_settings, refusals_named
from .spectrogram import speak
from .steps import Parts, Steps, TextState

# parameters of `generate` and `stream` that transformers' `generate` does not have
_OWN = ("self", "options", "sampling", "adapter")
# arguments for Whisper only
_SPEECH = ("language", "task", "return_timestamps")


class Generator:
    """Generates tokens with exported files; the base of :class:`.OnnxGenerator` and :class:`.ProgramGenerator`."""

    def __init__(self, parts: Parts, settings: GenerationSettings, adapters: FolderAdapters | None = None) -> None:
        self.parts, self.settings = parts, settings
        self.steps = Steps(parts, settings)
        self.of_folder = FolderAdapters(None) if adapters is None else adapters
        self._adapted: dict[str, Generator] = {}

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the LoRA adapters in the exported folder."""
        return self.of_folder.names

    def with_adapter(self, name: str | None) -> Generator:
        """Return a generator that runs the same files with a LoRA adapter.

        Args:
            name: name of the LoRA adapter, one of :attr:`adapters`; ``None`` for the model without an adapter.

        Raises:
            GenerationError: when the folder has no adapter called ``name``.
            InvalidArgumentError: when the runtime of the files is not onnxruntime.
            DamagedFileError: when the matrices of the adapter do not fit the inputs of the files.
        """
        if name is None:
            return self
        if name not in self._adapted:
            self._adapted[name] = Generator(self.parts.with_adapter(self.of_folder, name), self.settings)
        return self._adapted[name]

    def generate(  # noqa: D417 # arguments that belong together are described together
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        batch_num_images: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | Sequence[float] | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        forced_bos_token_id: int | None = None,
        language: str | list[str] | None = None,
        task: Literal["transcribe", "translate"] | None = None,
        return_timestamps: bool | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        num_return_sequences: int | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> Any:
        """Generate tokens until every sequence of the batch has ended, as ``model.generate`` of transformers does.

        Omitted arguments take their values from ``generation_config.json`` (:ref:`arguments <arguments-of-generate>`).

        Args:
            input_ids, attention_mask: the prompt and its mask, of shape (batch, length), padded on the left.
            max_new_tokens: largest number of new tokens; 20 if ``generation_config.json`` sets no limit.
            sampling: how each token is chosen; ``Sampling()`` chooses the most likely token.
            input_features, input_values: audio for the encoder, as features or as samples of the waveform.
            pixel_values, image_grid_thw, image_sizes, batch_num_images: images, as the model's processor returns them.
            pixel_values_videos, video_grid_thw, second_per_grid_ts: videos, as the model's processor returns them.
            decoder_input_ids: ids of the first tokens of the output of an encoder-decoder model.
            forced_bos_token_id: id of the second token of the output of an encoder-decoder model.
            language, task, return_timestamps: options for Whisper, see ``WhisperForConditionalGeneration.generate``.
            num_beams, length_penalty, early_stopping, num_return_sequences: options of beam search.
            adapter: name of the LoRA adapter for the batch, one of :attr:`adapters`; ``None`` (default) for no adapter.
            **options: further keywords of ``model.generate``, such as ``temperature`` or ``streamer``; if there are
                any, the generation loop of transformers runs the files.

        Returns:
            The same as ``model.generate``: by default int64 token ids of shape (batch * num_return_sequences, length).
            Each row of the result has the prompt, the new tokens and padding; Whisper's rows do not have the prompt.

        Raises:
            InvalidArgumentError: when inputs do not fit the model or each other, or transformers refuses a keyword.
            GenerationError: when an exported file raises an error while it runs.
            MissingDependencyError: when transformers is not installed, but beam search or another option needs it.
        """
        stated = {name: value for name, value in locals().items() if name not in _OWN and value is not None}
        if adapter is not None:
            return self.with_adapter(adapter).generate(**stated, sampling=sampling, **options)
        self._check_writes("generate")
        if options == {"do_sample": False} and sampling is None:  # the loop of this class is faster
            options, sampling = {}, Sampling()
        if options and sampling is not None:
            raise InvalidArgumentError(
                "sampling= cannot be combined with keywords of transformers' generate. Pass all options as keywords:\n"
                "    generate(..., do_sample=True, temperature=0.7, top_p=0.9)"
            )
        settings = self.settings
        beams = stated.get("num_beams", settings.num_beams)
        if type(beams) is not int or beams < 1:
            raise InvalidArgumentError(f"num_beams must be an int of 1 or more, found {describe_class(beams)}.")
        if beams > 1 and sampling is not None and sampling.do_sample:
            raise InvalidArgumentError(
                "Beam search cannot use sampling=Sampling(do_sample=True): pass num_beams=1, or sampling=Sampling()."
            )
        several = stated.get("num_return_sequences", settings.num_return_sequences) != 1
        if stated.get("return_timestamps") not in (None, True, False):
            raise InvalidArgumentError(
                f"return_timestamps must be True or False, found {stated['return_timestamps']!r}. For times of words, "
                "export the folder with word_times=True, and call\n    generate(..., return_token_timestamps=True)"
            )
        if options or beams > 1 or several or settings.other_loops:
            return self._by_transformers({**stated, **options}, sampling)
        sequence = self._begin(stated)
        if sequence is None:
            return self._by_transformers(stated, sampling)
        first = sequence.tokens
        new = list(self._stream(sequence, stated.get("max_new_tokens"), sampling))
        return torch.cat([first, torch.stack(new, dim=1)], dim=1) if new else first

    def stream(  # noqa: D417 # arguments that belong together are described together
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        input_features: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_sizes: torch.Tensor | None = None,
        batch_num_images: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        second_per_grid_ts: torch.Tensor | Sequence[float] | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        forced_bos_token_id: int | None = None,
        adapter: str | None = None,
    ) -> Iterator[torch.Tensor]:
        """Return an iterator that yields the tokens of :meth:`generate` step by step, without beam search.

        The method checks the inputs and runs the encoder before it returns the iterator. Each iterator has its own KV
        cache, so several iterators can be read alternately.

        Args:
            input_ids, attention_mask, max_new_tokens, sampling: see :meth:`generate`.
            input_features, input_values, pixel_values, image_grid_thw, image_sizes: see :meth:`generate`.
            batch_num_images, pixel_values_videos, video_grid_thw, second_per_grid_ts: see :meth:`generate`.
            decoder_input_ids: see :meth:`generate`; required for a Whisper model with languages or timestamps.
            adapter, forced_bos_token_id: see :meth:`generate`.

        Returns:
            An iterator over int64 tensors of shape (batch,), each with the next token of every sequence in the batch.

        Raises:
            InvalidArgumentError: when the inputs do not fit the model or each other.
            GenerationError: when an exported file raises an error while it runs.
        """
        stated = {name: value for name, value in locals().items() if name not in _OWN and value is not None}
        if adapter is not None:
            return self.with_adapter(adapter).stream(**stated, sampling=sampling)
        self._check_writes("stream")
        if self.settings.other_loops:
            raise GenerationError(
                f"stream() does not support {', '.join(self.settings.other_loops)}, which generation_config.json sets. "
                "Call generate(), or remove the entry."
            )
        sequence = self._begin(stated)
        if sequence is None:
            raise InvalidArgumentError(
                "For Whisper, stream() needs decoder_input_ids: without them, transformers' loop chooses language, "
                "task and timestamps, and returns all tokens at once. Call generate(), or\n    stream("
                "input_features=sound, decoder_input_ids=torch.tensor([[START, LANGUAGE, TASK, NO_TIMES]]))"
            )
        return self._stream(sequence, max_new_tokens, sampling)

    def generate_speech(
        self, read: torch.Tensor, speaker_embeddings: torch.Tensor | None = None, **options: Any
    ) -> Any:
        """Generate speech with exported files of SpeechT5.

        SpeechT5 applies dropout during generation: after the same ``torch.manual_seed``, the exported files and the
        model return the same speech.

        Args:
            read: the input: token ids of shape (batch, length), or samples of a waveform for a speech-to-speech model.
            speaker_embeddings: a vector that describes the voice, for each row of the batch, of shape (batch, size).
            **options: ``attention_mask``, ``threshold``, ``minlenratio``, ``maxlenratio``, ``vocoder`` and
                ``return_output_lengths``, as in ``model.generate_speech``. The vocoder can be an exported model:
                ``vocoder=open_model("vocoder")``.

        Returns:
            The result of ``model.generate_speech``: a spectrogram of shape (frames, bins) or (batch, frames, bins). If
            a vocoder is given, the waveform that the vocoder makes.

        Raises:
            InvalidArgumentError: when the exported model generates text instead of speech, when the inputs do not fit
                the model or each other, or when transformers refuses a keyword.
            GenerationError: when an exported file raises an error while it runs.
            MissingDependencyError: when transformers is not installed.
        """
        if self.parts.postnet is None:
            raise InvalidArgumentError(f"{self.parts.decoder.name} generates tokens, not speech. Call generate().")
        asked = {"speaker_embeddings": speaker_embeddings, **options}
        return refusals_named("generate_speech", lambda: speak(self.parts, self.settings, read, asked), asked)

    def _check_writes(self, method: str) -> None:
        if self.parts.postnet is not None:
            raise InvalidArgumentError(
                f"{self.parts.decoder.name} generates spectrograms: call generate_speech(ids, speaker_embeddings), "
                f"not {method}."
            )

    def _by_transformers(self, given: dict[str, Any], sampling: Sampling | None) -> Any:
        require("transformers", purpose="this way to generate", extra="transformers")
        seed = None
        if sampling is not None:
            given["do_sample"] = sampling.do_sample
            if sampling.do_sample:
                neutral = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0}
                given |= {name: getattr(sampling, name) or value for name, value in neutral.items()}
                seed = sampling.seed
        if self.settings.processors:
            given["logits_processor"] = [*self.settings.processors, *given.get("logits_processor", ())]
        given = {name: value for name, value in given.items() if value is not None}
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            if not given.keys() >= {"decoder_input_ids", "input_features"}:
                return self._model.generate(**given)
            from transformers import GenerationMixin

            # Whisper's own generate would leave decoder_input_ids out of its result
            return GenerationMixin.generate(self._model, **given)

    @functools.cached_property
    def _model(self) -> Any:
        from .model_of_files import model_of_files

        return model_of_files(self.steps)

    def _begin(self, given: Mapping[str, Any]) -> TextState | None:
        """Return tokens and KV cache of the first step; ``None`` if the transformers loop for Whisper must generate."""
        # given: keywords of the call that are not `None`
        encoder, pictures = self.parts.encoder, self.steps.pictures(given)
        names = ["input_features", "input_values"]
        if encoder is not None and "pixel_values" in encoder.ports:
            names.append("pixel_values")  # otherwise the pictures belong to the decoder's prompt
        source = {name: given[name] for name in names if name in given}
        asks = any(name in given for name in _SPEECH)
        if "input_features" in given and self.settings.is_speech:
            if "decoder_input_ids" not in given:
                return None
            if asks:
                raise InvalidArgumentError(
                    "decoder_input_ids already sets language, task and timestamps. Pass either decoder_input_ids, or "
                    "language=, task= and return_timestamps=."
                )
        elif asks:
            raise InvalidArgumentError(
                "language=, task= and return_timestamps= need input_features=, and a Whisper model whose "
                "generation_config.json has lang_to_id or no_timestamps_token_id. Leave these three arguments out."
            )
        token = given.get("forced_bos_token_id")
        if token is not None and (type(token) is not int or token < 0):
            raise InvalidArgumentError(
                f"forced_bos_token_id must be a token id, an int of 0 or more; found {describe_class(token)}."
            )
        ids, mask, first = map(given.get, ("input_ids", "attention_mask", "decoder_input_ids"))
        sequence = self.steps.begin(ids, mask, source, first, pictures)
        sequence.forced = self.settings.forced_bos_token_id if token is None else token
        return sequence

    def _stream(
        self, sequence: TextState, max_new_tokens: int | None, sampling: Sampling | None
    ) -> Iterator[torch.Tensor]:
        sampling = self.settings.sampling if sampling is None else sampling
        seeded = None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        limit, longest, start = self.settings.max_new_tokens, self.settings.max_length, sequence.tokens.shape[1]
        if max_new_tokens is not None:
            limit = max_new_tokens
        elif longest is not None:
            if start >= longest:
                raise InvalidArgumentError(
                    f"The prompt has {start} tokens, but max_length in generation_config.json allows {longest} tokens "
                    "for the prompt and the new tokens together. Pass max_new_tokens."
                )
            limit = longest - start
        if type(limit) is not int or limit < 1:
            raise InvalidArgumentError(f"max_new_tokens must be an int of 1 or more, found {describe_class(limit)}.")
        return self._tokens(sequence, limit, sampling, seeded)

    def _tokens(
        self, sequence: TextState, limit: int, sampling: Sampling, seeded: torch.Generator | None
    ) -> Iterator[torch.Tensor]:
        settings = self.settings
        ends = torch.tensor(settings.eos_token_ids, dtype=torch.int64)
        ended = torch.zeros(len(sequence.tokens), dtype=torch.bool)
        processors = settings.processors
        if settings.has_rules or sequence.forced is not None or settings.forced_eos_token_id is not None:
            require("transformers", purpose="the rules of generation_config.json", extra="transformers")
            longest = sequence.tokens.shape[1] + limit
            facts = sequence.tokens, longest, sequence.mask, sequence.source, sequence.forced
            processors = score_rules(self._model, *facts), *settings.processors
        for number in range(limit):
            scores = self.steps.step(sequence)
            for process in processors:
                scores = process(sequence.tokens, scores)
            chosen = choose(scores, sampling, seeded)
            if settings.pad_token_id is not None:
                chosen = torch.where(ended, settings.pad_token_id, chosen)
            yield chosen.clone()  # the caller may change the tensor
            ended |= torch.isin(chosen, ends)
            if bool(ended.all()) or number + 1 == limit:
                return
            sequence.follow(chosen[:, None])
            self.steps.pass_switch(sequence)


class OnnxGenerator(Generator):
    """Generates tokens with ONNX files in onnxruntime.

    The KV cache stays in onnxruntime's memory: the outputs ``present.*`` are passed to the next call as
    ``past_key_values.*`` without a copy.

    Args:
        model: a folder that :func:`export_folder` wrote, or the file of a decoder whose inputs and outputs are named as
            by :func:`export_onnx`.
        prefill: a file for the first call, without cache inputs; required if the file ``model`` needs a filled cache.
        settings: options of generation; by default read from ``config.json`` and ``generation_config.json``.
        threads: number of threads that one operator can use; by default, onnxruntime chooses it.
        pack: whether onnxruntime copies the weights into the layout that its kernels read; ``True`` by default. With
            ``pack=False``, weights are memory-mapped, and each token takes longer.
        device: device on which onnxruntime computes: ``"cpu"`` (default), ``"cuda"``, ``"cuda:1"``, ``"directml"``,
            ``"coreml"``, ``"webgpu"``, ``"openvino"``, ``"xnnpack"`` and others, see :data:`.devices.DEVICES`.
        providers: execution providers, as ``onnxruntime.InferenceSession`` accepts them; not allowed with ``device``.

    Raises:
        GenerationError: when a file is missing, cannot be loaded, or was not exported for generation.
        MissingDependencyError: when onnxruntime is not installed, or has no provider for the device.

    >>> import tempfile
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import export_folder
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/llama")
    ...     found = OnnxGenerator(f"{folder}/llama").generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        prefill: str | os.PathLike[str] | None = None,
        settings: GenerationSettings | None = None,
        threads: int | None = None,
        pack: bool = True,
        device: str | None = None,
        providers: Providers | None = None,
    ) -> None:
        found = find_parts(pathlib.Path(model), ".onnx", prefill)
        require_onnxruntime("OnnxGenerator")
        how: dict[str, Any] = {"threads": threads, "device": device, "providers": providers}
        super().__init__(*_opened(found, "onnxruntime", "OnnxGenerator", settings, pack=pack, **how))


class ProgramGenerator(Generator):
    """Generates tokens with programs of ``torch.export``.

    Args:
        model: the result of :func:`export_program` for a decoder, a ``torch.export.ExportedProgram``, a ``.pt2`` file,
            or a folder that :func:`export_folder` wrote.
        prefill: a program or file without cache inputs for the first call; required if ``model`` needs a filled cache.
        trust: whether you trust the files to run code, see :func:`.program_runner.open_program`; ``False`` by default.
        settings: options of generation; by default read from ``config.json`` and ``generation_config.json``.

    Raises:
        GenerationError: when a file is missing, cannot be loaded, or was not exported for generation.
        InvalidArgumentError: when ``model`` has an unsupported type.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import DecodeSizes, GenerationSettings, decode_inputs, export_program
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> found = ProgramGenerator(exported, settings=GenerationSettings()).generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """

    def __init__(
        self,
        model: ExportedModel | ExportedProgram | str | os.PathLike[str],
        *,
        prefill: ExportedModel | ExportedProgram | str | os.PathLike[str] | None = None,
        settings: GenerationSettings | None = None,
        trust: bool = False,
    ) -> None:
        given: dict[str, Any] = {"decoder": model}
        adapters = None
        if isinstance(model, (str, os.PathLike)):
            given = {**find_parts(pathlib.Path(model), ".pt2", None)}
            folder = folder_of(given["decoder"])
            settings, adapters = settings or read_settings(folder), FolderAdapters(folder)
        if prefill is not None:
            given["prefill"] = prefill
        runners: dict[str, Any] = {}
        for part, value in given.items():
            if isinstance(value, (str, os.PathLike)):
                runners[part] = ProgramRunner(open_program(value, trust=trust), pathlib.Path(value).name)
                continue
            program = value.program if isinstance(value, ExportedModel) else value
            if not isinstance(program, ExportedProgram):
                raise InvalidArgumentError(
                    "ProgramGenerator takes an ExportedModel, an ExportedProgram or a path, found "
                    f"{describe_class(value)}."
                )
            runners[part] = ProgramRunner(program, f"the {part}")
        super().__init__(Parts(**runners), settings or GenerationSettings(), adapters=adapters)


def generator_for(
    model: str | os.PathLike[str],
    runtime: str,
    *,
    threads: int | None = None,
    pack: bool = True,
    trust: bool = False,
    device: str | None = None,
    providers: Providers | None = None,
) -> Generator:
    # see `OnnxGenerator` for the options; OpenVINO and ExecuTorch accept only the number of threads
    if runtime == "onnxruntime":
        return OnnxGenerator(model, threads=threads, pack=pack, device=device, providers=providers)
    only_for_onnxruntime(runtime, device, providers)
    if runtime == "torch":
        return ProgramGenerator(model, trust=trust)
    own, *others = RUNTIMES[runtime]
    try:
        found = find_parts(pathlib.Path(model), own, None)
    except GenerationError:
        if not others:  # formats that this runtime reads besides its own
            raise
        found = find_parts(pathlib.Path(model), others[0], None)
    return Generator(*_opened(found, runtime, "open_generator", None, trust=trust, threads=threads))


def _opened(
    found: Mapping[str, pathlib.Path],
    runtime: str,
    caller: str,
    settings: GenerationSettings | None,
    *,
    pack: bool = True,
    **how: Any,
) -> tuple[Parts, GenerationSettings, FolderAdapters]:
    # how: other arguments of `open_runner`
    parts: dict[str, Any] = {}
    for part, file in found.items():
        options = None if pack else mapped_options(file, threads=how["threads"])
        parts[part] = open_runner(file, runtime=runtime, caller=caller, options=options, **how)
    folder = folder_of(found["decoder"])
    return Parts(**parts), settings or read_settings(folder), FolderAdapters(folder)
