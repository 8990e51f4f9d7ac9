"""Threads of devices, and Ctrl-C while the main thread waits: the signals are real ones."""

import concurrent.futures
import contextvars
import ctypes
import itertools
import os
import pathlib
import re
import signal
import threading
import time

import pytest
import torch

from roundpipe_runtime.device.worker import (
    Mailbox,
    Outcome,
    StoppedRun,
    Uninterrupted,
    Worker,
    add_note_once,
    collect,
    error_of,
    is_done,
    on_error,
    wait_for,
)
from tests import fresh_process
from tests.ctrl_c import interrupt_at_line, press

pytestmark = pytest.mark.usefixtures("python_handles_ctrl_c")


@pytest.fixture
def workers():
    made = [Worker("first"), Worker("second")]
    yield made
    for worker in made:
        worker.close()


def test_a_worker_starts_with_its_first_work_and_ends_with_close():
    before = set(threading.enumerate())
    worker = Worker("test")
    assert set(threading.enumerate()) <= before
    names = {worker.submit(lambda: threading.current_thread().name).result() for _ in range(5)}
    assert len(names) == 1
    assert not any(t.daemon for t in threading.enumerate() if t.name in names)
    worker.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError):
        worker.submit(int)


def test_work_runs_in_order(workers):
    found = []
    for number in range(20):
        workers[0].submit(found.append, number)
    workers[0].submit(int).result()
    assert found == list(range(20))


def test_work_sees_the_callers_context(workers):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert workers[0].submit(variable.get).result() == 7


def test_work_computes_with_as_many_threads_as_its_caller(workers):
    """OpenMP itself tells the number, in the first work of a new thread and after each change by the caller."""
    maps = pathlib.Path("/proc/self/maps")
    libraries = re.findall(r"/\S*lib[gi]?omp\S*", maps.read_text(encoding="utf-8") if maps.exists() else "")
    if not libraries:
        pytest.skip("no OpenMP library is found in this process")
    number = ctypes.CDLL(libraries[0]).omp_get_max_threads
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 1, 3):
            torch.set_num_threads(count)
            found.append(workers[0].submit(number).result())
    finally:
        torch.set_num_threads(before)
    assert found == [1, 2, 1, 3]


def test_a_value_is_waited_for_across_threads(workers):
    mailbox = Mailbox()
    result = workers[0].submit(mailbox.take, "x")
    workers[1].submit(mailbox.put, "x", 5)
    assert result.result() == 5
    mailbox.put("x", 6)
    assert mailbox.take("x", keep=True) == mailbox.take("x") == 6


def test_a_failure_ends_a_wait_at_once(workers):
    """Nothing else happens to the mailbox that would wake the thread."""
    mailbox = Mailbox()
    waits = threading.Event()

    def take():
        waits.set()
        with pytest.raises(StoppedRun):
            mailbox.take("never")

    work = workers[0].submit(take)
    assert waits.wait(10)
    time.sleep(0.05)  # it holds the lock until it waits
    mailbox.fail(ValueError())
    try:
        work.result(10)
    finally:
        mailbox.put("never", None)


def test_a_failure_wakes_whoever_waits_and_is_raised_once(workers):
    mailbox = Mailbox()
    error = ValueError("the first")

    def waits():
        with pytest.raises(StoppedRun):
            mailbox.take("never")

    def fails():
        mailbox.fail(error)
        mailbox.fail(ValueError("a later one"))

    with pytest.raises(ValueError, match="the first") as caught:
        collect(mailbox, [workers[0].submit(waits), workers[1].submit(fails)])
    assert caught.value is error
    assert mailbox.error is None


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no such alarms here")
def test_an_alarm_is_raised_when_all_work_has_ended(workers):
    """A handler of another signal than that of Ctrl-C raises in the middle of the wait."""
    ended = threading.Event()
    mailbox = Mailbox()

    def works():
        with pytest.raises(StoppedRun):
            mailbox.take("never")
        time.sleep(0.2)
        ended.set()

    def rings(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, rings)
    try:
        work = workers[0].submit(works)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError):
            collect(mailbox, [work])
        assert ended.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_notes_are_not_repeated():
    error = ValueError()
    add_note_once(error, "here")
    add_note_once(error, "here")
    assert error.__notes__ == ["here"]


def test_a_cleared_board_stays_stopped(workers):
    mailbox = Mailbox()
    mailbox.fail(ValueError())
    mailbox.clear()
    with pytest.raises(StoppedRun):
        mailbox.check()
    with pytest.raises(StoppedRun):
        mailbox.take("never")
    assert mailbox.error is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_work_is_done_after_a_fork():
    code = (
        "import os, signal, sys\n"
        "from roundpipe_runtime.device.worker import Worker\n"
        "worker = Worker('forked')\n"
        "assert worker.submit(pow, 2, 3).result() == 8\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(10)\n"
        "    os._exit(worker.submit(pow, 2, 4).result())\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 16\n"
        "assert worker.submit(pow, 2, 5).result() == 32\n"
    )
    fresh_process.run("-c", code, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_has_every_lock_of_the_process_free():
    code = (
        "import os, signal, threading, torch\n"
        "import roundpipe_runtime.checkpoint.save_and_load\n"
        "from roundpipe_runtime.device import worker\n"
        "from roundpipe_runtime.optim import layer_contents\n"
        "layer = torch.nn.Linear(2, 2)\n"
        "locks = lambda: [*worker._LOCKS, layer_contents.scan([layer])[0].lock]\n"
        "held, over = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    for lock in reversed(locks()):\n"
        "        lock.acquire()\n"
        "    held.set()\n"
        "    over.wait(30)\n"
        "thread = threading.Thread(target=hold)\n"
        "thread.start()\n"
        "held.wait(30)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(10)\n"
        "    os._exit(sum(lock.acquire(timeout=1) for lock in locks()))\n"
        "over.set()\n"
        "thread.join()\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(worker._LOCKS) + 1 == 6\n"
    )
    fresh_process.run("-c", code, timeout=60)


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


def test_an_error_is_stored_or_acted_on():
    seen: list[BaseException] = []
    with Outcome() as outcome, on_error(seen.append):
        raise ZeroDivisionError("division by zero")
    assert seen == [outcome.error]
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    future.set_result(3)
    assert wait_for(future) == 3
