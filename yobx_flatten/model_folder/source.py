"""Where a model comes from: a local folder, the hub, or the name of a configuration."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from ..errors import MissingDependencyError, ModelSourceError
from .classes import class_for
from .small import small_model

__all__ = ["load_model", "require_transformers"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# what stands beside the weights and is not code
_BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors"]


def require_transformers(what: str) -> Any:
    """Import transformers, or say what to install.

    Raises:
        MissingDependencyError: when it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError(f"{what} needs transformers: pip install 'yobx-flatten[transformers]'") from None
    return transformers


def load_model(source: str, *, dtype: str = "float32") -> tuple[Any, pathlib.Path | None]:
    """Load a model, in evaluation mode.

    Args:
        source: a folder that ``save_pretrained`` wrote; an id of the hub, ``"owner/name"``; or a type of model such as
            ``"llama"``, for a small one with random weights.
        dtype: of the weights.

    Returns:
        The model, and the folder it is from, ``None`` for one with random weights.

    Raises:
        InvalidArgumentError: when there is no such folder and no such type.
        ModelSourceError: when the folder holds no model, is damaged, or the hub cannot be reached.
    """
    import torch

    transformers = require_transformers("an export of a model")
    path = pathlib.Path(source)
    if path.is_dir():
        folder = path
    elif path.exists():
        raise ModelSourceError(f"{source} is a file. Name the folder that save_pretrained wrote.")
    elif _HUB_ID.fullmatch(source) and not source.startswith("."):
        folder = _download(source)
    elif "/" in source or "\\" in source or source in (".", ".."):
        raise ModelSourceError(f"There is no folder {source}.")
    else:
        return small_model(source).to(getattr(torch, dtype)), None
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"{source} holds no config.json: it is not a folder that save_pretrained wrote.")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        model = class_for(config).from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    except Exception as error:  # transformers, safetensors and JSON each raise their own
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelSourceError(f"The model in {source} cannot be loaded: {first}") from error
    return model.eval(), folder


def _download(source: str) -> pathlib.Path:
    import huggingface_hub

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(source, allow_patterns=_BESIDE_WEIGHTS))
    except Exception as error:  # of the network, of the hub, of the cache on disk
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelSourceError(f"There is no folder {source}, and the hub does not give it: {first[:200]}") from error
