"""Open exported folders as generators, or as Hugging Face models for ``pipeline``, ``generate`` and custom loops."""

# An opened model is an instance of a class in this file and of `PreTrainedModel`. The class of the opened model has the
# name of the exported class, because transformers' pipelines check the name.

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..core.files.document import read_configuration
from ..errors import GenerationError, InvalidArgumentError, require
from ..generate.generator import Generator, generator_for
from ..generate.settings import MANIFEST, located
from ..runners.adapters import FolderAdapters
from ..runners.onnx_session import Providers
from ..runners.open import RUNTIMES, check_runtime, open_runner
from .manifest import check_digests, check_folder, read_manifest
from .pieces.tasks import GENERATES, SPEAKS
from .texts import chat_tokenizer, message_tokens


def open_generator(
    folder: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    threads: int | None = None,
    trust: bool = False,
    device: str | None = None,
    providers: Providers | None = None,
) -> Generator:
    """Open an exported folder to generate text or speech, in the runtime that it was exported for.

    Args:
        folder: a folder that :func:`export_folder` wrote, or a folder with files of the same names.
        runtime: ``"onnxruntime"``, ``"torch"``, ``"aotinductor"``, ``"executorch"`` or ``"openvino"``; ``None``, the
            default, for the runtime that the folder was exported for. ``"openvino"`` can also run ONNX files.
        threads: number of threads; ``None`` for the runtime's default. In onnxruntime and OpenVINO, this is the number
            for one operator. In ExecuTorch, all open files of the process share these threads. torch and AOTInductor
            ignore this argument: call ``torch.set_num_threads`` instead.
        trust: whether the caller trusts the author of the folder; ``False`` by default. AOTInductor packages and
            ``torch.export`` programs (``.pt2``) can run code when they are loaded, and are refused without trust.
            ONNX, OpenVINO and ExecuTorch files run no code when they are loaded, and open with ``trust=False``.
        device: the device of onnxruntime, such as ``"cuda"`` or ``"openvino"``; the CPU by default. See
            :class:`.OnnxGenerator`.
        providers: execution providers in the form that onnxruntime takes, as an alternative to ``device``.

    Returns:
        A generator: its ``generate`` returns the same tokens as ``model.generate``.

    Raises:
        InvalidArgumentError: when ``runtime`` is unknown.
        GenerationError: when the folder does not exist, is for a task without generation, or has no files for the
            runtime; also when ExecuTorch files are already open with a different number of threads.
        MissingDependencyError: when the runtime is not installed.
        DamagedFileError: when a file changed after the export.
        UntrustedFileError: when a file runs code on loading, and ``trust`` is ``False``.

    >>> import tempfile
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import export_folder
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt = torch.tensor([[5, 6, 7]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/llama", to="program")
    ...     found = open_generator(f"{folder}/llama", trust=True).generate(prompt, max_new_tokens=4)
    >>> torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    """
    check_runtime(runtime)
    path = check_folder(folder, GenerationError)
    chosen = runtime_of_folder(path) if runtime is None else runtime
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        if manifest.task not in (*GENERATES, *SPEAKS):
            raise GenerationError(
                f"The model in {path} is for {manifest.task} and cannot generate. Call it:\n"
                f"    open_model({os.fspath(folder)!r})(...)"
            )
        check_digests(path, manifest.sha256)
    return generator_for(path, chosen, threads=threads, trust=trust, device=device, providers=providers)


def runtime_of_folder(path: pathlib.Path) -> str:
    if (path / MANIFEST).is_file():
        return read_manifest(path).runtime
    return "torch" if any(path.glob("*.pt2")) else "onnxruntime"


class FolderModel:
    """A Hugging Face model that runs the files of an exported folder; each subclass is for one task.

    Attributes:
        tasks: names of the tasks whose folders the class can open.
    """

    tasks: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, tasks: tuple[str, ...] | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.tasks = cls.tasks if tasks is None else tasks

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        runtime: str | None = None,
        threads: int | None = None,
        trust: bool = False,
        device: str | None = None,
        providers: Providers | None = None,
    ) -> Any:
        """Open an exported folder.

        Args:
            folder: a folder that :func:`export_folder` wrote, or a folder with files of the same names.
            runtime: the library that runs the files; ``None``, the default, for the library that the folder was
                exported for. See :func:`open_generator`.
            threads: number of threads that one operator can use; see :func:`open_generator`.
            trust: whether the caller trusts the author of the folder; see :func:`open_generator`.
            device: the device of onnxruntime, see :func:`open_generator`; the CPU by default.
            providers: execution providers in the form that onnxruntime takes, as an alternative to ``device``.

        Returns:
            A ``transformers.PreTrainedModel`` with transformers' own ``generate``; the KV cache stays in the memory of
            the library that runs the files.

        Raises:
            InvalidArgumentError: when the folder is for another task, or ``runtime`` is unknown.
            GenerationError: when ``folder`` does not exist, or has no files for the runtime.
            MissingDependencyError: when transformers or the runtime is not installed.
            DamagedFileError: when a file changed after the export.
            UntrustedFileError: when a file runs code on loading, and ``trust`` is ``False``.
        """
        require("transformers", purpose=f"{cls.__name__}", extra="transformers")
        from ..generate.stand_ins import PlainFileModel, SpeakingFileModel, VocoderOfFile, named_class

        path = check_folder(folder, GenerationError)
        check_runtime(runtime)
        task = read_manifest(path).task if (path / MANIFEST).is_file() else cls.tasks[0]
        if task not in cls.tasks:
            others = [other.__name__ for other in FolderModel.__subclasses__() if task in other.tasks]
            raise InvalidArgumentError(
                f"{path} is for {task}, but {cls.__name__} is for {' or '.join(cls.tasks)}. Open it with "
                f"{' or '.join(others) or 'open_model'}.from_pretrained, or with open_model(folder)."
            )
        how: dict[str, Any] = {"threads": threads, "trust": trust, "device": device, "providers": providers}
        if task in GENERATES:
            from ..generate.model_of_files import model_of_files

            generator = open_generator(path, runtime=runtime, **how)
            found = model_of_files(generator.steps, (cls,))
            found.folder, found.of_folder = path, generator.of_folder
            return found
        if task in SPEAKS:
            generator = open_generator(path, runtime=runtime, **how)
            documents, encoder = generator.settings.documents, generator.parts.encoder
            stated = {} if documents is None else dict(documents.config)
            return named_class(stated, (cls, SpeakingFileModel), {})(generator.generate_speech, encoder, stated)
        runtime = runtime_of_folder(path) if runtime is None else runtime
        if (path / MANIFEST).is_file():
            check_digests(path, read_manifest(path).sha256)
        file = next((one for end in RUNTIMES[runtime] if (one := located(path, f"model{end}")).is_file()), None)
        if file is None:
            raise GenerationError(f"{path} contains no model{' or model'.join(RUNTIMES[runtime])} for {runtime}.")
        runner = open_runner(file, runtime=runtime, caller=cls.__name__, **how)
        stated = read_configuration(path / "config.json", dict[str, Any], failure=GenerationError)
        kind = VocoderOfFile if list(runner.ports) == ["spectrogram"] else PlainFileModel
        found = named_class(stated, (cls, kind), dict.fromkeys(runner.ports))(runner, stated)
        found.of_folder = FolderAdapters(path)
        return found


class OnnxForCausalLM(FolderModel, tasks=("text-generation",)):
    """A decoder that generates text, like ``AutoModelForCausalLM``.

    >>> import tempfile
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from yobx_flatten import export_folder
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    ...                      vocab_size=64, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> prompt, drawn = torch.tensor([[5, 6, 7]]), {"do_sample": True, "top_p": 0.9, "max_new_tokens": 4}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/llama")
    ...     of_files = OnnxForCausalLM.from_pretrained(f"{folder}/llama")
    >>> seed = torch.manual_seed(0)
    >>> found = of_files.generate(prompt, **drawn)
    >>> seed = torch.manual_seed(0)
    >>> torch.equal(found, model.generate(prompt, **drawn))
    True
    """

    folder: pathlib.Path

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the model's reply to a conversation; the chat template of the folder's tokenizer formats the prompt.

        Args:
            messages: the messages of the conversation, such as ``{"role": "user", "content": "..."}``, in order.
            **options: keyword arguments of ``generate``; ``tools`` and ``documents`` are passed to the chat template.

        Raises:
            InvalidArgumentError: when the tokenizer has no chat template, or a message is invalid.
            DamagedFileError: when the folder has no tokenizer.
        """
        model: Any = self  # with the `generate` of its subclass
        tokenizer = chat_tokenizer(self.folder)
        of_template = {name: options.pop(name) for name in ("tools", "documents") if name in options}
        prompt = message_tokens(tokenizer, messages, **of_template)
        found = model.generate(**prompt, **options)
        text: str = tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        return text


class OnnxForSeq2SeqLM(FolderModel, tasks=("text2text-generation",)):
    """An encoder-decoder from text to text, like ``AutoModelForSeq2SeqLM``."""


class OnnxForSpeechSeq2Seq(FolderModel, tasks=("automatic-speech-recognition",)):
    """An encoder-decoder from audio to text, like ``AutoModelForSpeechSeq2Seq``; Whisper has its own ``generate``."""


class OnnxForImageTextToText(FolderModel, tasks=("image-text-to-text", "image-to-text")):
    """Generate text from pictures and an optional prompt, like ``AutoModelForImageTextToText``."""


class OnnxForMaskedLM(FolderModel, tasks=("fill-mask",)):
    """Predict masked tokens, like ``AutoModelForMaskedLM``."""


class OnnxForSequenceClassification(FolderModel, tasks=("text-classification",)):
    """Classify a text or a pair of texts, like ``AutoModelForSequenceClassification``."""


class OnnxForTokenClassification(FolderModel, tasks=("token-classification",)):
    """Classify each token, like ``AutoModelForTokenClassification``."""


class OnnxForQuestionAnswering(FolderModel, tasks=("question-answering",)):
    """Find the start and the end of an answer, like ``AutoModelForQuestionAnswering``."""


class OnnxForMultipleChoice(FolderModel, tasks=("multiple-choice",)):
    """Score several choices, like ``AutoModelForMultipleChoice``."""


class OnnxForFeatureExtraction(FolderModel, tasks=("feature-extraction",)):
    """Return features of texts or other inputs, like ``AutoModel``."""


class OnnxForCTC(FolderModel, tasks=("ctc",)):
    """Transcribe audio frame by frame, like ``AutoModelForCTC``."""


class OnnxForAudioClassification(FolderModel, tasks=("audio-classification",)):
    """Classify audio, like ``AutoModelForAudioClassification``."""


class OnnxForImageClassification(FolderModel, tasks=("image-classification",)):
    """Classify pictures, like ``AutoModelForImageClassification``."""


class OnnxForObjectDetection(FolderModel, tasks=("object-detection",)):
    """Detect objects in pictures, like ``AutoModelForObjectDetection``."""


class OnnxForImageSegmentation(FolderModel, tasks=("image-segmentation",)):
    """Segment pictures, like ``AutoModelForSemanticSegmentation``."""


class OnnxForDepthEstimation(FolderModel, tasks=("depth-estimation",)):
    """Estimate the depth of pictures, like ``AutoModelForDepthEstimation``."""


class OnnxForTextToSpectrogram(FolderModel, tasks=SPEAKS):
    """Convert text or speech to a spectrogram with ``generate_speech``, like ``AutoModelForTextToSpectrogram``."""


class OnnxForVideoClassification(FolderModel, tasks=("video-classification",)):
    """Classify videos, like ``AutoModelForVideoClassification``."""


class OnnxForVocoder(FolderModel, tasks=("vocoder",)):
    """Convert a spectrogram to audio, like ``SpeechT5HifiGan``."""


class OnnxForZeroShotImageClassification(FolderModel, tasks=("zero-shot-image-classification",)):
    """Match texts and pictures, like ``AutoModelForZeroShotImageClassification``."""


def open_model(  # noqa: D417 # arguments that belong together are described together
    folder: str | os.PathLike[str],
    *,
    runtime: str | None = None,
    threads: int | None = None,
    trust: bool = False,
    device: str | None = None,
    providers: Providers | None = None,
) -> Any:
    """Open an exported folder as a Hugging Face model for the folder's task.

    Args:
        folder: a folder that :func:`export_folder` wrote.
        runtime, threads, trust, device, providers: see :meth:`FolderModel.from_pretrained`.

    Returns:
        A ``transformers.PreTrainedModel``, which ``pipeline(task, model=...)`` and other code for Hugging Face models
        accept. Its class derives from the :class:`FolderModel` subclass for the task of the folder.

    Raises:
        ForeignFileError: when the folder has no ``yobx_flatten.json``, which states the task.
        FlattenError: as :meth:`FolderModel.from_pretrained`.

    >>> import tempfile
    >>> import torch
    >>> from transformers import BertConfig, BertModel
    >>> from yobx_flatten import export_folder
    >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=64, **sizes)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export_folder(model, f"{folder}/bert", proof="none")
    ...     found = open_model(f"{folder}/bert")(torch.tensor([[5, 6, 7]]))
    >>> tuple(found.last_hidden_state.shape)
    (1, 3, 16)
    """
    task = read_manifest(folder).task
    found = next((one for one in FolderModel.__subclasses__() if task in one.tasks), None)
    if found is None:
        raise InvalidArgumentError(
            f"{os.fspath(folder)} is for {task}, for which there is no model class. Run its files yourself: "
            "onnxruntime.InferenceSession(path)"
        )
    where: dict[str, Any] = {"device": device, "providers": providers}
    return found.from_pretrained(folder, runtime=runtime, threads=threads, trust=trust, **where)
