"""Save and restore random states: torch's on the CPU and on accelerators, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the states of all generators that are in use. torch's also holds the seed from which dropout counts."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    kind, library = _accelerator()
    if library is not None:
        states = [library.get_rng_state(number) for number in range(library.device_count())]
        state["accelerator"] = {"type": kind, "states": states}
    return state


def check_random_state(state: dict[str, Any]) -> None:
    """Try the states from :func:`random_state` in new generators, before anything is changed.

    Those of accelerators are compared with the present ones by type and size: not every backend makes new generators.
    """
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])  # nothing is drawn
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.RandomState().set_state(state["numpy"])
    stored = state.get("accelerator")
    kind, library = _accelerator()
    if stored is not None and library is not None and kind == stored["type"]:
        for number, generator in enumerate(stored["states"][: library.device_count()]):
            present = library.get_rng_state(number)
            if (generator.dtype, generator.shape) != (present.dtype, present.shape):
                raise TypeError(f"the state of {kind}:{number} is not one")


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states from :func:`random_state`; those of accelerators that do not exist here are left out."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    stored = state.get("accelerator")
    kind, library = _accelerator()
    if stored is not None and library is not None and kind == stored["type"]:
        for number, generator in enumerate(stored["states"][: library.device_count()]):
            library.set_rng_state(generator, number)


def _accelerator() -> tuple[str, Any]:
    """The kind of accelerator and its library, if the process uses one already: asking must not start it."""
    device = torch.accelerator.current_accelerator()
    library = None if device is None else torch.get_device_module(device)
    # one that has no word for it started with its import
    if device is None or not getattr(library, "is_initialized", lambda: True)():
        return "", None
    return device.type, library
