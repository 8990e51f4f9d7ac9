"""The Trainer in several processes, next to transformers' with DDP, also with losses of its own.

A user's script: accelerate launch --multi_gpu --num_processes 2 -m tests.runtime.distributed.trainer_ranks FOLDER
"""

import importlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from tests.runtime.distributed.faults import raised_by
from tests.runtime.distributed.trainings import LENGTH, VOCABULARY, model

# Rows of an epoch of which the last batch has one, so that a rank has none.
UNEVEN = 37


class Rows(Dataset):  # type: ignore[type-arg] # torch's has none at run time
    """Rows with a different number of tokens that count."""

    def __init__(self, count: int) -> None:
        self._tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._tokens[index].clone()
        labels[: index % (LENGTH - 1)] = -100
        return {"input_ids": self._tokens[index], "labels": labels}


class Stream(IterableDataset):  # type: ignore[type-arg] # as above
    def __iter__(self) -> Any:
        rows = Rows(40)
        return (rows[number] for number in range(len(rows)))


def train(
    kind: Any, folder: Path, steps: int, resume: Any = False, data: Any = None, changes: Any = None, **options: Any
) -> dict[str, Any]:
    args = TrainingArguments(str(folder), **{
        "max_steps": steps, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True,
        "report_to": [], "use_cpu": True, "seed": 1, **(changes or {}),
    })  # fmt: skip
    trainer = kind(model=model("llama")(), args=args, train_dataset=data or Rows(40), eval_dataset=Rows(7), **options)
    trainer.train(resume_from_checkpoint=resume)
    found = {
        name: [entry[name] for entry in trainer.state.log_history if name in entry]
        for name in ("loss", "grad_norm", "eval_loss")
    }
    weights = [value.double().clone() for value in trainer.model.state_dict().values()]
    if hasattr(trainer, "close"):
        trainer.close()
    return {**found, "weights": weights}


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other, strict=True))


class BadRows(Rows):
    """Rows of which some cannot be read in one of the processes."""

    def __init__(self, count: int, first_bad: int) -> None:
        super().__init__(count)
        self._first_bad = first_bad

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if dist.get_rank() == 1 and index >= self._first_bad:
            raise OSError(f"row {index} cannot be read")
        return super().__getitem__(index)


def bad_rows(kind: Any, folder: Path) -> dict[str, Any]:
    found = {}
    for name in ("train", "eval"):
        args = TrainingArguments(
            str(folder), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, disable_tqdm=True,
            report_to=[], use_cpu=True, save_strategy="no",
        )  # fmt: skip
        data, others = BadRows(12, 6), Rows(12)
        trainer = kind(
            model=model("llama")(), args=args, train_dataset=data if name == "train" else others, eval_dataset=data,
            devices="virtual:1",
        )  # fmt: skip
        trainer.pipeline  # noqa: B018 # which takes a while to make
        begin = time.monotonic()
        error = raised_by(trainer.train if name == "train" else trainer.evaluate)
        found[name] = [*error, time.monotonic() - begin]
        trainer.pipeline.close()
    return found


def as_torchrun_does() -> None:
    """Set the environment of a process of torchrun; accelerate divides the cores by the processes of a machine."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )


def in_ranks(folder: str) -> dict[str, Any]:
    """Both Trainers on the same rows, and a training that goes on from a checkpoint."""
    from roundpipe_runtime import RoundPipeTrainer

    warnings.simplefilter("ignore")
    as_torchrun_does()
    options = {"devices": "virtual:2", "microbatches": 2}
    plain = train(Trainer, Path(folder, "plain"), 4)
    ours = train(RoundPipeTrainer, Path(folder, "ours"), 4, **options)
    train(RoundPipeTrainer, Path(folder, "resumed"), 2, **options)
    resumed = train(RoundPipeTrainer, Path(folder, "resumed"), 4, resume=True, **options)
    uneven = train(RoundPipeTrainer, Path(folder, "uneven"), 6, data=Rows(UNEVEN), **options)
    streams = [
        train(kind, Path(folder, f"{kind.__name__} stream"), 2, data=Stream(), **more)["loss"]
        for kind, more in ((Trainer, {}), (RoundPipeTrainer, options))
    ]
    weights = {name: found.pop("weights") for name, found in {"plain": plain, "ours": ours, "uneven": uneven}.items()}
    for name in ("uneven", "ours"):
        torch.save(weights[name], Path(folder, name, f"{dist.get_rank()}.pt"))
    return {
        "plain": plain,
        "ours": ours,
        "distance": distance(weights["ours"], weights["plain"]),
        "resumed": all(torch.equal(a, b) for a, b in zip(resumed["weights"], weights["ours"], strict=True)),
        "uneven": uneven["loss"],
        "streams": streams,
        "bad rows": bad_rows(RoundPipeTrainer, Path(folder, "bad")),
    }


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


def own_losses(folder: str) -> dict[str, Any]:
    from roundpipe_runtime import RoundPipeTrainer

    warnings.simplefilter("ignore")
    as_torchrun_does()
    changes = {"per_device_train_batch_size": 3, "eval_strategy": "no", "save_strategy": "no"}

    def trained(kind: Any, place: str, **options: Any) -> dict[str, Any]:
        return train(kind, Path(folder, place), 3, data=Rows(17), changes=changes, **options)

    def ours(*kinds: Any, place: str, **more: Any) -> dict[str, Any]:
        kind = type("Ours", (RoundPipeTrainer, *kinds), {})
        return trained(kind, place, devices="virtual:2", microbatches=2, **more)

    found: dict[str, Any] = {}
    for name, kinds, more in (("function", (), {"compute_loss_func": squared}), ("subclass", (ComparesRows,), {})):
        plain, own = trained((*kinds, Trainer)[0], "plain", **more), ours(*kinds, place="ours", **more)
        logged = [[*run["loss"], *run["grad_norm"]] for run in (own, plain)]
        found[name] = [*logged, distance(own["weights"], plain["weights"])]
    found["failed"] = raised_by(lambda: ours(FailsOnOneRank, place="failing"))
    found["replicas"] = raised_by(lambda: ours(ComparesRows, place="groups", replicas=4))
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


def main() -> None:
    """Train as a script of a user does, which `accelerate launch` or torchrun starts."""
    from roundpipe_runtime import RoundPipeTrainer

    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    found = train(RoundPipeTrainer, folder / "run", 4, devices="virtual:2", microbatches=2)
    torch.save(found["weights"], folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
