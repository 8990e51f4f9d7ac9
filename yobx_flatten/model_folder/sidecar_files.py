"""Write the files that tools expect next to the model: configurations and tokenizer."""

from __future__ import annotations

import copy
import json
import pathlib
import shutil
from collections.abc import Collection
from typing import Any

from ..errors import ModelSourceError
from ..files.document import TEXTS, own_files, read_document
from ..recipe.aliases import TransformersModel
from .sentence import copy_modules
from .source.adapter import ADAPTER
from .source.gguf_file import gguf_tokenizer

TOKENIZER_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
"""What a tokenizer may return of a text, or of a pair."""
_OF_CACHES = ("cache_implementation", "cache_config", "max_cache_len")
# an adapter is merged: next to the file it would be read as one that is not
_WRITTEN_ANEW = {"config.json", "generation_config.json", ADAPTER}


def write_companions(
    folder: pathlib.Path, model: TransformersModel, source: pathlib.Path | None, *, reads_bytes: bool = False
) -> None:
    """Write the files that belong next to a model's files."""
    # source: the folder it is from, whose tokenizer and processor are copied, or its GGUF file; `None` where it is not
    # known
    # reads_bytes: whether a model without a folder gets a tokenizer of bytes: one with random weights, which were
    # trained on no other
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # of a base, the configuration states the class around it
    config.save_pretrained(folder)
    # names of classes in Python files: these are not copied, and what is exported needs none
    stated = read_document(folder / "config.json", dict[str, Any], failure=ModelSourceError, finite=False)
    if stated.pop("auto_map", None) is not None:
        text = json.dumps(stated, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    if getattr(model, "generation_config", None) is not None:
        generation = copy.deepcopy(model.generation_config)
        for name in _OF_CACHES:  # the files have one of their own
            if getattr(generation, name, None) is not None:
                setattr(generation, name, None)
        generation.save_pretrained(folder)
    if source is None and reads_bytes:
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    if source is None:
        return
    if source.is_file():
        gguf_tokenizer(source).save_pretrained(folder)
    for path in own_files(source, TEXTS, ModelSourceError):
        if path.name not in _WRITTEN_ANEW and not path.name.endswith(".index.json"):
            copied = folder / path.relative_to(source)
            copied.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copied)
    copy_modules(source, folder)


def state_tokenizer_inputs(folder: pathlib.Path, names: Collection[str]) -> None:
    """Let the tokenizer of a folder return what its file takes, and nothing else; no tokenizer is made."""
    path = folder / "tokenizer_config.json"
    if "input_ids" not in names or not path.exists():
        return
    stated = read_document(path, dict[str, Any], failure=ModelSourceError, finite=False)
    if stated.get("tokenizer_class") == "TokenizersBackend":  # transformers 4 knows this class by its other name only
        stated["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps({**stated, "model_input_names": list(names)}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
