"""Train models larger than device memory: the model stays in CPU memory, and devices get a few layers at a time.

::

    model = RoundPipe(nn.Sequential(...), devices="virtual:2")
    with OptimizerCtx():
        optimizer = optim.Adam(model.parameters(), lr=1e-3)

    for inputs, labels in batches:
        loss = model.forward_backward((inputs,), label=labels, loss_fn=loss_fn)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

Importing ``roundpipe_runtime`` starts no thread and touches no accelerator.
"""

from __future__ import annotations

from yobx_flatten.core.lazy_names import lazy_names

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than the rest of this file

__all__ = [  # noqa: RUF022 # grouped by task, not by the alphabet
    # wrap a model
    "RoundPipe", "wrap_model_to_roundpipe", "WrappedModel", "quantize_frozen", "cut", "Cut", "CutReport", "Equivalence",
    # configure a call, and which layers form a stage
    "RoundPipeRunConfig", "ModelExecutePlan", "LayerCost",
    # say how a batch is cut and joined
    "TensorChunkSpec", "Replicate", "RoundPipePackedData",
    # a loss that is exact in microbatches
    "WeightedLoss",
    # the optimizer's side
    "OptimizerCtx", "optim", "GradScaler",
    # save a training and continue with it
    "save_checkpoint", "load_checkpoint", "list_checkpoints", "Checkpoint",
    # inside a layer
    "save_for_recompute", "doing_recompute", "get_recompute_data",
    # where it runs
    "Device", "VirtualDevice", "parse_devices",
    # see what ran
    "Timeline", "Record",
    # what can go wrong
    "RoundPipeError", "BatchStructureError", "CheckpointError", "ConfigError", "CutError", "DamagedCheckpointError",
    "DeviceError", "DeviceMemoryError", "DistributedError", "JoinError", "LossError", "PlanError", "SplitError",
    "StageError", "UnregisteredObjectError", "UseAfterReleaseError", "RoundPipeWarning", "CheckpointWarning",
    "CutRefusedWarning", "UnevenSplitWarning",
]  # fmt: skip

# Where the names are defined.
_HOMES = (
    "batch.loss", "batch.spec", "checkpoint", "device.accelerator", "device.protocol", "device.virtual",
    "engine.config", "engine.recomputed", "errors", "huggingface", "optim.step", "pipeline", "schedule.partitioning",
    "schedule.plan", "schedule.timeline",
)  # fmt: skip

# They are derived from transformers classes. `import *` leaves them out, because it would import transformers.
_TRAINERS = ("RoundPipeSeq2SeqTrainer", "RoundPipeTrainer")


def _trainer(name: str) -> type:
    from yobx_flatten.errors import require

    require("transformers", "accelerate", purpose=name, extra="transformers,train")
    from .huggingface.trainer import classes as trainer

    found: type = getattr(trainer, name)
    return found


if TYPE_CHECKING:  # a type checker sees the same names
    from . import optim
    from .batch.loss import WeightedLoss
    from .batch.spec import Replicate, RoundPipePackedData, TensorChunkSpec
    from .checkpoint import *
    from .device.accelerator import parse_devices
    from .device.protocol import Device
    from .device.virtual import VirtualDevice
    from .engine.config import RoundPipeRunConfig
    from .engine.recomputed import doing_recompute, get_recompute_data, save_for_recompute
    from .errors import *
    from .huggingface import *
    from .huggingface.trainer.classes import RoundPipeSeq2SeqTrainer as RoundPipeSeq2SeqTrainer
    from .huggingface.trainer.classes import RoundPipeTrainer as RoundPipeTrainer
    from .optim.step import GradScaler, OptimizerCtx
    from .pipeline import RoundPipe
    from .schedule.partitioning import LayerCost
    from .schedule.plan import ModelExecutePlan
    from .schedule.timeline import Record, Timeline
else:
    __getattr__, __dir__ = lazy_names(globals(), _HOMES, dict.fromkeys(_TRAINERS, _trainer))
