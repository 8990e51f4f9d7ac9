"""Find and load a model by folder, hub id, configuration or model type, and open the model's tokenizer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pathlib
import re
import warnings
from typing import Any

import torch

from ...core.files.document import TEXTS, own_files, read_bytes, read_configuration, read_document
from ...errors import InvalidArgumentError, ModelSourceError, require
from ...errors.failures import first_line, raised_as
from ...registry.recipe.aliases import TransformersModel
from ..sentence import pools
from .adapter import ADAPTER, config_of, holds_adapter, injected
from .configuration import (
    FILES_ONLY,
    ON_PURPOSE,
    architecture_of_task,
    bounded_weights,
    bytes_of_weights,
    class_for,
    of_kind,
    own_auto_class,
    read_config,
    small_config,
)
from .gguf_file import GGUF, gguf_config, gguf_tokenizer, gguf_weights, is_gguf
from .packed_weights import Packing, UnmatchedWeights, load_stored, packing_of, unpacked_weights

MODEL_NAMES = (
    "A checkpoint folder of a model, a GGUF file, or a Hugging Face id (owner/name). For random weights: a "
    "config.json, a folder without weights, or a model type such as llama, which makes a small model."
)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# suffixes of other frameworks and tools, whose weights are not read
_OTHER_WEIGHTS = (".h5", ".msgpack", ".gguf", ".pth", ".pt", ".ckpt", ".bin", ".npz")
# files to download, without code
_BESIDE_WEIGHTS = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors"]


def require_transformers(what: str) -> None:
    require("transformers", purpose=what, extra="transformers")


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A model that was found by name (folder, hub id, model type), and is not loaded yet."""

    name: str  # the name that the user wrote
    config: Any  # a configuration of transformers
    folder: pathlib.Path | None = None  # folder of the weights and the tokenizer
    has_weights: bool = False  # whether there are stored weights; otherwise, weights are random
    is_small: bool = False  # whether the name is a model type, which gives a tiny random model
    unmatched_weights: UnmatchedWeights = "refuse"  # how weights that do not match the class are handled
    adapter: pathlib.Path | None = None  # the folder of an adapter that is merged into the model of `folder`
    runs_code: bool = False  # whether the model's class is in Python files in the folder
    gguf: pathlib.Path | None = None  # a GGUF file that contains the model
    trained_as: tuple[str, ...] = ()  # classes with a head that the folder states, if the base model is requested

    @property
    def reader_folder(self) -> pathlib.Path | None:
        """The GGUF file or folder with the tokenizer; an adapter's folder has priority over the model's folder."""
        of_adapter = self.adapter is not None and reader_of(self.adapter)
        return self.gguf or (self.adapter if of_adapter else self.folder)

    def __str__(self) -> str:
        if self.has_weights:
            return self.name
        return f"{self.name}: {'a small model' if self.is_small else 'a configuration'} with random weights"

    def for_task(self, task: str) -> FoundModel:
        """Return this model with the class for a task, which can differ from the class in ``config.json``."""
        stated = self.config.architectures or ()
        chosen = "" if task == "auto" else architecture_of_task(self.config, task, runs_code=self.runs_code)
        if not chosen or chosen in stated:
            return self
        config = copy.deepcopy(self.config)
        config.architectures = [chosen]
        found = dataclasses.replace(self, config=config)
        if task != "feature-extraction" or not self.has_weights or not stated:
            return found
        unmatched: UnmatchedWeights = "unused" if self.unmatched_weights == "refuse" else self.unmatched_weights
        return dataclasses.replace(found, unmatched_weights=unmatched, trained_as=tuple(stated))

    def load(self, *, dtype: str = "float32") -> Any:
        return self.load_with_remarks(dtype=dtype)[0]

    def load_with_remarks(self, *, dtype: str = "float32") -> tuple[Any, tuple[str, ...]]:
        """Load the model; also return notes, such as which weights are random because the folder lacks them."""
        if self.trained_as:
            plain = dataclasses.replace(self, trained_as=())
            try:
                return plain.load_with_remarks(dtype=dtype)
            except ModelSourceError:  # a class with a head may lack a layer of the base model, such as a pooler
                config = copy.deepcopy(self.config)
                config.architectures = list(self.trained_as)
                whole = dataclasses.replace(plain, config=config, unmatched_weights="refuse")
                model, remarks = whole.load_with_remarks(dtype=dtype)
                base = model.base_model
                base.config.architectures = [type(base).__name__]
                return base, remarks
        packing = self.packing()
        if packing is not None and self.folder is not None:
            return self._load_packed(packing, dtype)
        if self.gguf is not None:
            gguf_tokenizer(self.gguf)  # raises early for a file without a readable tokenizer
            with bounded_weights(self.name, failure=ModelSourceError, stored=4 * self.stored_bytes()):
                kind, wanted = class_for(self.config), getattr(torch, dtype)
                made = gguf_weights(kind, self.config, self.gguf, wanted, choice=self.unmatched_weights)
                return self._with_adapter(*made)
        wanted, code = getattr(torch, dtype), {"trust_remote_code": True} if self.runs_code else {}
        kind = own_auto_class(self.config) if self.runs_code else class_for(self.config)
        if not self.has_weights and self.folder is not None and self.unmatched_weights != "random":
            files = (path.name for suffix in _OTHER_WEIGHTS for path in self.folder.glob(f"*{suffix}"))
            file = min(files, default="")
            if file.endswith(GGUF):
                raise ModelSourceError(f"{self.name} contains a GGUF file. Pass the GGUF file: {self.folder / file}")
            if file:
                raise ModelSourceError(
                    f"{self.name} contains {file}, but only safetensors and pytorch_model.bin can be read. Load the "
                    "model, save it with save_pretrained, and name that folder; or, for random weights on purpose: "
                    'unmatched_weights="random" (--unmatched-weights random)'
                )
        with bounded_weights(self.name, failure=ModelSourceError, stored=self.stored_bytes()):
            if self.has_weights:
                how: dict[str, Any] = {"dtype": wanted, **FILES_ONLY, **code}
                model, differences = load_stored(
                    kind, self.folder, self.name, choice=self.unmatched_weights, failure=ModelSourceError, **how
                )
                return self._with_adapter(model, differences.remarks())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made = kind.from_config(self.config, **code) if self.runs_code else kind(self.config)
                random = f"the weights are random: {self.name} contains none."
                return made.to(wanted).eval(), () if self.folder is None else (random,)

    def _with_adapter(self, model: Any, remarks: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        if self.adapter is None:
            return model.eval(), remarks
        adapted, of_adapter = injected(model, self.adapter, self.name, choice=self.unmatched_weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = adapted.merge_and_unload().eval()
        noted = f"the adapter of {self.name} was merged into the weights of {self.gguf or self.folder}."
        return model, (noted, *remarks, *of_adapter.remarks())

    def packing(self) -> Packing | None:
        return packing_of(self.config, self.name) if self.has_weights and self.gguf is None else None

    def _load_packed(self, packing: Packing, dtype: str) -> tuple[Any, tuple[str, ...]]:
        assert self.folder is not None
        if self.adapter is not None:
            raise ModelSourceError(
                f"The adapter in {self.name} cannot be merged here: its base model is quantized. Merge and save the "
                f"model with the library that quantized it, or pass {self.folder} to export without the adapter."
            )
        config = copy.deepcopy(self.config)
        del config.quantization_config  # the loaded weights are not quantized
        with bounded_weights(self.name, failure=ModelSourceError, stored=8 * self.stored_bytes()):
            weights = unpacked_weights(self.folder, packing, self.name)
            how: dict[str, Any] = {"dtype": getattr(torch, dtype), "config": config, "state_dict": weights}
            model, differences = load_stored(
                class_for(config), None, self.name, choice=self.unmatched_weights, failure=ModelSourceError, **how
            )
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = type(model.generation_config).from_pretrained(self.folder, local_files_only=True)
        return model.eval(), differences.remarks()

    def stored_bytes(self) -> int:
        if self.gguf is not None:
            return self.gguf.stat().st_size
        return bytes_of_weights(self.folder, failure=ModelSourceError) if self.folder is not None else 0


def find_model(
    source: str, *, weights: bool = True, trust_remote_code: bool = False, of_adapter: str = ""
) -> FoundModel:
    """Find a model by its name (``MODEL_NAMES`` lists all forms), without loading its weights."""
    # of_adapter: the adapter whose base model is searched; the adapter in a PEFT folder is merged into its base model
    require_transformers("a model")
    path = pathlib.Path(source)
    if path.is_dir():
        folder: pathlib.Path | None = path
    elif path.is_file() and is_gguf(path):
        return FoundModel(source, gguf_config(path), has_weights=True, gguf=path)
    elif path.is_file():
        folder = None
    elif path.suffix == GGUF:
        raise ModelSourceError(f"There is no file {source}.")
    elif _HUB_ID.fullmatch(source) and not source.startswith("."):
        import huggingface_hub

        wanted = [*(_BESIDE_WEIGHTS if weights else ["config.json"]), *(["*.py"] if trust_remote_code else [])]
        # errors of the network, of the hub, or of the cache on disk
        with raised_as(lambda error: ModelSourceError(f"There is no folder {source}, and {_why_not(error)}")):
            folder = pathlib.Path(huggingface_hub.snapshot_download(source, allow_patterns=wanted))
    elif "/" in source or "\\" in source or source in (".", ".."):
        raise ModelSourceError(
            f"There is no folder {source}. Name a folder that save_pretrained wrote, or a model type such as llama."
        )
    else:
        return FoundModel(source, small_config(source), is_small=True)
    if folder is not None and holds_adapter(folder):
        if of_adapter:
            raise ModelSourceError(f"The base model of {of_adapter} is an adapter itself. Merge {source} first.")
        return _adapted(source, folder, weights=weights, trust_remote_code=trust_remote_code)
    file = path if folder is None else folder / "config.json"
    if not file.is_file() and (held := sorted(file.parent.glob(f"*{GGUF}"))):
        raise ModelSourceError(f"{source} contains a GGUF file, but no config.json. Pass the GGUF file: {held[0]}")
    if not file.is_file():
        raise ModelSourceError(f"{source} contains no config.json: it is not a folder that save_pretrained wrote.")
    has_weights = folder is not None and bytes_of_weights(folder, failure=ModelSourceError) > 0
    if folder is not None:
        own_files(folder, TEXTS, ModelSourceError)  # transformers also reads other files than config.json
    config = read_config(file, source, failure=ModelSourceError, runs_code=trust_remote_code, of_code=ON_PURPOSE)
    runs_code = trust_remote_code and own_auto_class(config) is not None
    found = FoundModel(source, config, folder, has_weights, runs_code=runs_code)
    if runs_code or not pools(folder):
        return found
    # sentence-transformers runs the base model without its head
    kind = of_kind("AutoModel", config)
    kind = class_for(config) if kind is None or isinstance(kind, tuple) else kind
    base, trained = kind.__name__, tuple(config.architectures or ())
    config.architectures = [base]
    of_head = () if trained in ((), (base,)) else trained
    return dataclasses.replace(found, unmatched_weights="unused" if of_head else "refuse", trained_as=of_head)


def _adapted(source: str, folder: pathlib.Path, **how: bool) -> FoundModel:
    base = config_of(folder, source)[1].get("base_model_name_or_path")
    remedy = (
        f'Write its folder into {ADAPTER} ("base_model_name_or_path"), or export the merged model:\n'
        f"    export_folder(PeftModel.from_pretrained(base, {source!r}).merge_and_unload(), ...)"
    )
    if not isinstance(base, str) or not base:
        raise ModelSourceError(f"The adapter in {source} does not name its base model. {remedy}")
    try:
        found = find_model(base, of_adapter=source, **how)
    except (ModelSourceError, InvalidArgumentError) as error:
        raise ModelSourceError(
            f"The base model {base} of the adapter {source} cannot be opened: {first_line(error)} {remedy}"
        ) from error
    if not found.has_weights:
        raise ModelSourceError(
            f"The base model {base} of the adapter {source} has no weights. In {ADAPTER}, set "
            '"base_model_name_or_path" to a folder with weights.'
        )
    return dataclasses.replace(found, name=source, adapter=folder)


def _why_not(error: BaseException) -> str:
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    names = {base.__name__ for found in chain for base in type(found).__mro__}
    if names & {"OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ConnectTimeout", "LocalEntryNotFoundError"}:
        return (
            f"the hub cannot be reached ({first_line(chain[-1])[:120]}). Name a folder that save_pretrained wrote, or "
            "try again with a connection"
        )
    return f"the Hugging Face hub does not provide it: {first_line(error)[:200]}"


# a folder with a tokenizer contains at least one of these files
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
# a folder with a tokenizer or a processor contains at least one of these files
READERS = (*TOKENIZER_FILES, "preprocessor_config.json", "processor_config.json")


def reader_of(folder: pathlib.Path) -> str:
    """Return the name of a file that only folders with a tokenizer or processor have; ``""`` if there is none."""
    return next((name for name in READERS if (folder / name).is_file()), "")


def without_peft(model: Any) -> Any:
    """Return the Hugging Face model in a ``PeftModel``, with adapters in its layers; return other models unchanged."""
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise InvalidArgumentError(
            f"A {type(model).__qualname__} has learned prompts (prompt tuning), which exported files do not support. "
            "Only adapters that change layers, such as LoRA, can be exported."
        )
    return model.get_base_model()


def origin_of(model: TransformersModel) -> tuple[pathlib.Path | None, str]:
    """Return the folder from which a model was loaded, or ``None`` and the reason why the folder is not known."""
    name = getattr(model.config, "name_or_path", "") or getattr(model, "name_or_path", "")
    if not name:
        return None, "the model does not state the folder that it is from"
    folder = pathlib.Path(name)
    if not folder.is_dir():
        import huggingface_hub

        try:  # in the local cache
            folder = pathlib.Path(huggingface_hub.snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):  # nothing was downloaded, or the name is not an id of the hub
            return None, f"the model is from {name}, which is not a folder on this machine"
    if not (folder / "config.json").is_file():
        return None, f"the model is from {name}, which contains no config.json"
    stated = read_configuration(folder / "config.json", dict[str, Any], failure=ModelSourceError)
    parts = [part.get("model_type") for part in (stated, *(value for value in stated.values() if type(value) is dict))]
    if model.config.model_type not in parts:  # a relative path may now name another folder
        return None, f"{name} is for {parts[0]!r} models, but this model is of type {model.config.model_type!r}"
    vocabulary = {**stated, **(stated.get("text_config") or {})}.get("vocab_size")
    own = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    # the folder's tokenizer lacks words that were added to the model later
    if vocabulary is not None and own is not None and vocabulary != own:
        return None, f"{name} has a vocabulary of {vocabulary} tokens, but this model has {own}"
    return folder, ""


_MOST_GROWTH = 1000  # largest factor by which the replacements of a tokenizer may lengthen a text


@dataclasses.dataclass(frozen=True)
class _Stated:
    """Entries of ``tokenizer_config.json`` for which transformers raises an unclear error if their type is wrong."""

    tokenizer_class: str | None = None
    model_max_length: float | None = None
    chat_template: str | list[dict[str, str]] | dict[str, str] | None = None
    padding_side: str | None = None
    model_input_names: list[str] | None = None


def _growth(part: Any) -> float:
    """Return the largest factor by which a normalizer or decoder in ``tokenizer.json`` can lengthen a text."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    found = math.prod(map(_growth, inner))
    if isinstance(part, dict) and part.get("type") == "Replace":  # a regular expression may match a single letter
        found *= max(1.0, len(part["content"]) / len(part["pattern"].get("String", "a")))
    return found


def open_tokenizer(folder: pathlib.Path, *, failure: type[Exception], **options: Any) -> Any:
    """Return the tokenizer in a folder; Python code in the folder never runs."""
    import transformers

    if folder.is_file():
        return gguf_tokenizer(folder)
    own_files(folder, TEXTS, failure)
    config, fast = folder / "tokenizer_config.json", folder / "tokenizer.json"
    stated = read_document(config, _Stated, failure=failure, finite=False) if config.exists() else _Stated()
    # for some model types, AutoTokenizer ignores that the folder names ByT5Tokenizer
    is_bytes = stated.tokenizer_class == "ByT5Tokenizer"
    kind: Any = transformers.ByT5Tokenizer if is_bytes else transformers.AutoTokenizer
    with readable(folder, failure):
        if fast.exists() and b'"Replace"' in read_bytes(fast, failure=failure):
            parts = read_document(fast, dict[str, Any], failure=failure, finite=False)
            if max(_growth(parts.get("normalizer")), _growth(parts.get("decoder"))) > _MOST_GROWTH:
                raise failure(f"its Replace steps (tokenizer.json) make a text over {_MOST_GROWTH:,} times as long")
        return kind.from_pretrained(folder, **FILES_ONLY, **options)


def readable(name: pathlib.Path | str, failure: type[Exception]) -> contextlib.AbstractContextManager[None]:
    return raised_as(lambda error: failure(f"The tokenizer in {name} cannot be read: {first_line(error)}"))
