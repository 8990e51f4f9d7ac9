"""Read untrusted model configurations, choose a model class for a configuration, and make small configurations."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from ...core.files.document import check_regular, inside, read_configuration, read_document
from ...errors import InvalidArgumentError, ModelSourceError
from ...errors.failures import first_line, format_bytes, raised_as
from ...export.model_facts import memory_available
from ...registry.recipe.aliases import TransformersModel
from ...registry.recipe.static_codec import objection_to
from ..pieces.tasks import AUTO_CLASSES, GENERATES, TASKS

# arguments for every `from_pretrained`; without `False`, transformers asks on the terminal whether to run code
FILES_ONLY: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MOST_PARAMETERS = 300_000  # tensors; a model of 61 layers with 384 experts has 70,000


def read_config(
    file: pathlib.Path,
    name: str,
    *,
    failure: type[Exception],
    remedy: str = "",
    runs_code: bool = False,
    of_code: str = "",
) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    stated = read_configuration(file, dict[str, Any], failure=failure, remedy=remedy)
    objection = objection_to(stated)
    if objection is not None:
        raise failure(f"{file} {objection}.{remedy and ' '}{remedy}")
    named = stated.get("auto_map")
    if isinstance(named, Mapping) and not runs_code:
        # code of a tokenizer or a processor is not needed
        classes = [str(named[key]) for key in sorted(named) if key.startswith(("AutoConfig", "AutoModel"))]
        wanted = [kind for kind in stated.get("architectures") or () if isinstance(kind, str)]
        is_known = stated.get("model_type") in CONFIG_MAPPING and all(hasattr(transformers, kind) for kind in wanted)
        if classes and not is_known:
            code = f"its own code ({classes[0]}, in auto_map of config.json), which is not run"
            raise failure(f"{name} needs {code}. {of_code or remedy}")

    def refused(error: BaseException) -> Exception:
        reason = first_line(error).rstrip(".")
        return failure(f"{name} is not a configuration of transformers: {reason}.{remedy and ' '}{remedy}")

    with raised_as(refused):  # transformers, huggingface_hub and JSON each raise their own errors
        if runs_code and "auto_map" in stated:
            return transformers.AutoConfig.from_pretrained(file.parent, **{**FILES_ONLY, "trust_remote_code": True})
        return transformers.AutoConfig.from_pretrained(file, **FILES_ONLY)


def write_json(path: pathlib.Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def change_json(path: pathlib.Path, entries: Mapping[str, Any]) -> None:
    """Set entries of a JSON file; an entry of ``None`` is removed."""
    held = {**read_document(path, dict[str, Any], failure=ModelSourceError, finite=False), **entries}
    write_json(path, {name: value for name, value in held.items() if name not in entries or value is not None})


def bytes_of_weights(folder: pathlib.Path, *, failure: type[Exception]) -> int:
    for index in (index for pattern in _WEIGHTS for index in folder.glob(f"{pattern}.index.json")):
        stated_weights(index, failure=failure)
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    for file in files:
        check_regular(file, failure)
    return sum(file.stat().st_size for file in files)


def stated_weights(index: pathlib.Path, *, failure: type[Exception]) -> dict[str, str]:
    """Read the index of a checkpoint that has several files; return the name of the file of each weight."""
    held = read_document(index, _Index, failure=failure, finite=False).weight_map
    for name in set(held.values()):
        inside(index.parent, name, failure)
    return held


@dataclasses.dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


@contextlib.contextmanager
def bounded_weights(name: str, *, failure: type[Exception], stored: int = 0) -> Iterator[None]:
    """In a ``with`` block, raise an error if a model is made with more weights than the memory can hold."""
    # stored: bytes of the files with the weights; 0 for random weights
    thread = threading.get_ident()
    most = max(memory_available(), 4 * stored)  # files may be memory-mapped, and converted to a wider dtype
    count = size = 0

    def add(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal count, size
        if parameter is None or threading.get_ident() != thread:
            return
        count, size = count + 1, size + parameter.nbytes
        if size > most:
            raise failure(
                f"The model that {name} configures does not fit into memory: its first {count} weights take "
                f"{format_bytes(size)} already, but only {format_bytes(most)} are available."
            )
        if count > _MOST_PARAMETERS:
            raise failure(f"The model that {name} configures has more than {_MOST_PARAMETERS:,} weights.")

    # each model class raises its own errors for impossible sizes
    loading = raised_as(lambda error: failure(f"The model in {name} cannot be loaded: {first_line(error)}"), failure)
    with torch.nn.modules.module.register_module_parameter_registration_hook(add), loading:
        yield


ON_PURPOSE = "If you trust its author: trust_remote_code=True (--trust-remote-code)."  # the end of error messages


def own_auto_class(config: Any) -> Any:
    """Return the transformers auto class that loads a model with the code in its folder; ``None`` if there is none."""
    import transformers

    named: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    kinds = [key for key in named if key.startswith("AutoModel") and hasattr(transformers, key)]
    wanted = set(getattr(config, "architectures", None) or ())
    fitting = [key for key in kinds if str(named[key]).rpartition(".")[2] in wanted]
    return getattr(transformers, (fitting or kinds)[0]) if kinds else None


# in order of priority: the first auto class that has a class for a configuration is chosen
_AUTO_CLASSES = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",  # before AutoModelForCausalLM, which also has classes for encoders
    "AutoModelForCausalLM",
    "AutoModel",
)
# tasks whose classes are not all listed in transformers' auto classes
_KEPT = {*GENERATES, "feature-extraction"} - {"image-to-text"}
_HEAD = re.compile(r"For[A-Z]|LMHeadModel$")


def class_for(config: Any) -> Any:
    import transformers

    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    found = next((kind for name in _AUTO_CLASSES if (kind := of_kind(name, config)) is not None), None)
    if found is None:
        raise InvalidArgumentError(f"transformers has no model class for a {type(config).__qualname__}.")
    return found


def classes_of_task(config: Any, task: str) -> list[Any]:
    kinds = [kind for name in AUTO_CLASSES.get(task, ()) if (kind := of_kind(name, config)) is not None]
    return [one for kind in kinds for one in (kind if isinstance(kind, tuple) else (kind,))]


def class_of_task(config: Any, task: str, own: Any) -> Any:
    """Return the model class ``own`` if it fits a task or transformers has none for it, else transformers' class."""
    flat = classes_of_task(config, task)
    # A class without a head, such as DPRContextEncoder, stays: its AutoModel may be another part of the model. A class
    # with a head stays only for tasks that this head is for.
    stays = (task == "feature-extraction") != bool(_HEAD.search(own.__name__)) and task in _KEPT
    return own if own in flat or stays or not flat else flat[0]


def check_class(model: TransformersModel, own_task: str, task: str) -> None:
    """Raise InvalidArgumentError if a task does not fit the model's class, such as embeddings for a classifier."""
    kind = type(model)
    of_head = f"is for {own_task}, not for {task}. Leave the task out, or ask for {own_task}."
    if task == own_task == "feature-extraction" and kind.__module__.startswith("transformers."):
        if class_of_task(model.config, task, kind) is kind:
            return
        of_head = "returns the scores of its head."  # a class without a task, such as ForPreTraining
    elif task not in TASKS or task == own_task or TASKS[task] is not TASKS[own_task]:
        return
    is_own = not kind.__module__.startswith("transformers.")  # the caller's own class may return embeddings
    if own_task == "feature-extraction" and (is_own or kind in classes_of_task(model.config, task)):
        return
    has_base = task == "feature-extraction" and model.base_model is not model
    base = f"\n    export_folder(model.base_model, ..., task={task!r})" if has_base else ""
    raise InvalidArgumentError(f"A {kind.__qualname__} {of_head}{base}")


def note_on_head(model: TransformersModel, own_task: str, task: str) -> tuple[str, ...]:
    """Return a note for the report if the exported model has a head that no task uses, such as a pretraining head."""
    kind = type(model)
    if task != "auto" or own_task != "feature-extraction" or model.base_model is model:
        return ()
    if class_of_task(model.config, "feature-extraction", kind) is kind:
        return ()
    return (f"{kind.__qualname__} was exported, with its head. For embeddings, export model.base_model.",)


def architecture_of_task(config: Any, task: str, *, runs_code: bool) -> str:
    """Return the name of a model's class for a task: in transformers, or in Python files of the model's folder."""
    if not runs_code:
        return str(class_of_task(config, task, class_for(config)).__name__)
    named: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    wanted = [str(named[name]).rpartition(".")[2] for name in AUTO_CLASSES.get(task, ()) if name in named]
    stated = list(getattr(config, "architectures", None) or [])
    return wanted[0] if wanted and not {*wanted} & {*stated} else "".join(stated[:1])


def of_kind(name: str, config: Any) -> Any:
    """Return the model class that a transformers auto class loads for a configuration; ``None`` if there is none."""
    import transformers

    auto, kind = getattr(transformers, name, None), type(config)
    if auto is None or getattr(transformers, kind.__name__, kind) is not kind:  # a foreign class with the same name
        return None
    with contextlib.suppress(KeyError):  # a lookup imports one model, a list of the keys all models
        return auto._model_mapping[kind]
    return None


WINDOW = 8

# Sizes by their names in all configurations; a configuration gets the entries that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "projection_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_layer", "num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "query_pre_attn_scalar", "num_mel_bins"), 16),
    **dict.fromkeys(("rotary_dim", "patch_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    "max_source_positions": 50,
    "max_target_positions": 128,
    **dict.fromkeys(("image_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("n_head", "mm_tokens_per_image", "num_experts", "num_local_experts", "linear_num_value_heads"), 4),
    # which layers have attention, and which have experts
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    "attn_layer_indices": [1],
    # states; heads times their size is twice the width
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_num_heads", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "mamba_d_ssm": 128,
    # larger than for training, so that the untrained model generates different tokens
    "initializer_range": 0.3,
    # ByT5's vocabulary: three special tokens, then one token per byte. Every small model can use ByT5's tokenizer.
    "vocab_size": 259,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "eos_token_id": 1,
    "bos_token_id": 2,
    **dict.fromkeys(("image_token_id", "image_token_index"), 3),
    "video_token_id": 258,  # byte 255, which UTF-8 never contains
}
# Lists of tokens that are not in the small vocabulary.
_DROPPED = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")


def small_config(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        close = difflib.get_close_matches(name, list(CONFIG_MAPPING.keys()), n=3, cutoff=0.72)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise InvalidArgumentError(f"{name!r} is neither a folder nor a type of model that transformers has.{hint}")

    def refused(error: BaseException) -> InvalidArgumentError:
        # the message of a failed check has its reason in the second line
        lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2] or [type(error).__name__]
        return InvalidArgumentError(
            f"A small {name} model cannot be made: {' '.join(lines).rstrip('.:')}. Name a folder or a config.json."
        )

    with raised_as(refused):  # each configuration raises its own errors
        return _shrunk(CONFIG_MAPPING[name])


def _shrunk(config_class: Any) -> Any:
    default = config_class()
    options = {name: size for name, size in _SIZES.items() if _may_be_set(default, name, size)}
    options |= {name: None for name in _DROPPED if getattr(default, name, None)}
    if getattr(default, "sliding_window", None):
        options["sliding_window"] = WINDOW
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if kinds and _may_be_set(default, "layer_types", kinds):
        options["num_hidden_layers"] = max(2, len(kinds))
        options["layer_types"] = [kinds[index % len(kinds)] for index in range(options["num_hidden_layers"])]
    if {"num_heads", "head_dim"} <= options.keys() and hasattr(default, "expand"):  # Mamba 2
        options |= {"head_dim": default.expand * _SIZES["hidden_size"] // _SIZES["num_heads"], "n_groups": 1}
    if hasattr(default, "spatial_merge_size"):  # vision encoders of pictures of any size
        sizes: dict[str, Any] = {"embed_dim": 64, "out_hidden_size": 64, "window_size": 32, "initializer_range": 0.1}
        sizes |= {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1]}
        options |= {name: size for name, size in sizes.items() if _may_be_set(default, name, size)}
    if isinstance(getattr(default, "depths", 0), list | tuple) and hasattr(default, "window_size"):  # Swin
        options |= {"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "window_size": 2}
    below = {name: getattr(default, name, None) for name in getattr(default, "sub_configs", {})}
    options |= {name: _shrunk(type(one)) for name, one in below.items() if one is not None}
    config = config_class(**options)
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
        config.rope_parameters["mrope_section"] = [2, 3, 3]  # time, height and width share half of a head
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = _SIZES["decoder_start_token_id"]  # T5's class has no value for it
    return config


def _may_be_set(config: Any, name: str, value: object) -> bool:
    found = getattr(type(config), getattr(config, "attribute_map", {}).get(name, name), None)
    if isinstance(getattr(config, name, None), list | tuple) and not isinstance(value, list):
        return False  # a number for each stage of an encoder of images
    return hasattr(config, name) and not (isinstance(found, property) and found.fset is None)


def small_model(name: str, seed: int = 0) -> Any:
    config = small_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return class_for(config)(config).eval()
