"""Options of the Trainer: six steps with ``RoundPipeTrainer``, next to the Trainer with the same data and seed."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .cases import SkipColumnError
from .cut_cases import distance
from .trainings_trial import Batch, RefusedError, Trial

__all__ = ["LEFT_OUT", "OPTIONS", "SIX_STEPS", "TrainerTrial", "nothing", "side_by_side"]

LEFT_OUT = (
    "1 microbatch",
    "2 microbatches",
    "3 microbatches",
    "rows without labels",
    "other labels",
    "called",
    "no example",
)
"""Columns of a model's loss, which are not those of a whole training."""

SIX_STEPS: Mapping[str, Any] = {
    "max_steps": 6,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 7,
}
"""Arguments of both trainings."""

_ROWS = 23
_VOCABULARY = 60

# what an option is called -> fields of TrainingArguments, and: which "model", whether it is "random"
OPTIONS: Mapping[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "label smoothing and accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "texts grouped by length": {"train_sampling_strategy": "group_by_length"},
    "no weight decay of biases": {"weight_decay": 0.1},
    "cosine schedule with warm-up": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "schedule with restarts": {"lr_scheduler_type": "cosine_with_restarts", "warmup_steps": 1},
    "warm-up and decay at the end": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "warmup_steps": 2,
    },
    "inverse square root": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    "Adafactor": {"optim": "adafactor"},
    "fused AdamW": {"optim": "adamw_torch_fused"},
    "SGD": {"optim": "sgd", "learning_rate": 0.05},
    "RMSprop": {"optim": "rmsprop"},
    "Adagrad": {"optim": "adagrad"},
    "noise on embeddings": {"neftune_noise_alpha": 5.0, "random": True},
    "recomputation": {"gradient_checkpointing": True},
    "incomplete batches dropped": {"dataloader_drop_last": True},
    "evaluation and the best model": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
    },
    "epochs": {"max_steps": -1, "num_train_epochs": 2},
    "classes of rows": {"model": "classes"},
    "classes of rows and accumulation": {"model": "classes", "gradient_accumulation_steps": 3},
    "classes of rows and label smoothing": {"model": "classes", "label_smoothing_factor": 0.1},
    "numbers": {"model": "numbers"},
    "spans of texts": {"model": "spans"},
    "experts": {"model": "experts"},
    "tied embeddings": {"model": "tied"},
}


class TrainerTrial(Trial):
    """One option, on a small model of texts."""

    @functools.cached_property
    def model(self) -> Any:
        """Llama, BERT or Mixtral, in float64."""
        import transformers

        kind = self.fields.get("model", "texts")
        sizes: dict[str, Any] = {
            "vocab_size": _VOCABULARY,
            "pad_token_id": 0,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "initializer_range": 0.1,
        }
        torch.manual_seed(0)
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if kind == "classes":
            config = transformers.BertConfig(**sizes, **still, num_labels=3)
            made: Any = transformers.BertForSequenceClassification(config)
        elif kind == "numbers":
            config = transformers.BertConfig(**sizes, **still, num_labels=1, problem_type="regression")
            made = transformers.BertForSequenceClassification(config)
        elif kind == "spans":
            made = transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes, **still))
        elif kind == "experts":
            experts = {"num_local_experts": 4, "output_router_logits": True, "num_key_value_heads": 2}
            made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts))
            made.set_experts_implementation("eager")
        else:
            config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=kind == "tied")
            made = transformers.LlamaForCausalLM(config)
        return made.double()

    @property
    def fields(self) -> dict[str, Any]:
        """The option."""
        return dict(OPTIONS[self.name.partition(":")[2]])

    @property
    def columns(self) -> dict[str, Callable[[Any], dict[str, Any]]]:
        """A training is all that there is."""
        return {**dict.fromkeys(LEFT_OUT, nothing), "trained": _trained}

    def batch(self, rows: int, seed: int, *, some_missing: bool = False) -> Batch:
        """Rows of the data."""
        return collate(self.data(rows))

    def data(self, count: int = _ROWS) -> list[dict[str, Any]]:
        """Texts of several lengths, with labels."""
        kind = self.fields.get("model", "texts")
        generator = torch.Generator().manual_seed(3)
        rows = []
        for number in range(count):
            length = 5 + (number * 7) % 11
            tokens = torch.randint(5, _VOCABULARY, (length,), generator=generator).tolist()
            labels: dict[str, Any] = {"labels": tokens}
            if kind == "classes":
                labels = {"labels": tokens[0] % 3}
            elif kind == "numbers":
                labels = {"labels": tokens[0] / 30}
            elif kind == "spans":
                labels = {"start_positions": number % 4, "end_positions": 90 if number % 5 == 0 else 4}
            rows.append({"input_ids": tokens, **labels})
        return rows


def collate(rows: list[dict[str, Any]]) -> Batch:
    """Texts padded on the right; the labels of what is padded are ignored."""
    longest = max(len(row["input_ids"]) for row in rows)
    made: Batch = {"input_ids": [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]}
    for key in rows[0]:
        if key != "input_ids":
            values = [row[key] for row in rows]
            made[key] = [v + [-100] * (longest - len(v)) for v in values] if isinstance(values[0], list) else values
    tensors = {key: torch.tensor(value) for key, value in made.items()}
    return {
        key: value.double() if value.is_floating_point() else value
        for key, value in {**tensors, "attention_mask": (tensors["input_ids"] != 0).long()}.items()
    }


def nothing(trial: Trial) -> dict[str, Any]:
    """A column that asks nothing of a training."""
    raise SkipColumnError("an option of the Trainer: what is asked is whether it trains alike")


def _trained(trial: TrainerTrial) -> dict[str, Any]:
    """Six steps: the losses of the log, norms of gradients, and the weights."""
    import copy

    import transformers

    from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer

    def run(kind: Any, **options: Any) -> Any:
        fields = {
            **SIX_STEPS,
            "per_device_train_batch_size": 5,
            "per_device_eval_batch_size": 4,
            **{key: value for key, value in trial.fields.items() if key != "model"},
        }
        folder = tempfile.mkdtemp(dir=os.getcwd())
        trainer = kind(
            model=copy.deepcopy(trial.model),
            args=transformers.TrainingArguments(output_dir=folder, **fields),
            data_collator=collate,
            train_dataset=trial.data(),
            eval_dataset=trial.data(7),
            **options,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return trainer

    if trial.fields.get("random"):
        raise SkipColumnError("random numbers are drawn for each microbatch: they are others than those of the batch")
    return side_by_side(trial, run, transformers.Trainer, RoundPipeTrainer)


def side_by_side(trial: Trial, run: Callable[..., Any], theirs: Any, ours: Any) -> dict[str, Any]:
    """Run two trainers, and compare the losses in their logs, and the weights that they trained."""
    from roundpipe_runtime.errors import RoundPipeError

    plain = run(theirs)
    try:
        found = run(ours, devices="virtual:2", microbatches=3)
    except RoundPipeError as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
    errors = {}
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        pairs = list(zip(_history(found, key), _history(plain, key), strict=True))
        if pairs:
            errors[key] = max(abs(one - other) / max(abs(other), 1e-3) for one, other in pairs)
    errors["all that is logged"] = max(errors.values(), default=0.0)
    for key in sorted({key for entry in plain.state.log_history for key in entry if not _is_clock(key)} - set(errors)):
        for one, other in zip(_history(found, key), _history(plain, key), strict=True):
            distant = abs(one - other) / max(abs(other), 1e-3)
            errors["all that is logged"] = max(errors["all that is logged"], distant)
    held = plain.model.state_dict()
    errors["weights"] = max(
        distance(value, held[name], 1e-3) for name, value in found.pipeline.cut.model.state_dict().items()
    )
    return trial.check({}, errors)


def _is_clock(key: str) -> bool:
    return any(word in key for word in ("time", "runtime", "per_second"))


def _history(trainer: Any, key: str) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history if key in entry]
