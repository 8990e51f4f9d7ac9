"""Ctrl-C and blocks that it does not cut in two. The signals are real ones."""

import concurrent.futures
import itertools
import signal
import threading

import pytest

from roundpipe_runtime.device.worker import Uninterrupted, error_of, is_done, wait_for
from tests.ctrl_c import interrupt_at_line, press

pytestmark = pytest.mark.usefixtures("python_handles_ctrl_c")


def test_the_interruption_comes_at_the_end():
    done = []

    def block():
        with Uninterrupted():
            press()
            done.append("first")
            press()
            done.append("second")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["first", "second"]


def test_without_a_signal_nothing_is_raised():
    with Uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_block_inside_of_another_one_is_not_its_end():
    done = []

    def block():
        with Uninterrupted():
            with Uninterrupted():
                press()
            done.append("behind the inner block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["behind the inner block"]


def test_a_block_that_can_stop_is_told_once():
    told = []

    def block():
        with Uninterrupted(stop=told.append):
            press()
            assert len(told) == 1
            press()

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert told == [caught.value]


def test_the_error_of_the_block_comes_out_as_it_is():
    """A block that raises what `stop` was given raises it once."""
    told = []

    def block():
        with Uninterrupted(stop=told.append):
            press()
            raise told[0]

    with pytest.raises(KeyboardInterrupt) as caught:
        block()
    assert caught.value is told[0]
    assert caught.value.__context__ is None


def test_a_handler_that_does_not_raise_stops_nothing():
    noted, told = [], []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    with Uninterrupted(stop=told.append):
        press()
        assert noted == [signal.SIGINT]
    with Uninterrupted():
        press()
    assert noted == [signal.SIGINT] * 2
    assert told == []
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_leave_the_handler_alone():
    """Only the main thread gets KeyboardInterrupt, and only it may set a handler."""
    found = []

    def work():
        with Uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_wait_ends_with_the_interruption_at_every_line():
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        for number in itertools.count():
            go_on = threading.Event()
            future = threads.submit(go_on.wait, 60)
            threading.Timer(0.01, go_on.set).start()
            try:
                pressed = interrupt_at_line(number, lambda future=future: wait_for(future))
            except KeyboardInterrupt:
                pressed = True
            done, _ = concurrent.futures.wait([threads.submit(future.result)], timeout=20)
            assert done
            if not pressed:
                break
    assert number > 5


def test_a_wait_that_is_interrupted_does_not_end_what_it_waits_for():
    go_on = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(go_on.wait, 60)
        threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            wait_for(future)
        assert not future.done()
        go_on.set()
        assert wait_for(future) is True


def test_the_error_that_is_waited_for_is_raised():
    future = concurrent.futures.Future()
    future.set_exception(OSError("full"))
    with pytest.raises(OSError, match="full"):
        wait_for(future)
    with concurrent.futures.ThreadPoolExecutor(1) as threads, pytest.raises(OSError, match="full"):
        threads.submit(wait_for, future).result()


class InterruptedLock:
    """A lock in which Ctrl-C comes when it has just been taken: before the block that gives it back begins."""

    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        self.lock.__enter__()
        press()

    def __exit__(self, *error):
        self.lock.__exit__(*error)


@pytest.mark.parametrize("asked", [is_done, error_of])
def test_a_question_that_is_interrupted_leaves_no_lock(asked):
    """The other thread can end its work; `Future.done` itself keeps the lock."""
    future = concurrent.futures.Future()
    lock = future._condition
    future._condition = InterruptedLock(lock)
    with pytest.raises(KeyboardInterrupt):
        asked(future)
    future._condition = lock
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(lock.acquire, timeout=5).result()
