"""The reference accelerator as a device of torch: importing this file makes ``torch.device("late")`` known.

It is for a process of its own, since ``torch.accelerator.is_available()`` is true from then on. These variables are
read from the environment:

- ``LATE_DEVICES``: number of devices. Default: 4.
- ``LATE_DRY``: with ``1`` nothing is computed; the clocks of streams, copy engines and host go on.
"""

import os
import sys
import types
from typing import Any

import torch
import torch._meta_registrations  # more operators state what comes out without being run

from .build import load

DEVICES = int(os.environ.get("LATE_DEVICES", "4"))

_backend = load()
_backend.start(DEVICES, os.environ.get("LATE_DRY") == "1")
_PROCESS = os.getpid()


# Counted since the last call: copies and bytes, pinned and pageable, kernels, and waits of the host.
counts = _backend.counts
# Seconds that threads of the host spent in the backend since the last call, and not in torch or Python.
host_seconds = _backend.host_seconds
pending = _backend.pending  # pieces of work of a device that are not done yet
set_memory = _backend.set_memory  # of a device, in bytes
# A lost device does no more work after so many pieces, and every call that concerns it is an error.
lose, start_again = _backend.lose, _backend.start_again
# Of a dry run: the seconds since `set_order`, on all streams and the host, and the work since the last call: device,
# stream, name, begin and end in seconds.
clock, trace = _backend.clock, _backend.trace


def set_order(order: str, seed: int = 0) -> None:
    """Choose when work is done, from now on; what was given before is done first."""
    _backend.set_order(getattr(_backend.Order, order), seed)


def set_costs(*, flops: float, memory: float, link: float, pageable_link: float = 8e9, launch: float = 5e-6) -> None:
    """Set the operations and bytes per second of devices of a dry run, and the seconds of a launch."""
    _backend.set_costs(launch, link, pageable_link, memory, flops)


def _index(device: Any) -> int:
    found = device if isinstance(device, int) or device is None else torch.device(device).index
    return _backend.current_device() if found is None else found


class _DeviceContext:
    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _backend.current_device()
        _backend.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        _backend.set_device(self.before)


_GENERATORS = tuple(_backend.default_generator(number) for number in range(DEVICES))


def _generator(device: Any = None) -> torch.Generator:
    return _GENERATORS[_index(device)]


def _seed_all(seed: int) -> None:
    for number in range(DEVICES):
        _generator(number).manual_seed(int(seed))


def _resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """FSDP gives memory back and takes it again; here the storage keeps it."""
    if storage.device.type != "late":
        return _resize_before(storage, nbytes)
    if nbytes > storage.nbytes():
        raise NotImplementedError(f"late: a storage of {storage.nbytes()} bytes does not grow to {nbytes}.")
    return storage


_resize_before = torch.UntypedStorage.resize_


def _register() -> None:
    torch.UntypedStorage.resize_ = _resize
    module = types.ModuleType("torch.late")
    vars(module).update(
        device=_DeviceContext,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # torch.utils.checkpoint asks for it
        _is_in_bad_fork=lambda: os.getpid() != _PROCESS,
        device_count=lambda: DEVICES,
        current_device=_backend.current_device,
        set_device=lambda device: _backend.set_device(_index(device)),
        synchronize=lambda device=None: _backend.synchronize(_index(device)),
        default_generators=_GENERATORS,
        get_rng_state=lambda device=None: _generator(device).get_state(),
        set_rng_state=lambda state, device=None: _generator(device).set_state(state),
        manual_seed=lambda seed: _generator().manual_seed(int(seed)),
        manual_seed_all=_seed_all,
        initial_seed=lambda: _generator().initial_seed(),
        Stream=lambda device=None, priority=0: torch.Stream(
            device or torch.device("late", _index(None)), priority=priority
        ),
        Event=torch.Event,
        stream=lambda stream: stream,  # which is a context manager itself
        current_stream=lambda device=None: torch.accelerator.current_stream(device),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    sys.modules["torch.late"] = module
    torch.utils.rename_privateuse1_backend("late")
    torch._register_device_module("late", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


_register()
