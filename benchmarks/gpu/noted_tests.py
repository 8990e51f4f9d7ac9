"""A plugin of pytest: note each test in the records of a day, and leave out those that passed in an earlier run.

``GPU_DAY_RECORDS`` names the folder: ``pytest -m gpu -p benchmarks.gpu.noted_tests``.
"""

import os
from pathlib import Path

import pytest

from benchmarks.gpu.records import Records

_RECORDS = Records(Path(os.environ["GPU_DAY_RECORDS"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = _RECORDS.of("test")
    done = [item for item in items if known.get(item.nodeid, {}).get("outcome") == "passed"]
    config.hook.pytest_deselected(items=done)
    items[:] = [item for item in items if item not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        found = {"outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "skipped":
            found["reason"] = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.outcome == "failed":
            found["reason"] = str(report.longrepr)[-2000:]
        _RECORDS.add("test", report.nodeid, found)
