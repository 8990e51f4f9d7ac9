"""Create the default process group of a torchrun job, also after torchrun has restarted the processes.

After a restart with ``--max-restarts``, torchrun's key-value store still contains the addresses of ended processes, to
which gloo would connect (https://github.com/pytorch/pytorch/issues/167288). Therefore the restarted processes agree on
a new prefix for their keys in the store. The number of restarts cannot serve as the prefix of the keys, because each
machine counts only its own restarts (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import json
import os
import time
import uuid

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ...errors import ConfigError

_PERIOD = 0.02  # seconds between two reads of the store


def is_one_of_many() -> bool:
    """Report whether torchrun, or a similar launcher, started this process as one of several processes."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_job(backend: str = "gloo") -> bool:
    """Create torch's default process group if torchrun started several processes and the group does not exist yet.

    The process group also works after a restart by ``torchrun --max-restarts``, with every rendezvous backend.
    """
    # backend: backend of the group: `"gloo"`, or `"cpu:gloo,cuda:nccl"` if other code needs nccl
    if dist.is_initialized() or not is_one_of_many():
        return False
    store, rank, size = next(rendezvous("env://"))
    prefix = _agree_on_prefix(store, rank, size)
    dist.init_process_group(backend, store=PrefixStore(prefix, store), rank=rank, world_size=size)
    return True


def _agree_on_prefix(store: Store, rank: int, size: int) -> str:
    """Return a prefix of store keys that all running processes share, and that no process before a restart used."""
    # Rank 0 offers a new prefix, waits for a token of each other rank under it, and publishes these tokens under it.
    # Another rank may read an old prefix, so it uses a prefix only after its own token has been published there.
    if rank == 0:
        name = f"roundpipe/{uuid.uuid4().hex}"
        store.set("roundpipe/start", name)
        tokens = [store.get(f"{name}/token/{other}").decode() for other in range(1, size)]  # `get` waits for the key
        store.set(f"{name}/tokens", json.dumps(tokens))
        return name
    token = uuid.uuid4().hex
    while True:
        name = str(store.get("roundpipe/start"), "ascii")
        store.set(f"{name}/token/{rank}", token)
        while store.get("roundpipe/start").decode() == name:
            if store.check([f"{name}/tokens"]) and token in json.loads(store.get(f"{name}/tokens")):
                return name
            time.sleep(_PERIOD)


def own_devices() -> list[str] | None:
    """Return this process's accelerators if torchrun started several processes on this machine, else ``None``."""
    count, own = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if count == 1 or found is None:
        return None
    total = torch.accelerator.device_count()
    if count <= total:
        return [f"{found.type}:{number}" for number in range(own, total, count)]
    if any(name.endswith("_VISIBLE_DEVICES") for name in os.environ):  # the user has assigned devices to this process
        return None
    raise ConfigError(
        f"{count} processes were started on a machine with {total} accelerators. One process can use all "
        "accelerators:\n    torchrun --nproc-per-node=1 ..."
    )
