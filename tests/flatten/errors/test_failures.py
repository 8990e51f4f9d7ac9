"""What is done where a block fails with an error of any class."""

import pytest

from yobx_flatten.errors.failures import raised_as, result_or, undone_on_failure


def raising(error):
    def run():
        raise error

    return run


def test_an_error_of_any_class_has_a_result():
    """A function of others may raise a class that nobody knows; the caller decides what that means."""

    class NobodysError(Exception):
        pass

    assert result_or(raising(NobodysError("why")), lambda error: f"raised {error}") == "raised why"
    assert result_or(lambda: "returned", lambda error: "raised") == "returned"


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_the_end_of_a_process_is_not_a_result(ending):
    """Ctrl-C and the end of the process come out of both ways to catch errors."""
    with pytest.raises(ending):
        result_or(raising(ending()), lambda error: None)
    with pytest.raises(ending), raised_as(lambda error: ValueError("ours")):
        raising(ending())()


def test_an_error_of_ours_has_the_other_one_as_its_cause():
    """A traceback shows both."""
    cause = KeyError("theirs")
    with pytest.raises(ValueError, match="ours") as found, raised_as(lambda error: ValueError(f"ours: {error}")):
        raising(cause)()
    assert found.value.__cause__ is cause


def test_named_classes_come_out_as_they_are():
    """What states the place already is not wrapped again."""
    own = KeyError("known")
    with pytest.raises(KeyError) as found, raised_as(lambda error: ValueError("ours"), LookupError):
        raising(own)()
    assert found.value is own


@pytest.mark.parametrize("ending", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_is_undone_once(ending):
    """Also after Ctrl-C; the error comes out."""
    undone = []
    with pytest.raises(ending), undone_on_failure(lambda: undone.append(1)):
        raising(ending())()
    assert undone == [1]


def test_a_block_that_ends_is_not_undone():
    """There is nothing to bring back."""
    undone = []
    with undone_on_failure(lambda: undone.append(1)):
        pass
    assert undone == []
