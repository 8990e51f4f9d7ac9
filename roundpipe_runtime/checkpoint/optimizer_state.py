"""Optimizer states by the names of parameters instead of their indices, for any optimizer of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..optim.disk_store import hold_on_disk
from .errors import CheckpointError


def named_state(optimizer: torch.optim.Optimizer, targets: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of an optimizer, by name."""
    names = _names(optimizer, targets)
    state = optimizer.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    called = dict(zip(numbers, (name for group in names for name in group), strict=True))
    groups = [
        {**{key: value for key, value in group.items() if key != "param_names"}, "params": own}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    rest = {key: value for key, value in state["state"].items() if key not in called}
    by_name = {called[number]: value for number, value in state["state"].items() if number in called}
    return {"class": type(optimizer).__name__, "param_groups": groups, "state": by_name, "rest": rest}


def check_optimizer(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], targets: Mapping[str, torch.Tensor]
) -> None:
    """Check that a state is of an optimizer with the same groups, before anything is changed."""
    found, expected = [group["params"] for group in stored["param_groups"]], _names(optimizer, targets)
    own = type(optimizer).__name__
    if stored["class"] != own:
        raise CheckpointError(f"The checkpoint contains the state of {stored['class']}, and the optimizer is {own}.")
    if len(found) != len(expected):
        raise CheckpointError(f"The optimizer has {len(expected)} groups, and the stored one had {len(found)}.")
    for number, (there, here) in enumerate(zip(found, expected, strict=True)):
        differing = sorted(set(there) ^ set(here))
        if differing:
            raise CheckpointError(
                f"Group {number} of the optimizer has {len(here)} parameters, and the stored one had {len(there)}. "
                f"Only one of them has {', '.join(differing[:3])}{' ...' if len(differing) > 3 else ''}."
            )


def restore_optimizer(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], targets: Mapping[str, torch.Tensor]
) -> None:
    """Load what :func:`named_state` returned, after :func:`check_optimizer`."""
    numbers: dict[str, int] = {}
    groups = []
    for group, own, names in zip(
        stored["param_groups"], optimizer.param_groups, _names(optimizer, targets), strict=True
    ):
        numbers.update({name: len(numbers) + place for place, name in enumerate(names)})
        kept = {"param_names": own["param_names"]} if "param_names" in own else {}
        groups.append({**group, **kept, "params": [numbers[name] for name in names]})
    state = {numbers[name]: value for name, value in stored["state"].items()}
    optimizer.load_state_dict({"state": {**state, **stored["rest"]}, "param_groups": groups})
    for name, values in stored["state"].items():
        _keep_dtypes(getattr(optimizer, "state", {}).get(targets[name], {}), values)
        hold_on_disk(optimizer, targets[name])


def _keep_dtypes(loaded: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Undo torch's cast of the state to the dtype of its parameter, https://github.com/pytorch/pytorch/issues/43706."""
    for key, value in stored.items():
        now = loaded.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            loaded[key] = value.to(now.device)


def _names(optimizer: torch.optim.Optimizer, targets: Mapping[str, torch.Tensor]) -> list[list[str]]:
    called = {id(target): name for name, target in targets.items()}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [place for place, parameter in enumerate(group["params"]) if id(parameter) not in called]
        if unknown:
            raise CheckpointError(
                f"Parameter {unknown[0]} in group {number} of the optimizer does not belong to the model. Make the "
                "optimizer from\n"
                "    model.optim_parameters()"
            )
        names.append([called[id(parameter)] for parameter in group["params"]])
    return names
