"""A function that hands over values, as an iterator: in turns, to the end or to where it is left."""

import threading

import pytest

from roundpipe_runtime.fine_tune.turns import in_turns


def test_values_come_one_by_one_and_the_function_waits_in_between():
    """It has not begun the second before the first was used."""
    seen = []

    def count(hand):
        for number in range(3):
            seen.append(f"made {number}")
            hand(number)
        seen.append("end")

    for number in in_turns(count):
        seen.append(f"used {number}")
    assert seen == ["made 0", "used 0", "made 1", "used 1", "made 2", "used 2", "end"]


def test_an_error_of_the_function_comes_out_of_the_iterator():
    """After the values before it."""

    def fail(hand):
        hand(1)
        raise ZeroDivisionError

    values = in_turns(fail)
    assert next(values) == 1
    with pytest.raises(ZeroDivisionError):
        next(values)


def test_a_function_that_is_left_unwinds_and_its_thread_ends():
    """Its `finally` has run when `close` returns."""
    seen = []

    def count(hand):
        try:
            hand(1)
            hand(2)
        except Exception:
            seen.append("caught")
        finally:
            seen.append(threading.current_thread())

    values = in_turns(count)
    next(values)
    values.close()
    (thread,) = seen
    assert not thread.is_alive()


def test_an_iterator_that_was_never_asked_starts_no_thread():
    before = set(threading.enumerate())
    values = in_turns(lambda hand: hand(1))
    assert set(threading.enumerate()) <= before
    values.close()
