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

from roundpipe_runtime.device import worker as module
from roundpipe_runtime.device.worker import Mailbox, StoppedRun, Uninterrupted, Worker, add_note_once, collect, wait_for
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


def test_work_runs_in_order_and_sees_the_callers_context(workers):
    variable, found = contextvars.ContextVar("variable", default=0), []
    for number in range(20):
        variable.set(number)
        workers[0].submit(lambda: found.append(variable.get()))
    workers[0].submit(int).result()
    assert found == list(range(20))


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
    """Nothing else happens to the mailbox that would wake the thread; the first failure is raised, once."""
    mailbox, error, waits = Mailbox(), ValueError("the first"), threading.Event()

    def take():
        waits.set()
        with pytest.raises(StoppedRun):
            mailbox.take("never")

    work = workers[0].submit(take)
    assert waits.wait(10)
    time.sleep(0.05)  # it holds the lock until it waits
    mailbox.fail(error)
    mailbox.fail(ValueError("a later one"))
    try:
        work.result(10)
    finally:
        mailbox.put("never", None)
    with pytest.raises(ValueError, match="the first") as caught:
        collect(mailbox, [work])
    assert caught.value is error
    assert mailbox.error is None
    with pytest.raises(StoppedRun):
        mailbox.check()  # it stays stopped


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_work_is_done_after_a_fork():
    code = """
import os, signal, sys
from roundpipe_runtime.device.worker import Worker
worker = Worker('forked')
assert worker.submit(pow, 2, 3).result() == 8
child = os.fork()
if child == 0:
    signal.alarm(10)
    os._exit(worker.submit(pow, 2, 4).result())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 16
assert worker.submit(pow, 2, 5).result() == 32
"""
    fresh_process.run("-c", code, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_has_every_lock_of_the_process_free():
    code = """
import os, signal, threading, torch
import roundpipe_runtime.checkpoint.save_and_load
from roundpipe_runtime.device import worker
from roundpipe_runtime.optim import layer_contents
layer = torch.nn.Linear(2, 2)
locks = lambda: [*worker._LOCKS, layer_contents.scan([layer])[0].lock]
held, over = threading.Event(), threading.Event()
def hold():
    for lock in reversed(locks()):
        lock.acquire()
    held.set()
    over.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(10)
    os._exit(sum(lock.acquire(timeout=1) for lock in locks()))
over.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(worker._LOCKS) + 1 == 6
"""
    fresh_process.run("-c", code, timeout=60)


def test_the_interruption_comes_at_the_end_of_the_outermost_block():
    """A block that can stop is told once; one that raises what it was told raises it once."""
    done, told = [], []

    def block():
        with Uninterrupted():
            with Uninterrupted():
                press()
                done.append("first")
                press()
            done.append("behind the inner block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["first", "behind the inner block"]

    def stopped(raises):
        with Uninterrupted(stop=told.append):
            press()
            assert len(told) == 1
            if raises:
                raise told[0]
            press()

    for raises in (False, True):
        told.clear()
        with pytest.raises(KeyboardInterrupt) as caught:
            stopped(raises)
        assert told == [caught.value]
        assert caught.value.__context__ is None
    with Uninterrupted():
        pass  # without a signal nothing is raised
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_handler_that_does_not_raise_stops_nothing_and_other_threads_leave_it_alone(workers):
    """Only the main thread gets KeyboardInterrupt, and only it may set a handler."""
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

    def handler():
        with Uninterrupted():
            return signal.getsignal(signal.SIGINT)

    assert workers[0].submit(handler).result() is signal.default_int_handler


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
    go_on = threading.Event()  # what it waits for does not end
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(go_on.wait, 60)
        threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            wait_for(future)
        assert not future.done()
        go_on.set()
        assert wait_for(future) is True


@pytest.mark.parametrize("asked", [module.is_done, module.error_of])
def test_a_question_that_is_interrupted_leaves_no_lock(asked):
    """The other thread can end its work; `Future.done` itself keeps the lock."""
    future = concurrent.futures.Future()
    lock = future._condition

    class InterruptedLock:
        """A lock in which Ctrl-C comes when it has just been taken: before the block that gives it back begins."""

        def __exit__(self, *error):
            lock.__exit__(*error)

        def __enter__(self):
            lock.__enter__()
            press()

    future._condition = InterruptedLock()
    with pytest.raises(KeyboardInterrupt):
        asked(future)
    future._condition = lock
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(lock.acquire, timeout=5).result()


def test_an_error_is_stored_or_acted_on_and_raised_by_a_wait():
    seen: list[BaseException] = []
    with module.Outcome() as outcome, module.on_error(seen.append):
        raise ZeroDivisionError("division by zero")
    assert seen == [outcome.error]
    add_note_once(outcome.error, "here")
    add_note_once(outcome.error, "here")
    assert outcome.error.__notes__ == ["here"]
    future = concurrent.futures.Future()
    future.set_exception(OSError("full"))
    with pytest.raises(OSError, match="full"):
        wait_for(future)
    with concurrent.futures.ThreadPoolExecutor(1) as threads, pytest.raises(OSError, match="full"):
        threads.submit(wait_for, future).result()
