"""Tests in `on_late` are for a process that has the reference accelerator; `test_on_late.py` starts one."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name == "on_late" and not config.pluginmanager.has_plugin("tests.accelerator.plugin"):
        return True
    return None
