"""Patterns and templates of strangers compute in a process of their own, with limits on time and memory."""

import os
import re
import threading

import pytest

from yobx_flatten.errors import InvalidArgumentError
from yobx_flatten.files.limited import Limited, LimitError, limited

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no limits")


def test_results_and_errors_are_those_of_the_function():
    assert limited(sorted, [3, 1, 2], reverse=True) == [3, 2, 1]
    with pytest.raises(ZeroDivisionError, match="by zero"):
        limited(lambda: 1 // 0)
    with pytest.raises(InvalidArgumentError, match="of ours"):
        limited(_raise, InvalidArgumentError("of ours"))


def test_a_fork_next_to_jax_is_silent():
    """JAX warns of each fork, for its own threads: a template uses none of them."""
    jax = pytest.importorskip("jax")
    jax.numpy.zeros(1).block_until_ready()
    assert limited(sum, [1, 2]) == 3


def _raise(error):
    raise error


class UncopyableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_be_copied_comes_back_as_its_text():
    with pytest.raises(RuntimeError, match="UncopyableError: 1 and 2"):
        limited(lambda: _raise(UncopyableError(1, 2)))


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (re.fullmatch, ["([a-z]+)+!", "a" * 60], "CPU seconds"),
        (lambda: [None for _ in iter(int, 1)], [], "CPU seconds|of memory"),
        (lambda: format(1, "9999999999d"), [], "of memory"),
        (lambda: "x" * 10**8, [], "it returned 100 MB"),
        (lambda: os._exit(0), [], "CPU seconds"),
    ],
    ids=["a pattern", "a list without an end", "a wide number", "a long text", "an end"],
)
def test_what_takes_too_much_is_one_error_and_the_next_call_is_answered(function, given, message):
    calls = Limited(lambda is_good: 5 if is_good else function(*given))
    assert calls(True) == 5
    with pytest.raises(LimitError, match=message):
        calls(False)
    assert calls(True) == 5


def test_threads_are_given_their_own_answers():
    calls, found = Limited(lambda number: number * number), {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: [calls(n) for _ in range(20)]})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [n * n] * 20 for n in range(4)}


def test_the_process_ends_with_the_object_and_has_no_file_of_the_caller(tmp_path):
    """A file that it kept open would stay locked."""
    with open(tmp_path / "file", "wb") as file:
        number = file.fileno()
        calls = Limited(lambda: (os.getpid(), _is_open(number)))
        process, is_open = calls()
    assert process != os.getpid()
    assert not is_open
    assert calls()[0] == process
    del calls
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
