"""Trainers of TRL that are also a ``RoundPipeTrainer``: six steps, next to those without a pipeline."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .trainings_trainer import LEFT_OUT, SIX_STEPS, nothing, side_by_side
from .trainings_trial import Batch, Trial

__all__ = ["TRAININGS", "TrlTrial"]

_TOKENS = ["<pad>", "<bos>", "<eos>", "user", "assistant", *(f"w{number}" for number in range(95))]
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}assistant "
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %} "
    "{% else %}user {{ message['content'] }} {% endif %}{% endfor %}"
)

_GENERATED = {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 2, "max_length": None}

# Trainers of TRL that are not in its namespace: the module of each.
_EXPERIMENTAL = {"ORPO": "orpo", "CPO": "cpo", "TPO": "tpo", "OnlineDPO": "online_dpo", "GKD": "gkd"}

# what a training is called -> the trainer, fields of its configuration, and: which "data", whether with "adapters",
# where the "reference" comes from, whether "rewards" are those of a model. A field that is None is left out.
TRAININGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT of completions": ("SFT", {"data": "completions", "completion_only_loss": True}),
    "SFT of whole prompts and completions": ("SFT", {"data": "completions", "completion_only_loss": False}),
    "SFT of conversations": ("SFT", {"data": "conversations"}),
    "SFT of conversations (answers only)": ("SFT", {"data": "conversations", "assistant_only_loss": True}),
    "packed SFT": ("SFT", {"packing": True, "max_length": 24}),
    "packed SFT of completions": (
        "SFT",
        {"data": "completions", "completion_only_loss": True, "packing": True, "max_length": 24},
    ),
    "packed SFT of conversations (answers only)": (
        "SFT",
        {"data": "conversations", "assistant_only_loss": True, "packing": True, "max_length": 48},
    ),
    "packed SFT across rows": ("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "SFT and accumulation": ("SFT", {"gradient_accumulation_steps": 2}),
    "SFT of adapters": ("SFT", {"adapters": True}),
    "reward": ("Reward", {"data": "preferences"}),
    "DPO": ("DPO", {"data": "preferences"}),
    "DPO of adapters": ("DPO", {"data": "preferences", "adapters": True}),
    "DPO without a given reference": ("DPO", {"data": "preferences", "reference": "made"}),
    "DPO and a reference that follows": (
        "DPO",
        {"data": "preferences", "sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    "DPO of mixed losses": (
        "DPO",
        {"data": "preferences", "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "KTO": ("KTO", {"data": "opinions"}),
    "KTO of adapters": ("KTO", {"data": "opinions", "adapters": True}),
    "ORPO": ("ORPO", {"data": "preferences"}),
    "ORPO of adapters": ("ORPO", {"data": "preferences", "adapters": True}),
    "CPO": ("CPO", {"data": "preferences"}),
    "TPO": ("TPO", {"data": "preferences with a reference"}),
    "GRPO": ("GRPO", {"data": "prompts", **_GENERATED}),
    "GRPO and a reference": ("GRPO", {"data": "prompts", **_GENERATED, "beta": 0.1}),
    "GRPO of adapters": ("GRPO", {"data": "prompts", **_GENERATED, "beta": 0.1, "adapters": True}),
    "GRPO of several iterations": ("GRPO", {"data": "prompts", **_GENERATED, "beta": 0.1, "num_iterations": 2}),
    "GRPO and a reward model": ("GRPO", {"data": "prompts", **_GENERATED, "rewards": "model"}),
    "RLOO": ("RLOO", {"data": "prompts", **_GENERATED}),
    "RLOO of adapters": ("RLOO", {"data": "prompts", **_GENERATED, "adapters": True}),
    "online DPO": ("OnlineDPO", {"data": "prompts", "max_new_tokens": 6}),
    "distillation on its own answers": ("GKD", {"data": "chats", "max_new_tokens": 6}),
}


def _words(count: int, shift: int) -> str:
    return " ".join(f"w{(7 * number + shift) % 90}" for number in range(count))


def _row(kind: str, number: int) -> dict[str, Any]:
    prompt, answer, other = _words(4, number), " " + _words(5 + number % 3, 2 * number), " " + _words(6, 3 * number)
    if kind == "completions":
        return {"prompt": prompt, "completion": answer}
    if kind in ("conversations", "chats"):
        turns = (prompt, answer.strip(), _words(3, number + 9), other.strip())
        roles = ("user", "assistant") * (1 + number % 2)
        return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}
    if kind == "preferences":
        return {"prompt": prompt, "chosen": answer, "rejected": other}
    if kind == "preferences with a reference":
        return {"prompt": prompt, "chosen": answer, "rejected": other, "reference": " " + _words(7, 5 * number)}
    if kind == "prompts":
        return {"prompt": prompt}
    if kind == "opinions":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
    return {"text": _words(5 + number % 7, 3 * number)}


def _llama(head: str, seed: int = 0) -> Any:
    """A small model in float64."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(_TOKENS),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
        initializer_range=0.1,
    )
    return getattr(transformers, f"LlamaFor{head}")(config).double()


class TrlTrial(Trial):
    """One training, of a small Llama."""

    @property
    def asked(self) -> tuple[str, dict[str, Any]]:
        """The trainer and its fields."""
        kind, fields = TRAININGS[self.name.partition(":")[2]]
        return kind, dict(fields)

    @functools.cached_property
    def model(self) -> Any:
        """Llama in float64; for rewards, with one score."""
        return _llama("SequenceClassification" if self.asked[0] == "Reward" else "CausalLM")

    @property
    def columns(self) -> dict[str, Callable[[Any], dict[str, Any]]]:
        """A training is all that there is."""
        return {**dict.fromkeys(LEFT_OUT, nothing), "trained": _trained}

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """Rows with labels, for the column "built"; TRL makes its own of the texts."""
        tokens = torch.randint(5, len(_TOKENS), (rows, 8), generator=torch.Generator().manual_seed(seed))
        scores = torch.arange(rows, dtype=torch.float64)
        return {"input_ids": tokens, "labels": scores if self.asked[0] == "Reward" else tokens}

    @property
    def tokenizer(self) -> Any:
        """Words, and a template that marks the answers."""
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers

        made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(_TOKENS)}, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=_TEMPLATE, **special)


def _trained(trial: TrlTrial) -> dict[str, Any]:
    """Six steps: the losses of the log, norms of gradients, and the weights."""
    from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer

    theirs = _of_trl(trial.asked[0], "Trainer")
    ours = type("Ours", (RoundPipeTrainer, theirs), {})
    return side_by_side(trial, functools.partial(_run, trial), theirs, ours)


def _of_trl(kind: str, what: str) -> Any:
    """A trainer of TRL or its configuration."""
    module = f"trl.experimental.{_EXPERIMENTAL[kind]}" if kind in _EXPERIMENTAL else "trl"
    return getattr(importlib.import_module(module), f"{kind}{what}")


def _many_letters(completions: Sequence[str], **others: Any) -> list[float]:
    """A reward that differs between completions of a prompt."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


def _others(trial: TrlTrial, model: Any, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What a trainer is given besides its model: a reference, adapters, rewards."""
    import peft

    made: dict[str, Any] = {}
    has_adapters, reference = fields.pop("adapters", False), fields.pop("reference", "given")
    if has_adapters:
        made["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if kind in ("GRPO", "RLOO") or reference == "made":  # then TRL reads it from the files of the model
        folder = tempfile.mkdtemp(dir=os.getcwd())
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    elif kind in ("DPO", "KTO") and not has_adapters:
        made["ref_model"] = copy.deepcopy(model)
    elif kind == "GKD":
        made["teacher_model"] = _llama("CausalLM", seed=5)
    if kind in ("GRPO", "RLOO", "OnlineDPO"):
        made["reward_funcs"] = _many_letters
        if fields.pop("rewards", None) == "model":
            made["reward_funcs"] = _llama("SequenceClassification", seed=5)
            made["reward_processing_classes"] = trial.tokenizer
    return made


def _run(trial: TrlTrial, cls: Any, **options: Any) -> Any:
    import datasets
    import transformers

    kind, fields = trial.asked
    data, model = fields.pop("data", "texts"), copy.deepcopy(trial.model)
    options |= _others(trial, model, kind, fields)
    asked = {
        **SIX_STEPS,
        "output_dir": tempfile.mkdtemp(dir=os.getcwd()),
        "per_device_train_batch_size": 4,
        "bf16": False,
        "max_length": 32,
        **fields,
    }
    torch.manual_seed(1)
    trainer = cls(
        model=model,
        args=_of_trl(kind, "Config")(**{key: value for key, value in asked.items() if value is not None}),
        processing_class=trial.tokenizer,
        train_dataset=datasets.Dataset.from_list([_row(data, number) for number in range(23)]),
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer
