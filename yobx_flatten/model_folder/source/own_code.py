"""Refuse a ``config.json`` with ``auto_map``, whose Python files would run, unless the caller trusts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ON_PURPOSE = "Where you trust its author: trust_remote_code=True (--trust-remote-code)."
"""What to type, in Python and on the command line of an export."""


def own_code(stated: Mapping[str, Any]) -> str:
    """Return the class that a configuration needs code of its own for; ``""`` where transformers has the classes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    named = stated.get("auto_map")
    if not isinstance(named, Mapping):
        return ""
    classes = [str(named[key]) for key in ("AutoConfig", *sorted(named)) if key in named and _is_of_model(key)]
    wanted = [name for name in stated.get("architectures") or () if isinstance(name, str)]
    is_known = stated.get("model_type") in CONFIG_MAPPING and all(hasattr(transformers, name) for name in wanted)
    return "" if is_known or not classes else classes[0]


def _is_of_model(key: str) -> bool:
    return key == "AutoConfig" or key.startswith("AutoModel")  # and not of a tokenizer or a processor


def own_auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a model by the code of its folder."""
    import transformers

    named: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    kinds = [key for key in named if key.startswith("AutoModel") and hasattr(transformers, key)]
    wanted = set(getattr(config, "architectures", None) or ())
    fitting = [key for key in kinds if str(named[key]).rpartition(".")[2] in wanted]
    return getattr(transformers, (fitting or kinds)[0]) if kinds else None
