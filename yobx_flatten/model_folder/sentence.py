"""Export the sentence-transformers (6.2) modules that follow the model: pooling, dense layers, normalisation."""

# modules.json      0  Transformer   tokens ──> hidden states of shape (rows, tokens, size)
# 1_Pooling/        1  Pooling       one vector for each row: the mean of its tokens, the first, the last ...
# 2_Dense/          2  Dense         a matrix
# 3_Normalize/      3  Normalize     length 1                                       ──> sentence_embedding

from __future__ import annotations

import dataclasses
import glob
import inspect
import pathlib
import shutil
from collections.abc import Sequence
from typing import TypeVar

import torch

from ..core.files.document import check_own, inside, own_files, read_document, read_tensors
from ..errors import ModelSourceError
from ..export.proof.quality import EMBEDDING
from ..registry.recipe.aliases import TransformersModel

T = TypeVar("T")

MODULES = "modules.json"
_LEAST = 1e-9  # smallest divisor, as in sentence-transformers
_PATTERNS = ("*.json", "*.txt", "*.safetensors")
_ACTIVATIONS = {"Identity": torch.nn.Identity, "Tanh": torch.nn.Tanh, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Module:
    type: str
    path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pooling:
    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dense:
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.linear.Identity"


class Pooling(torch.nn.Module):
    """Pools hidden states to one vector for each text; vectors of several pooling modes are concatenated."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.unsqueeze(-1).to(hidden.dtype)
        vectors = []
        for mode in self.modes:
            weights = mask
            if mode == "cls":
                vectors.append(hidden[:, 0])
            elif mode == "max":
                vectors.append(hidden.masked_fill(mask == 0, torch.finfo(hidden.dtype).min).max(1).values)
            elif mode == "lasttoken":
                places = torch.arange(hidden.shape[1], device=hidden.device)[None, :, None]
                last = (places * mask.long()).amax(1, keepdim=True)
                vectors.append((hidden * mask).gather(1, last.expand(-1, -1, hidden.shape[2])).squeeze(1))
            else:
                if mode == "weightedmean":
                    numbers = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
                    weights = mask * numbers[None, :, None]
                count = weights.sum(1).clamp(min=_LEAST)
                vectors.append((hidden * weights).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count))
        return torch.cat(vectors, dim=-1)


class Normalize(torch.nn.Module):
    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vector, dim=-1)


class SentenceModel(torch.nn.Module):
    """A model, followed by modules that compute one embedding for each text from the model's outputs."""

    def __init__(self, model: TransformersModel, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        # a model that is called once needs no cache
        takes = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in takes else {}
        self.model, self.layers = model, torch.nn.ModuleList(layers).to(model.dtype)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **types, **self.options)
        pooling, *others = self.layers
        vector = pooling(outputs[0], attention_mask)
        for layer in others:
            vector = layer(vector)
        return {**{name: value for name, value in outputs.items() if value is not None}, EMBEDDING: vector}


def read_modules(folder: pathlib.Path | None) -> Sequence[torch.nn.Module] | str:
    """Return the modules that compute an embedding from hidden states, or a text that names an unsupported module."""
    modules = _listed(folder)
    if folder is None:
        return ()
    layers: list[torch.nn.Module] = []
    for number, module in enumerate(modules):
        made: torch.nn.Module | str = module.type.rpartition(".")[2]
        # only the first module pools: the modules after pooling read vectors
        if made == "Pooling" and number == 0:
            pooling = _read_own(folder, f"{module.path}/config.json", _Pooling)
            named = [pooling.pooling_mode] if isinstance(pooling.pooling_mode, str) else pooling.pooling_mode
            modes = named or [mode for mode in _MODES if getattr(pooling, f"pooling_mode_{_OLDER.get(mode, mode)}")]
            unknown = [mode for mode in modes if mode not in _MODES]
            made = f"Pooling by {', '.join(unknown) or 'nothing'}" if unknown or not modes else Pooling(modes)
            made = made if pooling.include_prompt else "Pooling without the prompt (include_prompt=false)"
        elif made == "Dense" and number > 0:
            made = _dense(folder, module.path)
        elif made == "Normalize" and number > 0:
            made = Normalize()
        if isinstance(made, str):
            return f"{MODULES} has a module {made} at place {number + 1}"
        layers.append(made)
    return layers


def pools(folder: pathlib.Path | None) -> bool:
    return any(module.type.rpartition(".")[2] == "Pooling" for module in _listed(folder))


def copy_modules(source: pathlib.Path, folder: pathlib.Path) -> None:
    for module in _listed(source):
        if module.path in ("", "."):
            continue
        place = glob.escape(module.path)
        for path in own_files(source, [f"{place}/{pattern}" for pattern in _PATTERNS], ModelSourceError):
            copied = folder / inside(source, str(path.relative_to(source)), ModelSourceError).relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)


def _listed(folder: pathlib.Path | None) -> list[_Module]:
    if folder is None or not (folder / MODULES).is_file():
        return []
    return _read_own(folder, MODULES, list[_Module])[1:]  # the first module is the transformer


def _read_own(folder: pathlib.Path, name: str, form: type[T]) -> T:
    path = inside(folder, name, ModelSourceError)
    check_own(path, folder, ModelSourceError)
    return read_document(path, form, failure=ModelSourceError)


def _dense(folder: pathlib.Path, path: str) -> torch.nn.Module | str:
    stated = _read_own(folder, f"{path}/config.json", _Dense)
    activation = _ACTIVATIONS.get(stated.activation_function.rpartition(".")[2])
    if activation is None or not (folder / path / "model.safetensors").is_file():
        return f"Dense ({stated.activation_function}), or its weights are not in model.safetensors"
    weights = inside(folder, f"{path}/model.safetensors", ModelSourceError)
    held = read_tensors(weights, failure=ModelSourceError)
    found = {name.removeprefix("linear."): value.float() for name, value in held.items()}
    sizes = {name: tuple(value.shape) for name, value in found.items()}
    rows, columns = stated.out_features, stated.in_features
    wanted: dict[str, tuple[int, ...]] = {"weight": (rows, columns), **({"bias": (rows,)} if stated.bias else {})}
    if sizes != wanted:  # checked before a layer of the size in the configuration is made
        raise ModelSourceError(f"{weights} holds tensors of sizes {sizes}, but {path}/config.json states {wanted}.")
    with torch.device("meta"):
        linear = torch.nn.Linear(columns, rows, bias=stated.bias)
    linear.load_state_dict(found, assign=True)
    return torch.nn.Sequential(linear, activation()).eval()


# in the order in which sentence-transformers joins the vectors of several modes
_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# names of modes in older folders, such as `pooling_mode_mean_tokens`
_OLDER = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}
