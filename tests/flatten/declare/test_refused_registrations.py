"""`register_class_flattening` refuses bad input by name, and a registration that fails leaves nothing."""

import gc
import weakref

import pytest
import torch
import torch.utils._pytree as pytree

from tests.flatten.pair import FUNCTIONS, Pair, flatten, flatten_with_keys, unflatten
from tests.registry_snapshot import changes_since
from yobx_flatten import register_class_flattening, unregister_cache_flattening, unregister_class_flattening
from yobx_flatten.errors import AlreadyRegisteredError, InvalidRegistrationError, NotRegisteredError, RoundTripError


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "expected a class as first argument, found None.\n    register_class_flattening(MyClass, ...)"),
        (Pair(1, 2), "the Pair <tests.flatten.pair.Pair"),
        ("Pair", "found the str 'Pair'. Pass the class, not its name."),
        (list[int], "expected a class as first argument"),
    ],
    ids=["None", "an instance", "a name", "an alias"],
)
def test_what_is_no_class_is_refused(before, target, message):
    with pytest.raises(InvalidRegistrationError) as caught:
        register_class_flattening(target, *FUNCTIONS)
    assert "register_class_flattening: expected a class" in str(caught.value)
    assert message in str(caught.value)
    with pytest.raises(InvalidRegistrationError, match=r"\n    unregister_class_flattening\(MyClass, \.\.\.\)"):
        unregister_class_flattening("Pair")
    assert changes_since(before) == []


@pytest.mark.parametrize(
    ("position", "given", "said"),
    [
        (0, "not a function", r"f_flatten must be a function \(obj\), found the str 'not a function'\."),
        (1, None, r"f_unflatten must be a function \(children, static\), found None\."),
        (2, "not a function", r"f_flatten_with_keys must be a function \(obj\), found the str 'not a function'\."),
        (0, lambda pair, other: ([], None), r"f_flatten is called as (.|\n)*"),
        (1, lambda children, static, *, needed: Pair(*children), r"f_unflatten is called as (.|\n)*"),
        (2, lambda: ([], None), r"f_flatten_with_keys is called as (.|\n)*"),
    ],
)
def test_what_cannot_be_called_as_it_will_be_is_refused(before, position, given, said):
    functions = list(FUNCTIONS)
    functions[position] = given
    with pytest.raises(InvalidRegistrationError, match=rf"^register_class_flattening\(Pair\): {said}$"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


@pytest.mark.parametrize("undo", [None, {Pair: True}], ids=["None", "a dict"])
def test_only_what_a_registration_returned_can_be_undone(registered, before, undo):
    with pytest.raises(InvalidRegistrationError, match=r"\n    undo = register_cache_flattening\("):
        unregister_cache_flattening(undo)
    assert changes_since(before) == []


def test_a_registration_of_others_stays(registered_by_others, before):
    assert register_class_flattening(Pair, *FUNCTIONS) is False
    with pytest.raises(NotRegisteredError, match=r"Pair was registered by other code .* It stays registered"):
        unregister_class_flattening(Pair)
    assert changes_since(before) == []


@pytest.mark.parametrize(
    "functions", [(lambda pair: ([], None), unflatten), (flatten, unflatten, lambda pair: ([], None))]
)
def test_other_functions_are_refused(registered, before, functions):
    with pytest.raises(AlreadyRegisteredError, match=r"pair\.Pair is already .*\n    unregister_class_flattening"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


def test_a_class_that_came_and_went_is_not_kept_alive():
    local = type("Local", (Pair,), {})
    reference = weakref.ref(local)
    register_class_flattening(local, flatten, lambda children, static: None, None)
    pytree.tree_leaves(local(1, 2))
    unregister_class_flattening(local)
    del local
    gc.collect()
    assert reference() is None


def sample():
    return Pair(torch.zeros(2), torch.ones(3))


@pytest.mark.parametrize("f_check", [sample, lambda: None, lambda: pytree.tree_leaves(Pair(1, 2)) == [1, 2]])
def test_a_check_that_passes_registers_and_is_run_for_a_new_class_only(f_check):
    """It may use the registration."""
    assert register_class_flattening(Pair, *FUNCTIONS, f_check=f_check) is True
    assert register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False) is False
    unregister_class_flattening(Pair)


class CheckFailedError(Exception):
    pass


def raise_check_failed(*args):
    raise CheckFailedError


@pytest.mark.parametrize("position", range(4))
def test_a_function_that_raises_undoes_the_registration(before, position):
    """The user's own exception arrives, and nothing is registered. The fourth function is `f_check` itself."""
    functions = [*FUNCTIONS, sample]
    functions[position] = raise_check_failed
    with pytest.raises(CheckFailedError):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


def unflatten_and_mark(children, static):
    pair = Pair(*children)
    pair.rebuilt = True
    return pair


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            (lambda pair: [pair.a, pair.b], unflatten, None),
            r"Pair: f_flatten must return a pair \(list of children, static part\), found list of 2",
        ),
        ((flatten, unflatten, flatten), r"Pair: f_flatten_with_keys must return \(list of \(key, child\) pairs"),
        (
            (flatten, unflatten, lambda pair: (flatten_with_keys(pair)[0][:1], None)),
            "Pair: f_flatten and f_flatten_with_keys disagree.\n.* 2 children, static None\n.* 1 children, static None",
        ),
        (
            (flatten, unflatten, lambda pair: (flatten_with_keys(pair)[0], "b")),
            "disagree.\n.* 2 children, static None\n.* 2 children, static 'b'",
        ),
        ((flatten, lambda children, static: children, None), "Pair: f_unflatten returned a list instead of a Pair"),
        (
            (flatten, lambda children, static: Pair(*children[::-1]), None),
            "Pair: the rebuilt object has different children than the original",
        ),
        (
            (flatten, lambda children, static: Pair(*[child.clone() for child in children]), None),
            "Pair: the rebuilt object has different children .* and not copy them",
        ),
        (
            (lambda pair: ([pair.a, pair.b], hasattr(pair, "rebuilt")), unflatten_and_mark, None),
            "Pair: the rebuilt object has a different static part than the original.\n.* False\n.* True",
        ),
    ],
)
def test_a_wrong_function_is_found_and_undone(before, functions, message):
    with pytest.raises(RoundTripError, match=message):
        register_class_flattening(Pair, *functions, f_check=sample)
    with pytest.raises(RoundTripError, match="f_check of Pair returned False"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False)
    assert changes_since(before) == []
