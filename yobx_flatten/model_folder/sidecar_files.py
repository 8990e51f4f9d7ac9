"""Write the files that tools expect next to the model: configurations, tokenizer, onnxruntime-genai's."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Collection, Sequence
from typing import Any

from ..errors import ModelSourceError
from ..files.document import check_regular, read_document
from ..huggingface.cache_names import CACHE, PRESENT
from ..recipe.aliases import TransformersModel
from .sentence import copy_modules
from .source.adapter import ADAPTER
from .source.gguf_file import gguf_tokenizer

__all__ = ["TOKENIZER_INPUTS", "genai_config", "state_tokenizer_inputs", "write_companions", "write_genai_config"]

# Everything that is next to weights and is text, but for what is written anew.
_LARGEST = 2**30  # bytes
TOKENIZER_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
"""What a tokenizer may return of a text, or of a pair."""
_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
# an adapter is merged: next to the file it would be read as one that is not
_WRITTEN_ANEW = {"config.json", "generation_config.json", ADAPTER}


def write_companions(
    folder: pathlib.Path, model: TransformersModel, source: pathlib.Path | None, *, reads_bytes: bool = False
) -> None:
    """Write what belongs next to the files of a model."""
    # source: the folder it is from, whose tokenizer and processor are copied, or its GGUF file; `None` where it is not
    # known
    # reads_bytes: whether a model without a folder gets a tokenizer of bytes: one with random weights, which were
    # trained on no other
    model.config.architectures = model.config.architectures or [type(model).__name__]
    model.config.save_pretrained(folder)
    _without_code(folder / "config.json")
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    if source is None and reads_bytes:
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    if source is None:
        return
    if source.is_file():
        gguf_tokenizer(source).save_pretrained(folder)
    for pattern in _PATTERNS:
        for path in source.glob(pattern):
            if path.name not in _WRITTEN_ANEW and not path.name.endswith(".index.json"):
                _check_own(path)
                shutil.copyfile(path, folder / path.name)
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


def _without_code(path: pathlib.Path) -> None:
    """Leave out names of classes in Python files: these are not copied, and what is exported needs none."""
    stated = read_document(path, dict[str, Any], failure=ModelSourceError, finite=False)
    if stated.pop("auto_map", None) is not None:
        path.write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_own(path: pathlib.Path) -> None:
    """Refuse a file that is another one of the user: what is exported may be published."""
    check_regular(path, ModelSourceError, _LARGEST)
    real, folder = path.resolve(), path.parent.resolve()
    # the caches of hubs have `models--owner--name/snapshots/REVISION/file -> ../../blobs/DIGEST`
    if not real.is_relative_to(folder) and real.parent != folder.parent.parent / "blobs":
        raise ModelSourceError(
            f"{path} is a link to {real}, which is outside of the folder, and would be copied next to the exported "
            "files. Replace it by the file itself, or remove it."
        )


def genai_config(
    model: TransformersModel, inputs: Sequence[str], *, shared: Collection[str] = ()
) -> dict[str, Any] | None:
    """Return the contents of ``genai_config.json``, which onnxruntime-genai reads."""
    # shared: those whose memory may be that of an output; none by default. The library writes into one piece of memory
    # where these are all of the cache.
    # returns: `None` for a model that onnxruntime-genai 0.18 cannot run: it knows keys and values, and no other leaves;
    # and it provides memory for as many keys as there are tokens, which a layer that slides does not fill
    config = model.config
    layers = config.num_hidden_layers
    fed = {f"{CACHE}.{index}.{part}" for index in range(layers) for part in ("key", "value")}
    plain = [name for name in ("input_ids", "attention_mask", "position_ids") if name in inputs]
    one_memory = fed == set(shared)
    if set(inputs) != fed | set(plain) or (_slides(config) and not one_memory):
        return None
    heads = config.num_attention_heads
    room = getattr(config, "max_position_embeddings", None) or 2048
    generation = model.generation_config
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    first_end = ends[0] if isinstance(ends, list) else ends
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": ends, "pad_token_id": config.pad_token_id}
    if tokens["pad_token_id"] is None:
        tokens["pad_token_id"] = first_end
    return {
        "model": {
            # the library feeds all decoders with keys and values alike, and has no names for most of them
            "type": "decoder",
            **{name: token for name, token in tokens.items() if token is not None},
            "context_length": room,
            "vocab_size": config.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
                "hidden_size": config.hidden_size,
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
                "inputs": {
                    **{name: name for name in plain},
                    "past_key_names": f"{CACHE}.%d.key",
                    "past_value_names": f"{CACHE}.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": f"{PRESENT}.%d.key",
                    "present_value_names": f"{PRESENT}.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "num_beams": 1,
            "max_length": room,
            "past_present_share_buffer": one_memory,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


def _slides(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return bool(getattr(config, "sliding_window", None)) and "sliding_attention" in kinds


def write_genai_config(folder: pathlib.Path, contents: dict[str, Any]) -> None:
    """Write ``genai_config.json``."""
    (folder / "genai_config.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
