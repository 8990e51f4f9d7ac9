"""What is done where a block fails with an error of any class."""

import pytest

from yobx_flatten.errors.failures import noted_on_failure, raised_as, result_or, undone_on_failure


def raising(error):
    def run():
        raise error

    return run


def test_an_error_of_any_class_has_a_result():

    class NobodysError(Exception):
        pass

    assert result_or(raising(NobodysError("why")), lambda error: f"raised {error}") == "raised why"
    assert result_or(lambda: "returned", lambda error: "raised") == "returned"


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_the_end_of_a_process_is_not_a_result(ending):
    with pytest.raises(ending):
        result_or(raising(ending()), lambda error: None)
    with pytest.raises(ending), raised_as(lambda error: ValueError("ours")):
        raising(ending())()


def test_an_error_of_ours_has_the_other_one_as_its_cause():
    cause = KeyError("theirs")
    with pytest.raises(ValueError, match="ours") as found, raised_as(lambda error: ValueError(f"ours: {error}")):
        raising(cause)()
    assert found.value.__cause__ is cause


def test_named_classes_come_out_as_they_are():
    own = KeyError("known")
    with pytest.raises(KeyError) as found, raised_as(lambda error: ValueError("ours"), LookupError):
        raising(own)()
    assert found.value is own


def test_an_error_that_has_no_better_words_comes_out_as_it_is():
    theirs = KeyError("theirs")
    with pytest.raises(KeyError) as found, raised_as(lambda error: None):
        raising(theirs)()
    assert found.value is theirs
    assert found.value.__cause__ is None


def test_a_panic_of_a_library_in_rust_is_an_error():
    """Its class is not an `Exception`; tokenizers and safetensors raise it for files that are damaged."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})("damaged")
    with (
        pytest.raises(ValueError, match="ours: damaged") as found,
        raised_as(lambda error: ValueError(f"ours: {error}")),
    ):
        raising(panic)()
    assert found.value.__cause__ is panic


def test_a_note_is_added_to_the_error_itself():
    theirs, ending = KeyError("theirs"), KeyboardInterrupt()
    with pytest.raises(KeyError) as found, noted_on_failure(lambda error: f"of {type(error).__name__}"):
        raising(theirs)()
    assert found.value is theirs
    assert theirs.__notes__ == ["of KeyError"]
    with pytest.raises(KeyboardInterrupt), noted_on_failure(lambda error: "a note"):
        raising(ending)()
    assert not hasattr(ending, "__notes__")


@pytest.mark.parametrize("ending", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_fails_is_undone_once(ending):
    undone = []
    with undone_on_failure(lambda: undone.append(0)):
        pass
    with pytest.raises(ending), undone_on_failure(lambda: undone.append(1)):
        raising(ending())()
    assert undone == [1]
