"""Processes that are forked while other threads are in a block: no child waits for a lock of a thread it has not."""

import contextlib
import os
import threading
import time

import pytest
import torch
import torch.utils._pytree as pytree
from transformers import DynamicCache

from tests.flatten.declare.blocks import block
from tests.flatten.pair import Pair
from yobx_flatten import register_class_flattening, unregister_class_flattening
from yobx_flatten.trace.trace_settings import PLAIN_ATTENTION

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded:DeprecationWarning"  # what these tests are about
    ),
    # JAX, where an earlier test of the process imported it, warns of every fork; nothing of JAX runs in these children
    pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning"),
]
PATIENCE = 30


def status_of_child(work):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(1)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 2


@contextlib.contextmanager
def meanwhile(work, threads=2):
    over, errors = threading.Event(), []

    def repeat():
        try:
            while not over.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=repeat) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join()
    assert errors == []


def enter_and_leave():
    with block():
        pass


def use_the_block():
    with block():
        known = pytree.tree_leaves(DynamicCache()) == []
        register_class_flattening(Pair, lambda p: ([p.a, p.b], None), lambda c, s: Pair(*c), None)
        found = pytree.tree_leaves(Pair(1, 2)) == [1, 2]
        unregister_class_flattening(Pair)
    return known and found


def test_children_of_a_process_whose_threads_enter_blocks_can_enter_them():
    """Without a lock that survives the fork, all of 24 hung; all tables of torch know a class, or none does."""
    from torch.fx._pytree import SUPPORTED_NODES as FX_NODES

    def work():
        whole = (DynamicCache in pytree.SUPPORTED_NODES) == (DynamicCache in FX_NODES)
        return whole and use_the_block()

    # Python itself leaves a child the lock of a module that another thread was importing: here, all are imported
    enter_and_leave()
    with meanwhile(enter_and_leave):
        assert [status_of_child(work) for _ in range(24)] == [0] * 24


class InTheBlock(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with block():
            return pytree.tree_leaves([torch.tensor(index), DynamicCache()])[0]


def test_workers_of_a_data_loader_start_while_an_export_runs():

    def export():
        net = torch.nn.Linear(3, 3)
        with block():
            torch.export.export(net, (torch.ones(2, 3),))

    export()
    with meanwhile(export, threads=1):
        for _ in range(4):
            loader = torch.utils.data.DataLoader(
                InTheBlock(), num_workers=2, multiprocessing_context="fork", timeout=PATIENCE
            )
            assert sorted(int(item) for item in loader) == list(range(8))


def test_a_trace_of_another_thread_is_over_in_a_child():
    """The kernels of attention, which a trace chooses for the process, are those that were found."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    found, entered, over = _cur_sdpa_kernel_backends(), threading.Event(), threading.Event()

    def trace():
        with PLAIN_ATTENTION:
            entered.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=trace)
    thread.start()
    assert entered.wait(PATIENCE)
    status = status_of_child(lambda: _cur_sdpa_kernel_backends() == found)
    over.set()
    thread.join()
    assert (status, _cur_sdpa_kernel_backends()) == (0, found)
    with PLAIN_ATTENTION:  # the child of a thread that traces goes on tracing
        assert status_of_child(lambda: len(_cur_sdpa_kernel_backends()) == 1) == 0
    assert _cur_sdpa_kernel_backends() == found
