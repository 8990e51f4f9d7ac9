"""A plugin of pytest: note each test in the records of a day, and leave out those that passed in an earlier run.

``GPU_DAY_RECORDS`` names the folder: ``pytest -m gpu -p benchmarks.gpu.noted_tests``. A test that ended its process has
no outcome but ``unfinished``, and runs after all others in the next run; as do those that failed.
"""

import os
from pathlib import Path

import pytest

from benchmarks.gpu.records import Records

_RECORDS = Records(Path(os.environ["GPU_DAY_RECORDS"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {name: one["outcome"] for name, one in _RECORDS.of("test").items()}
    config.hook.pytest_deselected(items=[item for item in items if known.get(item.nodeid) == "passed"])
    left = [item for item in items if known.get(item.nodeid) != "passed"]
    items[:] = sorted(left, key=lambda item: item.nodeid in known)


def pytest_runtest_logstart(nodeid: str) -> None:
    _RECORDS.add("test", nodeid, {"outcome": "unfinished", "seconds": 0.0, "reason": "its process ended while it ran"})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.outcome == "failed" and "CUDA error" in str(report.longrepr):
        item.session.shouldstop = "an error of the device stays in its process"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        found = {"outcome": report.outcome, "seconds": report.duration}
        if report.outcome == "skipped":
            found["reason"] = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.outcome == "failed":
            found["reason"] = str(report.longrepr)[-2000:]
        _RECORDS.add("test", report.nodeid, found)
