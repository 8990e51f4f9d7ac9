"""Machine profiles as JSON files: measured by ``roundpipe doctor --machine FILE``, or typed in."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

from yobx_flatten.files.document import read_document
from yobx_flatten.files.scratch import write_text

from ..errors import ConfigError
from .hardware import Hardware, device_kind

_REQUIRED = ("names", "flops", "link", "host_rate")
_NUMBERS = ("flops", "link", "memory", "host", "host_rate", "down", "call", "disk_read", "disk_write")


def save_machine(machine: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a machine profile.

    Args:
        machine: devices and host.
        path: file to write.
    """
    write_text(path, json.dumps(dataclasses.asdict(machine), indent=1) + "\n")


def load_machine(path: str | os.PathLike[str]) -> Hardware:
    """Load a measured or hand-written machine profile: rates per second, sizes in bytes.

    ::

        {"names": ["cuda:0", "cuda:1"], "flops": 150e12, "link": 25e9, "memory": 24e9, "host": 256e9, "host_rate": 60e9}

    ``down`` is the link from the device if it is not as fast as that to it, and ``call`` the seconds of the host for a
    layer and microbatch; ``disk_read`` and ``disk_write`` are the rates of a disk that holds the state of a training
    (``host="disk:DIR"``). What is missing of ``memory`` and ``host`` is unknown.

    Args:
        path: file of JSON.

    Returns:
        The machine.

    Raises:
        ConfigError: the file is not a machine profile.
        OSError: the file cannot be read.
    """
    name = os.fspath(path)
    content = read_document(
        pathlib.Path(path), dict[str, Any], failure=ConfigError, remedy=_remedy(name), kind="machine profile"
    )
    missing = [key for key in _REQUIRED if key not in content]
    unknown = sorted(set(content) - {field.name for field in dataclasses.fields(Hardware)})
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not one of its entries"
        raise ConfigError(f"{name} is not a machine profile: {what}. {_remedy(name)}")
    names = content["names"]
    if not isinstance(names, list) or not names or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(f'{name}: names must be a list of devices, like ["cuda:0"], found {names!r}.')
    for key in _NUMBERS:
        value = content.get(key)
        if value is None and key not in _REQUIRED:
            continue
        if not _is_rate(value) and not (key == "call" and value == 0):
            raise ConfigError(f"{name}: {key} must be a number above 0, found {value!r}.")
    kind, stated = content.get("kind") or "", content.get("origin") or {}
    if not isinstance(kind, str):
        raise ConfigError(f'{name}: kind must be the type of the devices, like "cuda", found {kind!r}.')
    if not isinstance(stated, dict) or not all(isinstance(one, str) for one in stated.values()):
        raise ConfigError(f'{name}: origin must be like {{"flops": "measured"}}, found {stated!r}.')
    whole = {key: int(content[key]) if content.get(key) is not None else None for key in ("memory", "host")}
    origin = {key: "given" if content.get(key) else "unknown" for key in ("flops", "link", "memory")}
    return Hardware(
        **{
            **content,
            **whole,
            "names": tuple(names),
            "kind": kind or device_kind(tuple(names)),
            "call": content.get("call") or 0.0,
            "origin": stated or origin,
        }
    )


def _remedy(name: str) -> str:
    return f"To measure this machine:\n    roundpipe doctor --machine {name}"


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
