"""Every class of transformers with a head, by its task: the names, the small models. No network, CPU, float32.

A name is ``sequence_classification:BertForSequenceClassification``: the table of transformers that lists the class,
``MODEL_FOR_..._MAPPING_NAMES``, in small letters, and the class. One that several tables list has the name of the first
that is not about pretraining or several media.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from .cases import SkipColumnError
from .heads_overrides import HEADS
from .models import built, small_config
from .overrides import OVERRIDES

__all__ = ["NoLossError", "head_class", "head_names", "make_head", "tables_of"]

_PREFIX, _SUFFIX = "MODEL_FOR_", "_MAPPING_NAMES"
# tables that list again what others list, by what it was trained for
_LAST = ("multimodal_lm", "pretraining")
# tables of models without a head
_NO_HEADS = ("backbone", "image", "text_encoding")
_LABELS = 3
_OF_TWO = ("pretraining:", "next_sentence_prediction:")
# what is random in training: dropped or masked, so that a run of parts is not that of the whole
_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")


class NoLossError(SkipColumnError):
    """The class computes no loss."""


def tables_of() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the classes by task and model type, as transformers lists them."""
    import transformers.models.auto.modeling_auto as tables

    found = {}
    for name in dir(tables):
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            task = name[len(_PREFIX) : -len(_SUFFIX)].lower()
            listed = getattr(tables, name)
            found[task] = {key: (one,) if isinstance(one, str) else tuple(one) for key, one in listed.items()}
    return found


def head_names() -> list[str]:
    """Return the names of all heads, each class once."""
    tables = {task: table for task, table in tables_of().items() if task not in _NO_HEADS}
    names: dict[str, str] = {}
    for task in sorted(tables, key=lambda task: (_LAST.index(task) + 1 if task in _LAST else 0, task)):
        for classes in tables[task].values():
            for one in classes:
                names.setdefault(one, f"{task}:{one}")
    return sorted(names.values())


def head_class(name: str) -> Any:
    """Return the class of a name.

    Raises:
        NoLossError: its forward computes no loss.
    """
    import transformers

    cls = getattr(transformers, name.partition(":")[2])
    if "loss" not in inspect.getsource(cls.forward):
        raise NoLossError(f"{cls.__name__}.forward computes no loss")
    return cls


def make_head(name: str, *, seed: int = 0, problem: str | None = None) -> Any:
    """Build the model of a name, in evaluation mode, with random weights; nothing in it is random in training.

    Args:
        name: see `head_names`.
        seed: the seed of the weights.
        problem: the ``problem_type`` of the configuration. Default: none, which is a class for each row.

    Raises:
        NoLossError: the class computes no loss.
        Exception: whatever transformers raises when it cannot build the model here.
    """
    cls = head_class(name)
    config = cls.config_class
    own = {**OVERRIDES.get(config.model_type, {}), **HEADS.get(config.model_type, {}), **HEADS.get(cls.__name__, {})}
    own = {key: value for key, value in own.items() if key not in ("config", "model")}
    made = small_config(config, {key: _of_model_type(value) for key, value in copy.deepcopy(own).items()})
    if name.startswith("causal_lm:") and getattr(made, "is_decoder", None) is False:
        made.is_decoder = True
    _without_randomness(made)
    _with_tokens(made)
    if "num_labels" not in own:
        made.num_labels = 2 if name.startswith(_OF_TWO) or "question_answering:" in name else _LABELS
    if problem is not None:
        made.problem_type = problem
        made.num_labels = 1 if problem == "regression" else _LABELS
    model = built(cls, made, seed)
    if getattr(made, "default_language", ...) is None:
        model.set_default_language(made.languages[0])
    return model


def _of_model_type(value: Any) -> Any:
    """The configuration of another type, where fields state which: a backbone."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if isinstance(value, dict) and "model_type" in value:
        return CONFIG_MAPPING[value.pop("model_type")](**value)
    return value


def _with_tokens(config: Any) -> None:
    """The tokens that heads look for, where the configuration states none."""
    for one in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        if getattr(one, "pad_token_id", None) is None:
            one.pad_token_id = 0
        if getattr(one, "is_encoder_decoder", False) and getattr(one, "decoder_start_token_id", None) is None:
            one.decoder_start_token_id = 1


def _without_randomness(config: Any) -> None:
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _without_randomness(value)
        elif any(word in key for word in _RANDOM):
            if isinstance(value, float):
                setattr(config, key, 0.0)
            elif isinstance(value, (list, tuple)):
                setattr(config, key, [0.0] * len(value))
        elif key == "apply_spec_augment":
            setattr(config, key, False)
