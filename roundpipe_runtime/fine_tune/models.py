"""Load the model to train and its tokenizer, from a folder, a GGUF file, or a configuration with random weights."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn

from yobx_flatten.errors import require
from yobx_flatten.model_folder.source.configuration import FILES_ONLY, bounded_weights, bytes_of_weights, read_config
from yobx_flatten.model_folder.source.find import TOKENIZER_FILES, FoundModel, open_tokenizer, readable
from yobx_flatten.model_folder.source.gguf_file import GGUF, gguf_config, gguf_weights, is_gguf
from yobx_flatten.model_folder.source.open import NotStreamableError, open_checkpoint, unread_model
from yobx_flatten.model_folder.source.packed_weights import UnmatchedWeights, load_stored

from ..device.disk import HOST_IN_MEMORY, DiskMemory, disk_folder, keep_with, page_out
from ..device.worker import generator_kept
from ..errors import FineTuneError
from ..huggingface.quantize import FewBits, quantize_frozen

_FIX = "Name a folder that save_pretrained wrote, a GGUF file, or a config.json."


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """The source of a model that is not loaded yet: a folder, a GGUF file, or only a configuration.

    Attributes:
        name: name of the model, as the user passed it.
        config: configuration of the model, an object of transformers.
        folder: folder of the tokenizer and the weights; ``None`` for a GGUF file or a configuration.
        has_weights: whether the folder or GGUF file contains weights; otherwise the weights are random.
        unmatched_weights: how to load stored weights that do not match the model. ``"refuse"`` raises an error.
            ``"unused"`` ignores stored weights that the model does not have, as is always done for a GGUF file.
            ``"random"`` does the same, and randomly initializes weights that are missing or stored with another shape.
        gguf: GGUF file of the tokenizer and the weights; ``None`` for any other source.
    """

    name: str
    config: Any
    folder: pathlib.Path | None = None
    has_weights: bool = False
    unmatched_weights: UnmatchedWeights = "refuse"
    gguf: pathlib.Path | None = None

    @classmethod
    def of(cls, config: Any, name: str) -> ModelSource:
        """Return a :class:`ModelSource` for a model with a given configuration and random weights.

        Args:
            config: configuration of transformers.
            name: name of the model in messages.

        Returns:
            The source.

        Raises:
            FineTuneError: transformers has no causal language model for the configuration.
        """
        return cls(name, _causal(config, name))

    @property
    def vocab_size(self) -> int:
        """The vocabulary size; all token ids are smaller than this number."""
        return int(self.config.get_text_config(decoder=True).vocab_size)

    @property
    def longest(self) -> int | None:
        """The largest number of tokens per row; ``None`` if the configuration states no limit."""
        found = getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def load(
        self,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        quantize: FewBits | None = None,
        host: str = HOST_IN_MEMORY,
    ) -> nn.Module:
        """Load the model with its stored weights, or initialize it with random weights.

        Args:
            dtype: dtype of the weights. By default, stored weights keep their dtype. Only float16 weights become
                bfloat16, because gradients underflow in float16. Random and GGUF weights are in float32 by default.
            seed: seed of random weights.
            quantize: quantization of the linear layers, as for :func:`quantize_frozen`. Weights in safetensors files
                are read one after the other. Weights in other formats are all loaded before quantization.
            host: where the weights are stored. With ``"disk:DIR"``, weights in safetensors files are copied one by one
                into a scratch file in the folder ``DIR``, so the model may be larger than the memory. Random weights,
                quantized weights, and weights in other formats are all in memory.

        Returns:
            The model, on the host.

        Raises:
            FineTuneError: the weights cannot be read, or do not match the configuration.
            ModelSourceError: the weights of a GGUF file cannot be read.
        """
        if quantize is not None:
            unread = self._unread(dtype)
            if unread is None:
                return quantize_frozen(self.load(dtype=dtype, seed=seed), quantize)
            model, readers = unread
            return quantize_frozen(model, quantize, weights=lambda name: readers[name]()).train()
        transformers = _transformers()
        if self.gguf is not None:
            kind, size = _causal_classes()[type(self.config)], 4 * self.gguf.stat().st_size
            with bounded_weights(self.name, failure=FineTuneError, stored=size):
                wanted = self._dtype_of_weights(dtype)
                return _module(gguf_weights(kind, self.config, self.gguf, wanted, choice=self.unmatched_weights)[0])
        home = disk_folder(host)
        # without a dtype in the configuration, all weights are needed to choose the dtype
        if home is not None and (dtype or getattr(self.config, "dtype", None)):
            unread = self._unread(dtype)
            if unread is not None:
                return _module(_read_to_disk(*unread, self._dtype_of_weights(dtype), home))
        stored = bytes_of_weights(self.folder, failure=FineTuneError) if self.folder is not None else 0
        with bounded_weights(self.name, failure=FineTuneError, stored=stored):
            if not self.has_weights:
                with generator_kept():
                    torch.manual_seed(seed)
                    made = transformers.AutoModelForCausalLM.from_config(self.config, dtype=dtype or torch.float32)
                return _module(made)
            how: dict[str, Any] = {"config": self.config, "dtype": dtype or _stored_dtype(self.config), **FILES_ONLY}
            how |= {"failure": FineTuneError, "option": "--unmatched-weights {}", "seed": seed}
            kind = transformers.AutoModelForCausalLM
            return _module(load_stored(kind, self.folder, self.name, choice=self.unmatched_weights, **how)[0])

    def _unread(self, dtype: torch.dtype | None) -> tuple[nn.Module, Mapping[str, Callable[[], torch.Tensor]]] | None:
        """Return the model without its weights, and for each weight a function that reads it, if this is possible."""
        checkpoint = open_checkpoint(self.folder) if self.folder is not None and self.has_weights else None
        if checkpoint is None:
            return None
        found = FoundModel(self.name, self.config, self.folder, True, unmatched_weights=self.unmatched_weights)
        try:
            model, readers, _ = unread_model(found, checkpoint, self._dtype_of_weights(dtype))
        except NotStreamableError:
            return None
        return (model, readers) if type(model) is _causal_classes()[type(self.config)] else None

    def _dtype_of_weights(self, dtype: torch.dtype | None) -> torch.dtype:
        stored = dtype or _stored_dtype(self.config)
        if not isinstance(stored, torch.dtype):
            stored = getattr(self.config, "dtype", None) or torch.float32
        found: torch.dtype = getattr(torch, stored) if isinstance(stored, str) else stored
        return found


def _read_to_disk(
    model: nn.Module, readers: Mapping[str, Callable[[], torch.Tensor]], dtype: torch.dtype, home: pathlib.Path
) -> nn.Module:
    """Read parameters into a file on a disk, one at a time, because they may not all fit into memory."""
    memory = DiskMemory(home)
    made: dict[int, nn.Parameter] = {}
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, last = path.rpartition(".")
        if id(parameter) not in made:
            weight = readers[path]()
            place = memory.copy(("weight", path), weight, dtype)
            made[id(parameter)] = nn.Parameter(place, requires_grad=parameter.requires_grad)
            memory.leave([place])
            page_out(weight)  # the weight is mapped from its file
        model.get_submodule(owner)._parameters[last] = made[id(parameter)]
    keep_with(model, memory)
    return model


def model_source(name: str | os.PathLike[str]) -> ModelSource:
    """Return the source of the model in a folder, a GGUF file or a configuration file; no weights are read.

    Args:
        name: folder with ``config.json``, which may also contain weights and a tokenizer; or the path of a GGUF file or
            a ``config.json``.

    Returns:
        The source, from which :meth:`ModelSource.load` loads the model.

    Raises:
        FineTuneError: ``name`` is not the path of a model, or the model is not a causal language model.
        ModelSourceError: a GGUF file cannot be read.
    """
    path = pathlib.Path(name)
    if not path.exists():
        raise FineTuneError(f"There is no folder {name}. {_FIX}")
    if path.is_file() and is_gguf(path):
        _transformers()
        return ModelSource(str(name), _causal(gguf_config(path), str(name)), has_weights=True, gguf=path)
    file = path / "config.json" if path.is_dir() else path
    folder = file.parent if path.is_dir() else None
    has_weights = folder is not None and bytes_of_weights(folder, failure=FineTuneError) > 0
    if folder is not None and not has_weights and (held := sorted(folder.glob(f"*{GGUF}"))):
        first = held[0]
        raise FineTuneError(f"{name} contains {first.name}. Name the file instead of its folder: {first}")
    if path.is_dir() and not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise FineTuneError(
                f"{name} contains adapters but no model. Merge them:\n    model.merge_and_unload().save_pretrained(DIR)"
            )
        raise FineTuneError(f"{name} contains no config.json. {_FIX}")
    _transformers()
    config = read_config(file, str(name), failure=FineTuneError, remedy=_FIX)
    return ModelSource(str(name), _causal(config, str(name)), folder, has_weights)


def _causal_classes() -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING


def _causal(config: Any, name: str) -> Any:
    if type(config) not in _causal_classes():
        raise FineTuneError(
            f"transformers has no causal LM of type {config.model_type!r} ({name}). Train it with RoundPipeTrainer."
        )
    return config


def _stored_dtype(config: Any) -> torch.dtype | str:
    stored = getattr(config, "dtype", None)
    return torch.bfloat16 if stored in (torch.float16, "float16") else "auto"


def _module(model: Any) -> nn.Module:
    made: nn.Module = model
    return made.train()


def _transformers() -> Any:
    require("transformers", purpose="a training on text", extra="transformers,train")
    import transformers

    return transformers


class FolderTokenizer:
    """A tokenizer that transformers loaded from a folder or a GGUF file."""

    # inner: tokenizer that `AutoTokenizer` loaded from a folder

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name
        self.vocab_size = 1 + max(inner.get_vocab().values(), default=-1)  # token ids may have gaps
        self.eos_token_id: int | None = inner.eos_token_id

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        # not verbose: long texts are split into rows later, so a warning about their length is wrong
        with readable(self.name, FineTuneError):
            rows = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [torch.tensor(row, dtype=torch.int32) for row in rows["input_ids"]]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        return str(self.inner.decode([int(number) for number in ids], skip_special_tokens=not special))

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        self.inner.save_pretrained(folder)


def load_tokenizer(source: ModelSource, name: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load the tokenizer of a model.

    Args:
        source: the model to train, as :func:`model_source` returned it.
        name: folder or GGUF file with a tokenizer, or ``"bytes"``. Default: the tokenizer in the model's folder or GGUF
            file. For a model with random weights and without a tokenizer, the default is a byte tokenizer.

    Returns:
        The tokenizer.

    Raises:
        FineTuneError: the tokenizer is missing, cannot be read, or has more tokens than the vocabulary of the model.
    """
    if name is not None and str(name) != "bytes":
        return _from_folder(pathlib.Path(name))
    if name is None and source.gguf is not None:
        return FolderTokenizer(open_tokenizer(source.gguf, failure=FineTuneError), source.name)
    if name is None and source.folder is not None and _has_tokenizer(source.folder):
        return _from_folder(source.folder)
    if name is None and source.has_weights:
        raise FineTuneError(
            f"{source.name} contains weights but no tokenizer. Add its tokenizer files, name a folder that has them "
            "(--tokenizer DIR), or train on bytes: --tokenizer bytes"
        )
    made = ByteTokenizer()
    if made.vocab_size > source.vocab_size:
        raise FineTuneError(
            f"{source.name} has a vocabulary of {source.vocab_size} tokens, but the byte tokenizer has "
            f'{made.vocab_size}. Write this size into config.json: "vocab_size": {made.vocab_size}'
        )
    return made


def _has_tokenizer(folder: pathlib.Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    is_gguf = folder.suffix == ".gguf" and folder.is_file()
    if not folder.is_dir() and not is_gguf:
        what = f"{folder} is a file" if folder.is_file() else f"There is no folder {folder}"
        raise FineTuneError(f"{what}. Name a folder with a tokenizer, or: --tokenizer bytes")
    if not is_gguf and not _has_tokenizer(folder):
        raise FineTuneError(
            f"{folder} contains no tokenizer. Name a folder with {TOKENIZER_FILES[0]}, or: --tokenizer bytes"
        )
    found = open_tokenizer(folder, failure=FineTuneError)
    return ByteTokenizer() if type(found).__name__ == "ByT5Tokenizer" else FolderTokenizer(found, str(folder))


_FIRST_BYTE = 3


class ByteTokenizer:
    """A tokenizer without a vocabulary: one token per byte of UTF-8.

    Attributes:
        vocab_size: number of different tokens; every token id is smaller than this number.
        eos_token_id: id of the token after each document.
        pad_token_id: id of the padding token, which is stored for other programs and not used by this package.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode(["né"])
    [tensor([113, 198, 172], dtype=torch.int32)]
    >>> tokenizer.decode([113, 198, 172, 1])
    'né'
    """

    vocab_size = _FIRST_BYTE + 256
    eos_token_id: int | None = 1
    pad_token_id = 0
    name = "bytes"

    def encode(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Return the token ids of each text, int32 of shape (bytes,), without an end-of-text token."""
        read = (numpy.frombuffer(text.encode("utf-8"), numpy.uint8).astype(numpy.int32) for text in texts)
        return [torch.from_numpy(numbers) + _FIRST_BYTE for numbers in read]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of token ids, without special tokens. Incomplete characters become U+FFFD.

        Args:
            ids: tokens in order.
            special: has no effect, because special tokens are always left out.

        Returns:
            The text.
        """
        data = bytes(number - _FIRST_BYTE for number in map(int, ids) if 0 <= number - _FIRST_BYTE < 256)
        return data.decode("utf-8", "replace")

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files from which transformers loads its byte tokenizer."""
        from transformers import ByT5Tokenizer

        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)


Tokenizer: TypeAlias = FolderTokenizer | ByteTokenizer
"""A tokenizer that a training uses, from :func:`load_tokenizer`."""
