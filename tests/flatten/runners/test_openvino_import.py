"""OpenVINO is imported without its reports of use."""

import os

import pytest

from tests import fresh_process

pytest.importorskip("openvino")

PROGRAM = """
import sys
forks = []
sys.addaudithook(lambda event, args: forks.append(event) if event == "os.fork" else None)
from yobx_flatten.runners.openvino_runner import import_openvino
import_openvino().Core()
import threading
for thread in threading.enumerate():
    if thread is not threading.main_thread() and not thread.daemon:
        thread.join(5)
print(forks, "openvino_telemetry" in sys.modules)
"""


def test_the_import_forks_nothing():
    """In a fresh process: nothing is sent, and the name of what sends is as it was."""
    done = fresh_process.run("-c", PROGRAM, env={**os.environ, "CI": ""})
    assert done.stdout.split() == ["[]", "False"]
