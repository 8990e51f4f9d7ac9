"""`f_check`: a wrong function is found when it is registered, and the registration is undone."""

import pytest
import torch
import torch.utils._pytree as pytree

from tests.flatten.pair import FUNCTIONS, Pair, flatten, flatten_with_keys, unflatten
from tests.registry_snapshot import changes_since
from yobx_flatten import register_class_flattening, unregister_class_flattening
from yobx_flatten.errors import RoundTripError


def sample():
    return Pair(torch.zeros(2), torch.ones(3))


@pytest.mark.parametrize("f_check", [sample, lambda: None, lambda: True], ids=["instance", "None", "True"])
def test_a_check_that_passes_registers(f_check):
    """An instance that comes back, `None` and `True` mean that all is well."""
    done = register_class_flattening(Pair, *FUNCTIONS, f_check=f_check)
    unregister_class_flattening(Pair)
    assert done is True


def test_a_check_may_use_the_registration():
    """The class is registered while its check runs."""
    seen = []

    def f_check():
        seen.extend(pytree.tree_leaves(Pair(1, 2)))

    register_class_flattening(Pair, *FUNCTIONS, f_check)
    unregister_class_flattening(Pair)
    assert seen == [1, 2]


def test_a_check_is_not_run_for_a_class_that_is_registered(registered):
    """Only the call that registers checks."""
    assert register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False) is False


class CheckFailedError(Exception):
    pass


def raise_check_failed(*args):
    raise CheckFailedError


def test_a_check_that_returns_false_undoes_the_registration(before):
    """`False` is a failed check."""
    with pytest.raises(RoundTripError, match="f_check of Pair returned False"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False)
    assert changes_since(before) == []


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
        pytest.param(
            (lambda pair: [pair.a, pair.b], unflatten, None),
            r"Pair: f_flatten must return a pair \(list of children, static part\), found list of 2",
            id="no static part",
        ),
        pytest.param(
            (flatten, unflatten, flatten),
            r"Pair: f_flatten_with_keys must return \(list of \(key, child\) pairs",
            id="no keys",
        ),
        pytest.param(
            (flatten, unflatten, lambda pair: (flatten_with_keys(pair)[0][:1], None)),
            "Pair: f_flatten and f_flatten_with_keys disagree.\n.* 2 children, static None\n.* 1 children, static None",
            id="fewer children with keys",
        ),
        pytest.param(
            (flatten, unflatten, lambda pair: (flatten_with_keys(pair)[0], "b")),
            "disagree.\n.* 2 children, static None\n.* 2 children, static 'b'",
            id="another static part with keys",
        ),
        pytest.param(
            (flatten, lambda children, static: children, None),
            "Pair: f_unflatten returned a list instead of a Pair",
            id="another class comes back",
        ),
        pytest.param(
            (flatten, lambda children, static: Pair(*children[::-1]), None),
            "Pair: the rebuilt object has different children than the original",
            id="another order",
        ),
        pytest.param(
            (flatten, lambda children, static: Pair(*[child.clone() for child in children]), None),
            "Pair: the rebuilt object has different children .* and not copy them",
            id="copies",
        ),
        pytest.param(
            (lambda pair: ([pair.a, pair.b], hasattr(pair, "rebuilt")), unflatten_and_mark, None),
            "Pair: the rebuilt object has a different static part than the original.\n.* False\n.* True",
            id="another static part",
        ),
    ],
)
def test_a_wrong_function_is_found_and_undone(before, functions, message):
    """The message names the class, the function and the difference; nothing is registered."""
    with pytest.raises(RoundTripError, match=message):
        register_class_flattening(Pair, *functions, f_check=sample)
    assert changes_since(before) == []
