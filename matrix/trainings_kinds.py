"""The other rows next to heads: own losses, methods of PEFT, optimizers, options of the Trainer, trainers of TRL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .cases import SkipColumnError
from .trainings_losses import LOSSES
from .trainings_trainer import OPTIONS, TrainerTrial
from .trainings_trial import Batch, Trial
from .trainings_trl import TRAININGS, TrlTrial

__all__ = ["KINDS", "kind_names"]

_LENGTH = 12
_VOCABULARY = 60
_CLASSES = 4


def _text(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, _VOCABULARY, (rows, _LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return tokens, mask, generator


def _config(cls: str, **fields: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return getattr(transformers, cls)(vocab_size=_VOCABULARY, pad_token_id=0, **sizes, **fields)


class LossTrial(Trial):
    """A loss that people write themselves, of the logits of BERT."""

    @functools.cached_property
    def model(self) -> Any:
        """BERT with a class for each row, or for each token."""
        import transformers

        torch.manual_seed(0)
        own = LOSSES[self.name.partition(":")[2]]
        config = _config(
            "BertConfig",
            num_labels=_CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
        )
        kind = "Token" if own.of == "tokens" else "Sequence"
        return getattr(transformers, f"BertFor{kind}Classification")(config).double().eval()

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """Tokens and labels; the first two rows are of one class, or have none."""
        own = LOSSES[self.name.partition(":")[2]]
        tokens, mask, generator = _text(rows, seed)
        if own.of == "numbers":
            labels = torch.randn(rows, generator=generator, dtype=torch.float64)
        elif own.of == "rows":
            labels = torch.randint(0, _CLASSES, (rows,), generator=generator)
            labels[-1] = 1
        else:
            labels = torch.randint(0, _CLASSES, (rows, _LENGTH), generator=generator)
            for row in range(rows):
                labels[row, 2 + row :] = -100
        if some_missing:
            if own.of != "tokens":
                raise SkipColumnError("each row has a label")
            labels[:2] = -100
        return {"input_ids": tokens, "attention_mask": mask, "own": labels}

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """The loss of the whole batch."""
        inputs = {key: value for key, value in batch.items() if key != "own"}
        found = LOSSES[self.name.partition(":")[2]].function(model(**inputs).logits, batch["own"])
        assert isinstance(found, torch.Tensor)
        return found

    def fused(self, pipeline: Any, batch: Batch, count: int) -> torch.Tensor:
        """The loss that ``forward_backward`` makes of the user's function."""
        from roundpipe_runtime import RoundPipeRunConfig

        own = LOSSES[self.name.partition(":")[2]]
        inputs = {key: value for key, value in batch.items() if key != "own"}
        found: torch.Tensor = pipeline.forward_backward(
            input_kwargs=inputs,
            label=batch["own"],
            loss_fn=lambda outputs, label: (own.piece or own.function)(outputs.logits, label),
            run_config=RoundPipeRunConfig(num_microbatch=count, loss_reduction=own.reduction),
        )
        return found

    def example(self) -> Batch:
        """Two rows, as the model takes them."""
        return {key: value for key, value in self.batch(2, 0).items() if key != "own"}


class LanguageTrial(Trial):
    """A small Llama, with its own loss."""

    @functools.cached_property
    def model(self) -> Any:
        """Llama in float64."""
        import transformers

        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            _config("LlamaConfig", num_key_value_heads=2, initializer_range=0.2)
        ).double().eval()  # fmt: skip

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """Texts of which parts are ignored."""
        tokens, mask, _ = _text(rows, seed)
        labels = tokens.masked_fill(mask == 0, -100)
        for row in range(rows):
            labels[row, : (row * 3) % 8] = -100
        if some_missing:
            labels[:2] = -100
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels, "use_cache": False}


_LINEAR = {"target_modules": ["q_proj", "v_proj"]}
_ALL = {"target_modules": "all-linear"}
# method of PEFT -> the class of its configuration, its fields
ADAPTERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, **_ALL}),
    "LoRA with biases": ("LoraConfig", {"r": 4, "bias": "all", **_LINEAR}),
    "LoRA and trained embeddings": ("LoraConfig", {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"], **_LINEAR}),
    "LoRA of embeddings": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "rank-stabilised LoRA": ("LoraConfig", {"r": 4, "use_rslora": True, **_ALL}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, **_ALL}),
    "PiSSA": ("LoraConfig", {"r": 4, "init_lora_weights": "pissa", **_LINEAR}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 100, **_LINEAR}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, **_LINEAR}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0, **_LINEAR}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 4, **_LINEAR}),
    "LoKr": ("LoKrConfig", {"r": 4, **_LINEAR}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "VeRA": ("VeraConfig", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 16, **_LINEAR}),
    "HRA": ("HRAConfig", {"r": 4, **_LINEAR}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 8, "topk": 2, **_LINEAR}),
    "RandLoRA": ("RandLoraConfig", {"r": 4, **_LINEAR}),
    "MiSS": ("MissConfig", {"r": 4, **_LINEAR}),
    "SHiRA": ("ShiraConfig", {"r": 2, **_LINEAR}),
    "C3A": ("C3AConfig", {"block_size": 8, **_LINEAR}),
    "RoAd": ("RoadConfig", {"group_size": 4, **_LINEAR}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 16, **_LINEAR}),
    "DeLoRA": ("DeloraConfig", {"r": 4, **_LINEAR}),
    "GraLoRA": ("GraloraConfig", {"r": 4, **_LINEAR}),
    "trained tokens": ("TrainableTokensConfig", {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]}),
    "Poly": ("PolyConfig", {"r": 2, "n_skills": 2, "n_tasks": 2, **_LINEAR}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "Llama adapter": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2}),
}


class AdapterTrial(LanguageTrial):
    """A method of PEFT, on a small Llama; no parameter is zero, so that each has a gradient."""

    @functools.cached_property
    def model(self) -> Any:
        """The adapted model, in float64."""
        import peft

        plain = LanguageTrial(self.name).model
        cls, fields = ADAPTERS[self.name.partition(":")[2]]
        torch.manual_seed(0)
        made = peft.get_peft_model(plain, getattr(peft, cls)(task_type="CAUSAL_LM", **fields))
        for key, value in vars(made.peft_config["default"]).items():
            if "dropout" in key and isinstance(value, float):
                setattr(made.peft_config["default"], key, 0.0)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter += 0.02 * torch.randn_like(parameter)
        return made.double().eval()

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """Texts; the tasks of each row, where the method asks for them."""
        made = super().batch(rows, seed, some_missing=some_missing)
        if self.name.endswith(":Poly"):
            made["task_ids"] = torch.arange(rows) % 2
        return made


OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3},
    "AdamW (fused)": {"lr": 1e-3, "fused": True},
    "AdamW (foreach)": {"lr": 1e-3, "foreach": True},
    "Adam (amsgrad)": {"lr": 1e-3, "amsgrad": True},
    "Adamax": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "Adagrad": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 1e-3},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
}


class OptimizerTrial(LanguageTrial):
    """An optimizer of torch, on a small Llama."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer."""
        named = self.name.partition(":")[2]
        made: torch.optim.Optimizer = getattr(torch.optim, named.partition(" (")[0])(parameters, **OPTIMIZERS[named])
        return made


KINDS: Mapping[str, Callable[[str], Trial]] = {
    "own_loss": LossTrial,
    "adapter": AdapterTrial,
    "optimizer": OptimizerTrial,
    "trainer": TrainerTrial,
    "trl": TrlTrial,
}


def kind_names() -> list[str]:
    """Return the names of all rows that are not heads."""
    listed = {"own_loss": LOSSES, "adapter": ADAPTERS, "optimizer": OPTIMIZERS, "trainer": OPTIONS, "trl": TRAININGS}
    return [f"{kind}:{name}" for kind, names in listed.items() for name in names]
