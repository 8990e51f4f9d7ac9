"""A class with the name of an exported model, its configurations as objects, and no weights. Imports transformers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..errors import GenerationError, InvalidArgumentError
from ..files.damage import damage_as
from ..runners.folder_adapters import FolderAdapters
from .documents import Documents
from .settings import GenerationSettings, settings_of

__all__ = ["ModelWithoutWeights", "class_name_of", "generation_of", "named_class", "read_config"]

# settings, and what transformers calls them
_SETTINGS = {
    "eos_token_ids": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "decoder_start_token_id": "decoder_start_token_id",
    "forced_bos_token_id": "forced_bos_token_id",
    "max_new_tokens": "max_new_tokens",
    "max_length": "max_length",
}


class ModelWithoutWeights(PreTrainedModel):  # type: ignore[misc] # transformers is untyped
    """A model of transformers whose calls run files, wherever these compute."""

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)
        self.anchor = torch.nn.Parameter(torch.zeros(()), requires_grad=False)  # states device and type
        self.of_folder = FolderAdapters(None)
        self._chosen: str | None = None  # the adapter of `set_adapter`
        self._enabled = False

    def use_adapter(self, name: str | None) -> None:
        """Call the files with an adapter from now on; ``None`` for none."""
        raise InvalidArgumentError(f"{type(self).__name__} has no files whose adapters are switched.")

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """Compute with an adapter of the folder from now on."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        if len(names) != 1:
            raise InvalidArgumentError(f"set_adapter takes one adapter of {', '.join(self.of_folder.names)}.")
        self.use_adapter(names[0])
        self._chosen, self._enabled = names[0], True

    def disable_adapters(self) -> None:
        """Compute without an adapter from now on."""
        if self._enabled:
            self.use_adapter(None)
        self._enabled = False

    def enable_adapters(self) -> None:
        """Compute with the adapter of the last :meth:`set_adapter` again."""
        if self._chosen is None:
            raise InvalidArgumentError("No adapter was chosen yet: model.set_adapter(NAME)")
        self.set_adapter(self._chosen)

    def active_adapters(self) -> list[str]:
        """Return the adapter that the files compute with, in a list; an empty one without."""
        return [self._chosen] if self._enabled and self._chosen is not None else []

    def load_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: adapters are in the folder."""
        raise InvalidArgumentError(
            "The adapters of files are in their folder. Add one there, and open the folder again:\n"
            "    yobx-flatten adapter DIR NAME=FOLDER"
        )

    add_adapter = load_adapter

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse another device: tensors come from and go to the host."""
        moved = super().to(*args, **kwargs)
        if self.anchor.device.type != "cpu":
            found, self.anchor = self.anchor.device, torch.nn.Parameter(torch.zeros(()), requires_grad=False)
            raise InvalidArgumentError(
                f"The files take and return tensors of the host, not of {found}. Choose where they compute when they "
                'are opened: open_model(folder, device="cuda")'
            )
        return moved

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: the files are where they are."""
        raise InvalidArgumentError(
            "save_pretrained: the files of this model are in a folder already. Copy that: shutil.copytree(a, b)"
        )


def read_config(stated: dict[str, Any], *, encoder: bool) -> Any:
    """Return a configuration as an object."""
    # encoder: whether the model is an encoder-decoder, where the document does not state it
    kind = stated.get("model_type")
    made: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401 # its `get` imports nothing
    with damage_as(GenerationError, "config.json"):
        config = made.from_dict(stated) if made is not PretrainedConfig else made(**stated)
        if encoder and not getattr(config, "is_encoder_decoder", False):
            config.is_encoder_decoder = True
        return config


def generation_of(settings: GenerationSettings, config: Any) -> Any:
    """Return how a model generates: what is written next to it, but for what the settings were changed to."""
    documents = settings.documents or Documents({}, {})
    own = settings_of(documents.config, documents.generation)
    with damage_as(GenerationError, "generation_config.json"):
        if documents.generation:
            stated = copy.deepcopy(dict(documents.generation))
            stated.pop("_from_model_config", None)  # by which transformers < 5 compares it with the model's
            found = GenerationConfig.from_dict(stated)
        else:
            found = GenerationConfig.from_model_config(config)
    if settings.processors and len(settings.processors) != len(own.processors):
        raise InvalidArgumentError(
            "GenerationSettings(processors=) are not read by the loop of transformers. Pass them to generate: "
            "logits_processor=LogitsProcessorList([...])"
        )
    for name, theirs in _SETTINGS.items():
        value = getattr(settings, name)
        if value != getattr(own, name):
            setattr(found, theirs, list(value) if isinstance(value, tuple) else value)
    return found


def named_class(stated: Mapping[str, Any], bases: tuple[Any, ...]) -> Any:
    """Make a class with the name of the exported one."""
    return type(class_name_of(stated) or bases[0].__name__, bases, {"__module__": __name__})


def class_name_of(stated: Mapping[str, Any]) -> str:
    """Return the class that a configuration names; empty where transformers has no model of that name."""
    names = stated.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) and name in _model_names() else ""


@functools.cache
def _model_names() -> frozenset[str]:
    """The names of all models, read off the tables of the installed transformers; no model is imported."""
    from transformers.models.auto import modeling_auto

    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    values = [value for table in tables for value in table.values()]
    return frozenset(name for value in values for name in ((value,) if isinstance(value, str) else value))
