"""Choose the transformers class for a configuration, and find the model inside of a wrapper."""

from __future__ import annotations

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


def base_class_for(config: Any) -> Any:
    """Return the class of a model without a head, as ``AutoModel`` makes it, or that of :func:`class_for`."""
    found = _of_kind("AutoModel", config)
    return class_for(config) if found is None or isinstance(found, tuple) else found


def _of_kind(name: str, config: Any) -> Any:
    """The class that one of transformers' automatic classes has for a configuration; ``None`` where it has none."""
    import transformers

    auto = getattr(transformers, name, None)
    if auto is None or type(config) not in auto._model_mapping.keys():  # noqa: SIM118 # no ordinary mapping
        return None
    return auto._model_mapping[type(config)]


def without_peft(model: Any) -> Any:
    """Return the model of transformers, with its adapters, that a ``PeftModel`` is around; any other model as it is."""
    # model: a model of transformers, or a `PeftModel`
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} with learned prompts adds them to its inputs, and the files of a model have "
            "no such input. Adapters that are part of the layers, as those of LoRA, are exported."
        )
    return model.get_base_model()
