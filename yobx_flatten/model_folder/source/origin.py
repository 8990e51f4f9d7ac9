"""Find the folder that a loaded model came from, to copy its tokenizer."""

from __future__ import annotations

import pathlib
from typing import Any

from ...errors import ModelSourceError
from ...files.document import read_configuration
from ...recipe.aliases import TransformersModel
from .tokenizer_files import TOKENIZER_FILES

READERS = (*TOKENIZER_FILES, "preprocessor_config.json", "processor_config.json")
"""Files of which a folder with a tokenizer or a processor holds at least one."""


def reader_of(folder: pathlib.Path) -> str:
    """Return the file that a tokenizer or a processor of a folder is known by; ``""`` where there is none."""
    return next((name for name in READERS if (folder / name).is_file()), "")


def origin_of(model: TransformersModel) -> tuple[pathlib.Path | None, str]:
    """Return the folder that a model was loaded from, as transformers notes it in ``name_or_path``.

    An id of the hub is looked up among what was downloaded. A folder of another kind of model or of another vocabulary
    is none: a relative path may lead elsewhere by now, and words that were added later are not in its tokenizer.
    """
    name = getattr(model.config, "name_or_path", "") or getattr(model, "name_or_path", "")
    if not name:
        return None, "the model does not state the folder that it is from"
    folder = pathlib.Path(name)
    if not folder.is_dir():
        import huggingface_hub

        try:
            folder = pathlib.Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):  # nothing was downloaded, or the name is not an id of the hub
            return None, f"the model is from {name}, which is not a folder here"
    if not (folder / "config.json").is_file():
        return None, f"the model is from {name}, which holds no config.json"
    stated = read_configuration(folder / "config.json", dict[str, Any], failure=ModelSourceError)
    parts = [part.get("model_type") for part in (stated, *(value for value in stated.values() if type(value) is dict))]
    if model.config.model_type not in parts:
        return None, f"{name} is of a model of type {parts[0]!r}, and this one is {model.config.model_type!r}"
    vocabulary = {**stated, **(stated.get("text_config") or {})}.get("vocab_size")
    own = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if vocabulary is not None and own is not None and vocabulary != own:
        return None, f"{name} is of a vocabulary of {vocabulary}, and this model's has {own}"
    return folder, ""
