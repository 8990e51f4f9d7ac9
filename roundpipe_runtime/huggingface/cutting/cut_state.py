"""The state of one microbatch, which each piece of a cut model takes and returns."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from yobx_flatten import pytree_dataclass
from yobx_flatten.private_names.of_torch import pytree
from yobx_flatten.recipe.aliases import Kwargs, PyTree

from ..loss.call_options import CallOptions, split_options
from .call_log import CallLog
from .capture import asked_for
from .placeholder import Key


@dataclasses.dataclass(frozen=True, slots=True)
class CutState:
    """What a piece of a cut model hands to the next one, for one microbatch.

    The engine flattens it between two pieces, to move its tensors to the next device. A piece never changes a state: it
    returns a new one, since the engine may call the same piece with the same state again, to recompute it.
    """

    call: tuple[tuple[Any, ...], Kwargs]  # arguments of the model, `(args, kwargs)`, from which every phase starts
    # options of the call; `None` if the last phase is to return exactly what the model returns
    options: CallOptions | None
    # tensors by `Key`, as long as they are needed: those that phases pass to layers, and outputs of layers
    values: dict[Key, torch.Tensor]
    # contents of dictionaries and lists that layers read and write (the shared keys and values of Gemma)
    boxes: dict[int, Any]
    call_log: CallLog  # plan of the calls, without tensors
    seed: int  # seed of the random numbers that the model draws outside of its layers

    def restart_noise(self) -> None:
        """Seed the generators as they were when the first phase started: that of the call's device, and the CPU's.

        Models draw on the device, and on the CPU whatever the device: transformers draws there which layers it drops.
        """
        torch.default_generator.manual_seed(self.seed)
        _generator(self.call).manual_seed(self.seed)


pytree_dataclass(CutState, backends="torch")


def begin(args: tuple[Any, ...], kwargs: Kwargs, model: nn.Module) -> CutState:
    """Return the state of a microbatch before anything ran."""
    kwargs, options = split_options(kwargs)
    # where the last layer may be left out, the code after it reads the output of any other one
    keep = "all" if model.training and drops_layers(model) else asked_for(model, kwargs)
    seed = _generator((args, kwargs)).initial_seed()
    return CutState((args, kwargs), options, values={}, boxes={}, call_log=CallLog(keep=keep), seed=seed)


def drops_layers(model: nn.Module) -> bool:
    """Report whether a model draws in training which layers it calls (LayerDrop)."""
    config = getattr(model, "config", None)
    return any(getattr(config, f"{part}layerdrop", 0) for part in ("", "encoder_", "decoder_"))


def device_of(tree: PyTree) -> torch.device:
    """Return the device of the first tensor in a nested value; the host if there is none."""
    found = (leaf.device for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return next(found, torch.device("cpu"))


def _generator(call: Any) -> Any:
    """The generator, or the module with the seed functions, of the device that a call runs on."""
    device = device_of(call)
    is_host = device.type in ("cpu", "meta")
    return torch.default_generator if is_host else torch.get_device_module(device)
