"""Trainers that compute a loss of their own in several processes, next to the same ones with DDP."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from tests.runtime.distributed.faults import raised_by
from tests.runtime.distributed.trainer_ranks import Rows, as_torchrun_does, distance
from tests.runtime.distributed.trainings import model


def squared(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is not a sum over rows: the root of a mean."""
    counts = labels[:, 1:] >= 0
    losses = outputs["logits"].logsumexp(-1)[:, :-1][counts]
    return 2 * losses.square().mean().sqrt()  # the Trainer multiplies it in place


class ComparesRows(Trainer):
    """Computes a loss that compares the rows of a process."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        scores = outputs.logits[:, -1, 0]
        loss = (scores - scores.mean()).square().sum() + scores.mean()
        return (loss, outputs) if return_outputs else loss


class FailsOnOneRank(ComparesRows):
    """Raises in the second step of one process."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1 and self.state.global_step == 1:
            raise KeyError("a loss of one process")
        return super().compute_loss(*args, **options)


def trained(kind: Any, folder: Path, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and norms of three steps, and the weights."""
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", disable_tqdm=True, report_to=[], use_cpu=True, seed=1,
    )  # fmt: skip
    made = kind(model=model("llama")(), args=args, train_dataset=Rows(17), **options)
    made.train()
    logged = [entry[name] for entry in made.state.log_history for name in ("loss", "grad_norm") if name in entry]
    weights = [value.double().clone() for value in made.model.state_dict().values()]
    if hasattr(made, "close"):
        made.close()
    return logged, weights


def in_ranks(folder: str) -> dict[str, Any]:
    from roundpipe_runtime import RoundPipeTrainer

    warnings.simplefilter("ignore")
    as_torchrun_does()
    options = {"devices": "virtual:2", "microbatches": 2}
    found: dict[str, Any] = {}
    for name, kind, more in (("function", Trainer, {"compute_loss_func": squared}), ("subclass", ComparesRows, {})):
        ours = type("Ours", (RoundPipeTrainer, *((kind,) if kind is not Trainer else ())), {})
        plain, expected = trained(kind, Path(folder, "plain"), **more)
        logged, weights = trained(ours, Path(folder, "ours"), **more, **options)
        found[name] = [logged, plain, distance(weights, expected)]
    failing = type("Failing", (RoundPipeTrainer, FailsOnOneRank), {})
    found["failed"] = raised_by(lambda: trained(failing, Path(folder, "failing"), **options))
    grouped = type("Grouped", (RoundPipeTrainer, ComparesRows), {})
    found["replicas"] = raised_by(lambda: trained(grouped, Path(folder, "groups"), replicas=4, **options))
    return found


def trl_in_ranks(folder: str) -> dict[str, Any]:
    """Two trainers of TRL, of which one has a head that needs the rows of a process in one microbatch."""
    trl = importlib.import_module("tests.runtime.huggingface.trainer.test_trl")
    warnings.simplefilter("ignore")
    as_torchrun_does()
    found = {}
    for kind, microbatches in (("ORPO", 2), ("DPO", 1)):
        runs = []
        for cls, more in ((trl.KINDS[kind], {}), (trl.combined(kind), {"microbatches": microbatches})):
            place = Path(folder, f"{kind}-{cls.__name__}-{dist.get_rank()}")
            runs.append(trl.trained(kind, place, cls, lambda more=more: more, per_device_train_batch_size=3))
        plain, ours = runs
        weights = [[p.detach().double() for p in run.model.parameters()] for run in runs]
        found[kind] = [trl.curves(ours), trl.curves(plain), distance(weights[1], weights[0])]
    return found
