"""Split a batch into microbatches, join their outputs, and compute the loss of the whole batch."""

from .joining import join
from .loss import LossContract, WeightedLoss, read_loss
from .spec import Replicate, RoundPipePackedData, TensorChunkSpec, sizes
from .splitting import Microbatch, infer_batch_size, split

__all__ = [
    "LossContract", "Microbatch", "Replicate", "RoundPipePackedData", "TensorChunkSpec", "WeightedLoss",
    "infer_batch_size", "join", "read_loss", "sizes", "split",
]  # fmt: skip
