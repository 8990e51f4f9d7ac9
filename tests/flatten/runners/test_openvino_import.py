"""OpenVINO is imported without its reports of use, and what it refuses is said in one line."""

import os

import numpy
import pytest
import torch

from tests import fresh_process
from yobx_flatten import ReplayError
from yobx_flatten.runners.open import open_runner

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


def test_a_refused_call_states_the_reason(tmp_path):
    """It stands after the places in OpenVINO's sources, which are the first lines of its message."""
    import openvino
    from openvino import opset13

    given = opset13.parameter([-1, -1], numpy.float32)
    shaped = opset13.reshape(given, opset13.constant(numpy.array([2, 3])), False)
    for node, name in ((given, "given"), (shaped, "shaped")):
        node.output(0).get_tensor().set_names({name})
    openvino.save_model(openvino.Model([shaped], [given], "file"), tmp_path / "file.xml")
    with pytest.raises(ReplayError, match=r"of the case: .*the shape of input data \(5.2\) conflicts with .*\(2.3\)$"):
        open_runner(tmp_path / "file.xml").run({"given": torch.ones(5, 2)})
