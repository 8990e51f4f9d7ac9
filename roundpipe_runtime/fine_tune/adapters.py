"""LoRA adapters of PEFT, specified in one word: ``8``, ``8,16`` or ``8,16,q_proj,v_proj``."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from yobx_flatten.errors.dependencies import require

from ..device.generator import generator_kept
from .errors import FineTuneError


@dataclasses.dataclass(frozen=True)
class Lora:
    """Settings of low-rank adapters, LoRA (Hu et al., 2021, arXiv 2106.09685).

    Attributes:
        rank: rank of the two matrices.
        alpha: numerator of the scale of an adapter, which is ``alpha / rank``.
        targets: suffixes of the names of modules that get an adapter; empty for all linear layers except the head.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Read ``rank[,alpha[,target,...]]``; alpha is twice the rank unless it is given.

        Raises:
            FineTuneError: the text has another form.

        >>> Lora.parse("8")
        Lora(rank=8, alpha=16, targets=())
        >>> Lora.parse("4,4,q_proj,v_proj").targets
        ('q_proj', 'v_proj')
        """
        rank, *rest = (part.strip() for part in text.split(","))
        alpha = rest[0] if rest else rank
        if not (rank.isdecimal() and alpha.isdecimal() and int(rank) and int(alpha) and all(rest)):
            raise FineTuneError(
                f"--lora {text}: expected RANK, RANK,ALPHA or RANK,ALPHA,TARGETS: --lora 8   --lora 8,16   --lora "
                "8,16,q_proj,v_proj"
            )
        return cls(int(rank), int(alpha) if rest else 2 * int(rank), tuple(rest[1:]))


def add_lora(model: nn.Module, lora: Lora, *, seed: int = 0) -> nn.Module:
    """Add LoRA adapters to a model, and return PEFT's model around it, whose other weights are frozen.

    Args:
        model: Hugging Face model.
        lora: settings of the adapters.
        seed: seed of their initial weights.

    Returns:
        PEFT's model.

    Raises:
        MissingDependencyError: PEFT is not installed.
        FineTuneError: no module has the name of a target.
    """
    require("peft", purpose="add_lora", extra="lora")
    import peft

    check_targets(model, lora.targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with generator_kept(), quiet_peft():
        torch.manual_seed(seed)
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def check_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    """Refuse suffixes of names that no module has."""
    modules = dict(model.named_modules())
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)}
            raise FineTuneError(
                f"{type(model).__name__} has no module {target}. Its linear layers are {', '.join(sorted(linear))}."
            )


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide in a block two warnings of PEFT 0.21.

    It asks models of version 5.23 for an attribute by its old name, and cannot merge into weights of torchao.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated", category=UserWarning)
        yield
