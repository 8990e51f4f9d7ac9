"""Trainers of TRL that are also a ``RoundPipeTrainer``: six steps, next to those without a pipeline."""

from __future__ import annotations

import copy
import functools
import os
import tempfile
from collections.abc import Callable, Mapping
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

# what a training is called -> the trainer, fields of its configuration, and: which "data", whether with "adapters"
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
    "KTO": ("KTO", {"data": "opinions"}),
}


def _words(count: int, shift: int) -> str:
    return " ".join(f"w{(7 * number + shift) % 90}" for number in range(count))


def _row(kind: str, number: int) -> dict[str, Any]:
    prompt, answer, other = _words(4, number), " " + _words(5 + number % 3, 2 * number), " " + _words(6, 3 * number)
    if kind == "completions":
        return {"prompt": prompt, "completion": answer}
    if kind == "conversations":
        turns = (prompt, answer.strip(), _words(3, number + 9), other.strip())
        roles = ("user", "assistant") * (1 + number % 2)
        return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]}
    if kind == "preferences":
        return {"prompt": prompt, "chosen": answer, "rejected": other}
    if kind == "opinions":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
    return {"text": _words(5 + number % 7, 3 * number)}


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
        import transformers

        torch.manual_seed(0)
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
        head = "SequenceClassification" if self.asked[0] == "Reward" else "CausalLM"
        return getattr(transformers, f"LlamaFor{head}")(config).double()

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
    import trl

    from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer

    theirs = getattr(trl, f"{trial.asked[0]}Trainer")
    ours = type("Ours", (RoundPipeTrainer, theirs), {})
    return side_by_side(trial, functools.partial(_run, trial), theirs, ours)


def _run(trial: TrlTrial, cls: Any, **options: Any) -> Any:
    import datasets
    import peft
    import transformers
    import trl

    kind, fields = trial.asked
    data = fields.pop("data", "texts")
    if fields.pop("adapters", False):
        options["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    elif kind in ("DPO", "KTO"):
        options["ref_model"] = copy.deepcopy(trial.model)
    arguments = getattr(trl, f"{kind}Config")(
        **{
            **SIX_STEPS,
            "output_dir": tempfile.mkdtemp(dir=os.getcwd()),
            "per_device_train_batch_size": 4,
            "bf16": False,
            "max_length": 32,
            **fields,
        }
    )
    torch.manual_seed(1)
    trainer = cls(
        model=copy.deepcopy(trial.model),
        args=arguments,
        processing_class=trial.tokenizer,
        train_dataset=datasets.Dataset.from_list([_row(data, number) for number in range(23)]),
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer
