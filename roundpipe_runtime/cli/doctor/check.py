"""Result of one check of the doctor."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["ok", "warning", "fail"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Result of one check of the installation."""

    name: str  # what was looked at
    status: Status  # `"ok"`; `"warning"`, something is missing or slow; `"fail"`, it does not work
    found: str  # the finding, in words
    remedy: str = ""  # what to do about it; empty where there is nothing to do
