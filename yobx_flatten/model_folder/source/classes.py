"""Choose the transformers class for a configuration, and find the model inside of a wrapper."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidArgumentError

# in this order: the first that has a class for a configuration is its kind
_AUTO_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",  # before the next: encoders can also be made to decode
    "AutoModelForCausalLM",
    "AutoModel",
)
_SEGMENTS = ("Semantic", "Universal", "Instance", "Image")
_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "text-generation": ("AutoModelForCausalLM",),
    "text2text-generation": ("AutoModelForSeq2SeqLM",),
    "automatic-speech-recognition": ("AutoModelForSpeechSeq2Seq",),
    "image-text-to-text": ("AutoModelForImageTextToText",),
    "fill-mask": ("AutoModelForMaskedLM",),
    "text-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "feature-extraction": ("AutoModel",),
    "ctc": ("AutoModelForCTC",),
    "audio-classification": ("AutoModelForAudioClassification", "AutoModelForSequenceClassification"),
    "image-classification": ("AutoModelForImageClassification",),
    "video-classification": ("AutoModelForVideoClassification",),
    "question-answering": ("AutoModelForQuestionAnswering",),
    "object-detection": ("AutoModelForObjectDetection",),
    "image-segmentation": tuple(f"AutoModelFor{kind}Segmentation" for kind in _SEGMENTS),
    "depth-estimation": ("AutoModelForDepthEstimation",),
    "multiple-choice": ("AutoModelForMultipleChoice",),
    "zero-shot-image-classification": ("AutoModelForZeroShotImageClassification",),
    "text-to-audio": ("AutoModelForTextToSpectrogram", "AutoModelForTextToWaveform"),
}
# tasks for which a class that transformers does not list for them may be right all the same
_KEPT = {
    "text-generation",
    "text2text-generation",
    "automatic-speech-recognition",
    "image-text-to-text",
    "feature-extraction",
}
_HEAD = re.compile(r"For[A-Z]|LMHeadModel$")


def class_for(config: Any) -> Any:
    """Return the class of a model: that in ``config.architectures``, or the first kind that has one."""
    import transformers

    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    found = next((kind for name in _AUTO_CLASSES if (kind := _of_kind(name, config)) is not None), None)
    if found is not None:
        return found
    raise InvalidArgumentError(f"transformers has no model for a {type(config).__qualname__}.")


def task_of_checkpoint(task: str, architectures: Sequence[str] | None) -> str:
    """Return the task asked for; ``"auto"`` of a class for pretraining asks for the model without its head."""
    stated = str(next(iter(architectures or ()), ""))
    return "feature-extraction" if task == "auto" and stated.endswith("ForPreTraining") else task


def class_of_task(config: Any, task: str, own: Any) -> Any:
    """Return the class that a task asks for: a model's own class where it fits, or where transformers has no other."""
    kinds = [kind for name in _OF_TASK.get(task, ()) if (kind := _of_kind(name, config)) is not None]
    flat = [one for kind in kinds for one in (kind if isinstance(kind, tuple) else (kind,))]
    # AutoModel of a class without a head, such as DPRContextEncoder, may be another part of the model. A head that was
    # trained for something else does not write text.
    stays = (task == "feature-extraction") != bool(_HEAD.search(own.__name__)) and task in _KEPT
    return own if own in flat or stays or not flat else flat[0]


def architecture_of_task(config: Any, task: str, *, runs_code: bool) -> str:
    """Return the name of the class that a task asks for, also one of Python files next to the configuration."""
    if not runs_code:
        return str(class_of_task(config, task, class_for(config)).__name__)
    named: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    wanted = [str(named[name]).rpartition(".")[2] for name in _OF_TASK.get(task, ()) if name in named]
    stated = list(getattr(config, "architectures", None) or [])
    return wanted[0] if wanted and not {*wanted} & {*stated} else "".join(stated[:1])


def base_class_for(config: Any) -> Any:
    """Return the class of a model without a head, as ``AutoModel`` makes it, or that of :func:`class_for`."""
    found = _of_kind("AutoModel", config)
    return class_for(config) if found is None or isinstance(found, tuple) else found


def _of_kind(name: str, config: Any) -> Any:
    """The class that one of transformers' automatic classes has for a configuration; ``None`` where it has none."""
    import transformers

    auto, kind = getattr(transformers, name, None), type(config)
    if auto is None or getattr(transformers, kind.__name__, kind) is not kind:  # a class of the same name
        return None
    with contextlib.suppress(KeyError):  # asking for the keys imports all of transformers' models
        return auto._model_mapping[kind]
    return None


def without_peft(model: Any) -> Any:
    """Return the Hugging Face model, with its adapters, that a ``PeftModel`` is around; any other model as it is."""
    # model: a Hugging Face model, or a `PeftModel`
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} has learned prompts (prompt tuning), which exported files do not support. "
            "Adapters inside layers, such as LoRA, are exported."
        )
    return model.get_base_model()
