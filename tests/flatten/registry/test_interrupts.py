"""An exception from a signal handler, before any line of entering or leaving a block, leaves everything as found."""

import itertools
import signal
import sys
import threading

import pytest
import torch.export._trace
import torch.fx._pytree as fx_pytree
import torch.utils._pytree as pytree
from torch.export import ExportedProgram

from tests.ctrl_c import interrupt_at_line, press
from yobx_flatten import register_flattening_functions
from yobx_flatten.core.interrupts import DeferredSignals
from yobx_flatten.registry.claims import REGISTRY
from yobx_flatten.registry.patches import LOCK
from yobx_flatten.trace.trace_settings import OPEN

pytestmark = pytest.mark.usefixtures("python_handles_ctrl_c")
STEP = 41  # by hand, every line was tried


# Lines together.


def test_handlers_are_called_at_the_end():
    """Every line of the outer block has run. The handlers that raise do so behind it. All handlers are called."""
    done = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: done.append("alarm"))

    def block():
        with DeferredSignals():
            with DeferredSignals():
                press()
                signal.raise_signal(signal.SIGALRM)
            done.append("last line")

    try:
        with pytest.raises(KeyboardInterrupt):
            block()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == ["last line", "alarm"]


def test_other_threads_leave_handlers_alone():
    """Python calls handlers in the main thread only."""
    found = []

    def work():
        with DeferredSignals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize("first", range(12))
def test_handlers_are_back_whatever_line_was_interrupted(first):

    def block():
        with DeferredSignals():
            pass

    for number in itertools.count(first, 12):
        try:
            pressed = interrupt_at_line(number, block, files=("core/interrupts.py",))
        except KeyboardInterrupt:
            pressed = True
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not pressed:
            break


# The block.


def state():
    return (
        list(pytree.SUPPORTED_NODES.items()),
        list(pytree.SUPPORTED_SERIALIZED_TYPES.items()),
        list(pytree._cxx_pytree_pending_imports),
        list(fx_pytree.SUPPORTED_NODES.items()),
        dict(REGISTRY._slots),
        list(OPEN),
        list(sys.meta_path),
        vars(ExportedProgram)["__init__"],
        vars(torch.export._trace)["_export"],
        LOCK._is_owned(),
    )


def enter_and_leave():
    with register_flattening_functions(patch_transformers=True):
        pass


@pytest.mark.parametrize(
    "files", [("scopes.py", "core/interrupts.py"), ("",)], ids=["the block's own lines", "all lines"]
)
def test_an_interruption_before_any_line_leaves_everything_as_found(files):
    """Before every line of the block's own; of those that it calls, before one in many."""
    enter_and_leave()
    before, interrupted = state(), 0
    step = STEP if files == ("",) else 1
    for number in itertools.count(0, step):
        try:
            pressed = interrupt_at_line(number, enter_and_leave, files=files)
        except KeyboardInterrupt:
            pressed = True
            interrupted += 1
        assert state() == before, f"line {number}"
        if not pressed:
            break
    assert interrupted > 30
