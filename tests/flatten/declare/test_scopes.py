"""The documented functions do what their documents say, and refuse bad input by name, with nothing changed."""

import dataclasses
import gc
import importlib.util
import logging
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from tests import registry_snapshot
from tests.flatten import other_libraries
from yobx_flatten import (
    Undo,
    make_flattening_function_for_dataclass,
    register_cache_flattening,
    register_class_flattening,
    register_flattening_functions,
    unregister_cache_flattening,
    unregister_class_flattening,
)
from yobx_flatten.errors import (
    AlreadyRegisteredError,
    FlattenError,
    InvalidRegistrationError,
    MissingDependencyError,
    NotRegisteredError,
    RoundTripError,
)

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Pair:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


def flatten(pair):
    return [pair.a, pair.b], None


def unflatten(children, static):
    return Pair(*children)


def flatten_with_keys(pair):
    return [(pytree.GetAttrKey("a"), pair.a), (pytree.GetAttrKey("b"), pair.b)], None


FUNCTIONS = (flatten, unflatten, flatten_with_keys)


def sample():
    return Pair(torch.zeros(2), torch.ones(3))


def changes_since(before):
    return registry_snapshot.differences(before, registry_snapshot.take())


@pytest.fixture
def before():
    return registry_snapshot.take()


@pytest.fixture
def registered():
    """`Pair`, registered by the user."""
    register_class_flattening(Pair, *FUNCTIONS)
    yield Pair
    unregister_class_flattening(Pair)


@pytest.fixture
def registered_by_others():
    with other_libraries.forgotten_afterwards(Pair):
        other_libraries.register(Pair, name="theirs")
        yield Pair


# The examples of the documents, with the import line changed.

CLASS_EXAMPLE = """
import dataclasses
from typing import Any, List, Tuple
import torch
from yobx_flatten import (
    register_class_flattening,
    unregister_class_flattening,
)


# A minimal dict-like container.
class MyOutput(dict):
    \"\"\"Simple dict subclass that can hold named tensors.\"\"\"


def flatten_my_output(obj):
    keys = list(obj.keys())
    return [obj[k] for k in keys], keys


def flatten_with_keys_my_output(obj):
    keys = list(obj.keys())
    values = [obj[k] for k in keys]
    return [(torch.utils._pytree.MappingKey(k), v) for k, v in zip(keys, values)], keys


def unflatten_my_output(values, context, output_type=None):
    return MyOutput(zip(context, values))


register_class_flattening(
    MyOutput,
    flatten_my_output,
    unflatten_my_output,
    flatten_with_keys_my_output,
)

# Flatten and unflatten a MyOutput object.
obj = MyOutput(a=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0]))
flat, spec = torch.utils._pytree.tree_flatten(obj)
print("flat tensors:", [t.tolist() for t in flat])

restored = torch.utils._pytree.tree_unflatten(flat, spec)
print("restored keys:", list(restored.keys()))

# Clean up so that subsequent runs of the docs are not affected.
unregister_class_flattening(MyOutput)
"""

GENERATED_EXAMPLE = """
import torch
from yobx_flatten import (
    make_flattening_function_for_dataclass,
    register_class_flattening,
    unregister_class_flattening,
)


class HiddenState(dict):
    \"\"\"Dict-like container for a transformer hidden state.\"\"\"


flatten_fn, flatten_with_keys_fn, unflatten_fn = make_flattening_function_for_dataclass(
    HiddenState, set()
)

print("generated function names:")
print(" ", flatten_fn.__name__)
print(" ", flatten_with_keys_fn.__name__)
print(" ", unflatten_fn.__name__)

register_class_flattening(HiddenState, flatten_fn, unflatten_fn, flatten_with_keys_fn)

obj = HiddenState(last_hidden_state=torch.zeros(2, 3))
flat, spec = torch.utils._pytree.tree_flatten(obj)
print("flat:", [t.shape for t in flat])

unregister_class_flattening(HiddenState)
"""

LAYERS_EXAMPLE = """
import torch
import transformers
from yobx_flatten.trees.describe import string_type
from yobx_flatten.huggingface.builders import make_dynamic_cache
from yobx_flatten.huggingface.caches.functions import (
    flatten_dynamic_cache,
    unflatten_dynamic_cache,
)

# DynamicSlidingWindowLayer was added in transformers >= 4.50.
if not hasattr(transformers.cache_utils, "DynamicSlidingWindowLayer"):
    print("DynamicSlidingWindowLayer not available, skipping example.")
else:
    bsize, nheads, slen, dim = 2, 4, 3, 7
    sliding_window = slen  # sliding_window must be >= the sequence length

    # Build a DynamicCache with two different layer types.
    cache = make_dynamic_cache(
        [
            (
                torch.randn(bsize, nheads, slen, dim),
                torch.randn(bsize, nheads, slen, dim),
            ),
            (
                torch.randn(bsize, nheads, slen, dim),
                torch.randn(bsize, nheads, slen, dim),
            ),
        ],
        cls_layers=[
            transformers.cache_utils.DynamicLayer,
            transformers.cache_utils.DynamicSlidingWindowLayer,
        ],
        cls_kwargs=[{}, {"sliding_window": sliding_window}],
    )
    print("cache:", string_type(cache, with_shape=True))

    # Flatten (serialize) the cache — the context encodes each layer's type.
    flat, context = flatten_dynamic_cache(cache)
    print("context keys:", context)

    # Unflatten (deserialize) the cache — layer types are restored from the context.
    rebuilt = unflatten_dynamic_cache(flat, context)
    print("layer types:", [type(layer).__name__ for layer in rebuilt.layers])
    print("sliding_window:", rebuilt.layers[1].sliding_window)
"""


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        pytest.param(
            CLASS_EXAMPLE,
            "flat tensors: [[1.0, 2.0], [3.0]]\nrestored keys: ['a', 'b']\n",
            id="register_class_flattening",
        ),
        pytest.param(
            GENERATED_EXAMPLE,
            "generated function names:\n"
            "  flatten_hidden_state\n"
            "  flatten_with_keys_hidden_state\n"
            "  unflatten_hidden_state\n"
            "flat: [torch.Size([2, 3])]\n",
            id="make_flattening_function_for_dataclass",
        ),
        pytest.param(
            LAYERS_EXAMPLE,
            "cache: DynamicCache(DynamicLayer(T1s2x4x3x7, T1s2x4x3x7), "
            "DynamicSlidingWindowLayer(T1s2x4x3x7, T1s2x4x3x7))\n"
            "context keys: ['key_D_0', 'value_D_0', 'key_W3_1', 'value_W3_1']\n"
            "layer types: ['DynamicLayer', 'DynamicSlidingWindowLayer']\n"
            "sliding_window: 3\n",
            id="layers of a DynamicCache",
            marks=needs_transformers,
        ),
    ],
)
def test_an_example_of_the_documents_prints_what_they_print(example, printed, capsys):
    """The documents' code runs as it stands there."""
    exec(compile(example, "<document>", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out == printed


# register_class_flattening


def test_a_registered_class_comes_apart(registered):
    """torch's pytree takes an instance apart, with keys, and puts it together."""
    leaves, spec = pytree.tree_flatten(Pair(1, 2))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(Pair(1, 2))]
    rebuilt = pytree.tree_unflatten([3, 4], spec)
    assert (leaves, paths, type(rebuilt), rebuilt.a, rebuilt.b) == ([1, 2], [".a", ".b"], Pair, 3, 4)


def test_a_registered_class_comes_apart_in_the_cpp_pytree(registered):
    """torch's C++ pytree sees the same leaves."""
    cxx_pytree = pytest.importorskip("torch.utils._cxx_pytree")
    assert cxx_pytree.tree_leaves({"pair": Pair(1, 2)}) == [1, 2]


def test_children_without_keys_are_numbered():
    """`None` for the keyed function gives key paths by position."""
    register_class_flattening(Pair, flatten, unflatten, None)
    try:
        paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(Pair(1, 2))]
    finally:
        unregister_class_flattening(Pair)
    assert paths == ["[0]", "[1]"]


def test_the_first_registration_returns_true(before):
    """`True` says that this call registered the class."""
    done = register_class_flattening(Pair, *FUNCTIONS)
    unregister_class_flattening(Pair)
    assert done is True
    assert changes_since(before) == []


def test_a_second_registration_with_the_same_functions_returns_false(registered):
    """`False` says that nothing had to be done; one unregistration is then enough."""
    assert register_class_flattening(Pair, *FUNCTIONS) is False


def test_a_registration_of_others_returns_false_and_stays(registered_by_others, before):
    """A class that somebody registered through torch keeps her functions."""
    assert register_class_flattening(Pair, *FUNCTIONS) is False
    assert changes_since(before) == []


def test_other_functions_are_refused(registered, before):
    """A class registered with other functions is named, with the line to type; the first registration stays."""
    with pytest.raises(
        AlreadyRegisteredError, match=r"test_scopes\.Pair is already .*\n    unregister_class_flattening"
    ):
        register_class_flattening(Pair, lambda pair: ([], None), unflatten, None)
    assert changes_since(before) == []


def test_another_keyed_function_is_refused(registered, before):
    """Other keys are other functions: names of inputs in an exported program depend on them."""
    with pytest.raises(AlreadyRegisteredError, match="Pair is already registered"):
        register_class_flattening(Pair, flatten, unflatten, lambda pair: ([], None))
    assert changes_since(before) == []


def test_register_unregister_register_works():
    """The second registration is as good as the first."""
    answers = []
    for _ in range(2):
        answers.append(register_class_flattening(Pair, *FUNCTIONS))
        answers.append(pytree.tree_leaves(Pair(1, 2)))
        unregister_class_flattening(Pair)
    assert answers == [True, [1, 2], True, [1, 2]]


def test_a_subclass_needs_a_registration_of_its_own(registered):
    """An instance of a subclass stays a leaf."""
    child = type("Child", (Pair,), {})(1, 2)
    assert pytree.tree_leaves(child) == [child]


def test_a_registered_class_survives_storage():
    """Tuples and integer keys in the static part come back from a stored spec as they were."""
    register_class_flattening(Pair, lambda pair: ([pair.a], (1, {2: pair.b})), lambda c, s: Pair(c[0], s[1][2]), None)
    try:
        spec = pytree.tree_structure(Pair(0, (True, None)))
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    finally:
        unregister_class_flattening(Pair)
    assert stored == spec
    assert stored.context == (1, {2: (True, None)})


def test_a_builtin_function_may_put_an_object_together():
    """Functions without a signature are taken as they are."""

    class Bag(list):
        pass

    done = register_class_flattening(Bag, lambda bag: (list(bag), None), lambda children, static: Bag(children), None)
    unregister_class_flattening(Bag)
    assert done is True


def test_a_class_that_came_and_went_is_not_kept_alive():
    """No table of any library holds on to a local class."""
    local = type("Local", (Pair,), {})
    reference = weakref.ref(local)
    register_class_flattening(local, flatten, lambda children, static: None, None)
    pytree.tree_leaves(local(1, 2))
    unregister_class_flattening(local)
    del local
    gc.collect()
    assert reference() is None


def test_verbose_logs_the_call_and_nothing_after_it(caplog, capsys):
    """`verbose=1` raises the level for one call; nothing is printed."""
    register_class_flattening(Pair, *FUNCTIONS, verbose=1)
    unregister_class_flattening(Pair)
    assert [record.getMessage() for record in caplog.records] == ["registered tests.flatten.declare.test_scopes.Pair"]
    assert (capsys.readouterr().out, logging.getLogger("yobx_flatten").level) == ("", logging.NOTSET)


def test_verbose_logs_the_unregistration(caplog):
    """The same for the way back."""
    register_class_flattening(Pair, *FUNCTIONS)
    unregister_class_flattening(Pair, verbose=1)
    assert [record.getMessage() for record in caplog.records] == ["unregistered tests.flatten.declare.test_scopes.Pair"]


def test_verbose_is_for_one_thread(caplog):
    """What another thread does meanwhile is not logged, and the level of the logger is nobody's business."""
    logger = logging.getLogger("yobx_flatten")
    other = type("Other", (Pair,), {})
    levels = []

    def meanwhile():
        levels.append(logger.level)
        register_class_flattening(other, *FUNCTIONS)
        unregister_class_flattening(other)
        levels.append(logger.isEnabledFor(logging.INFO))

    def check():
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    register_class_flattening(Pair, *FUNCTIONS, f_check=check, verbose=2)
    unregister_class_flattening(Pair)
    assert levels == [logging.NOTSET, False]
    assert [record.getMessage() for record in caplog.records] == ["registered tests.flatten.declare.test_scopes.Pair"]
    assert [(record.module, record.funcName) for record in caplog.records] == [("scopes", "register_class_flattening")]


def test_verbose_is_seen_where_no_logging_is_configured():
    """On stderr, and only what was asked for."""
    code = (
        "from yobx_flatten import register_flattening_functions\n"
        "with register_flattening_functions(verbose=1): pass\n"
        "with register_flattening_functions(): pass\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr.splitlines()) == ("", ["put in force: nothing new", "let go: nothing"])


# f_check


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


def test_a_check_may_register_classes_in_another_thread():
    """No lock is held while a user's function runs."""
    other = type("Other", (), {})

    def f_check():
        thread = threading.Thread(
            target=register_class_flattening,
            args=(other, lambda o: ([], None), lambda c, s: other(), None),
            daemon=True,
        )
        thread.start()
        thread.join(10)
        assert not thread.is_alive()

    register_class_flattening(Pair, *FUNCTIONS, f_check=f_check)
    assert pytree.tree_leaves([Pair(1, 2), other()]) == [1, 2]
    unregister_class_flattening(other)
    unregister_class_flattening(Pair)


class CheckFailedError(Exception):
    pass


def raise_check_failed(*args):
    raise CheckFailedError


def test_a_check_that_returns_false_undoes_the_registration(before):
    """`False` is a failed check."""
    with pytest.raises(RoundTripError, match="f_check of Pair returned False"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False)
    assert changes_since(before) == []


def test_a_check_that_raises_undoes_the_registration(before):
    """The user's own exception arrives, and nothing is registered."""
    with pytest.raises(CheckFailedError):
        register_class_flattening(Pair, *FUNCTIONS, f_check=raise_check_failed)
    assert changes_since(before) == []


@pytest.mark.parametrize("position", range(3))
def test_a_function_that_raises_undoes_the_registration(before, position):
    """Whichever of the three functions fails in the check, nothing is registered."""
    functions = list(FUNCTIONS)
    functions[position] = raise_check_failed
    with pytest.raises(CheckFailedError):
        register_class_flattening(Pair, *functions, f_check=sample)
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
            (lambda pair: None, unflatten, None), "Pair: f_flatten must return a pair .* found NoneType", id="nothing"
        ),
        pytest.param(
            (lambda pair: (pair.a, pair.b), unflatten, None),
            "Pair: f_flatten must return a pair .* found tuple of 2",
            id="children not in a list",
        ),
        pytest.param(
            (flatten, unflatten, flatten),
            r"Pair: f_flatten_with_keys must return a list of \(key, child\) pairs",
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
            "Pair: the rebuilt object has other children than the original",
            id="another order",
        ),
        pytest.param(
            (flatten, lambda children, static: Pair(*[child.clone() for child in children]), None),
            "Pair: the rebuilt object has other children .* and not copy them",
            id="copies",
        ),
        pytest.param(
            (lambda pair: ([pair.a, pair.b], hasattr(pair, "rebuilt")), unflatten_and_mark, None),
            "Pair: the rebuilt object has another static part than the original.\n.* False\n.* True",
            id="another static part",
        ),
        pytest.param(
            (lambda pair: ([pair.a], pair.b), lambda children, static: Pair(*children, static), None),
            "Pair: its tree spec cannot be stored in a saved program: Static data holds the Tensor",
            id="a tensor in the static part",
        ),
    ],
)
def test_a_wrong_function_is_found_and_undone(before, functions, message):
    """The message names the class, the function and the difference; nothing is registered."""
    with pytest.raises(RoundTripError, match=message):
        register_class_flattening(Pair, *functions, f_check=sample)
    assert changes_since(before) == []


def test_an_instance_of_another_class_is_no_sample(before):
    """The check wants an instance of the class itself."""
    with pytest.raises(RoundTripError, match="f_check of Pair returned a dict; return an instance of Pair"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=dict)
    assert changes_since(before) == []


# Bad input


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "expected a class as first argument, found None.\n    register_class_flattening(MyClass, ...)"),
        (
            Pair(1, 2),
            "the Pair <tests.flatten.declare.test_scopes.Pair",
        ),
        (3, "found the int 3. Did you mean type(obj), the class int?"),
        (list[int], "expected a class as first argument"),
    ],
    ids=["None", "an instance", "a number", "an alias"],
)
def test_what_is_no_class_is_refused(before, target, message):
    """The message says what was found instead of a class."""
    with pytest.raises(InvalidRegistrationError) as caught:
        register_class_flattening(target, *FUNCTIONS)
    assert "register_class_flattening: expected a class" in str(caught.value)
    assert message in str(caught.value)
    assert changes_since(before) == []


@pytest.mark.parametrize(
    ("position", "argument", "needed"),
    [
        (0, "f_flatten", "(obj)"),
        (1, "f_unflatten", "(children, static)"),
        (2, "f_flatten_with_keys", "(obj)"),
    ],
)
def test_what_cannot_be_called_is_refused(before, position, argument, needed):
    """The message names the class, the argument and how it is called."""
    functions = list(FUNCTIONS)
    functions[position] = "not a function"
    with pytest.raises(InvalidRegistrationError) as caught:
        register_class_flattening(Pair, *functions)
    assert str(caught.value) == (
        f"register_class_flattening(Pair): {argument} must be a function {needed}, found the str 'not a function'."
    )
    assert changes_since(before) == []


@pytest.mark.parametrize("position", [0, 1])
def test_none_for_a_function_is_refused(before, position):
    """Only the keyed function may be left out."""
    functions = list(FUNCTIONS)
    functions[position] = None
    with pytest.raises(InvalidRegistrationError, match=r"must be a function .*, found None"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


@pytest.mark.parametrize(
    ("position", "argument", "function"),
    [
        (0, "f_flatten", lambda: ([], None)),
        (0, "f_flatten", lambda pair, other: ([], None)),
        (1, "f_unflatten", lambda children: Pair(*children)),
        (1, "f_unflatten", lambda children, static, *, needed: Pair(*children)),
        (2, "f_flatten_with_keys", lambda: ([], None)),
    ],
)
def test_a_function_of_another_signature_is_refused(before, position, argument, function):
    """A function that cannot take what it will be called with is refused, and its signature shown."""
    functions = list(FUNCTIONS)
    functions[position] = function
    with pytest.raises(InvalidRegistrationError, match=rf"register_class_flattening\(Pair\): {argument} is called as"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


@pytest.mark.parametrize("f_check", [3, lambda pair: pair], ids=["not callable", "takes an argument"])
def test_a_check_that_cannot_be_called_is_refused(before, f_check):
    """`f_check` is called without arguments; what cannot be is named."""
    with pytest.raises(InvalidRegistrationError, match=r"register_class_flattening\(Pair\): f_check"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=f_check)
    assert changes_since(before) == []


@pytest.mark.parametrize("target", [None, Pair(1, 2), "Pair"], ids=["None", "an instance", "a name"])
def test_what_is_no_class_cannot_be_unregistered(before, target):
    """The message says what was found, and which call to make."""
    with pytest.raises(InvalidRegistrationError, match=r"\n    unregister_class_flattening\(MyClass, \.\.\.\)"):
        unregister_class_flattening(target)
    assert changes_since(before) == []


def test_a_class_never_registered_cannot_be_unregistered(before):
    """The message says how to register it."""
    with pytest.raises(NotRegisteredError, match=r"Pair is not registered.*\n    register_class_flattening\(Pair, "):
        unregister_class_flattening(Pair)
    assert changes_since(before) == []


def test_a_class_cannot_be_unregistered_twice(before):
    """The second call is told that there is nothing left."""
    register_class_flattening(Pair, *FUNCTIONS)
    unregister_class_flattening(Pair)
    with pytest.raises(NotRegisteredError, match="Pair is not registered"):
        unregister_class_flattening(Pair)
    assert changes_since(before) == []


def test_a_class_of_others_cannot_be_unregistered(registered_by_others, before):
    """What was registered through torch is not ours to take away."""
    with pytest.raises(NotRegisteredError, match=r"Pair was registered by somebody else .* is left as it is"):
        unregister_class_flattening(Pair)
    assert changes_since(before) == []


def test_a_builtin_class_cannot_be_unregistered(before):
    """torch's own registrations are not ours to take away."""
    with pytest.raises(NotRegisteredError, match=r"unregister_class_flattening\(dict\)"):
        unregister_class_flattening(dict)
    assert changes_since(before) == []


@needs_transformers
def test_a_class_of_a_block_cannot_be_unregistered():
    """The block lets its classes go itself."""
    from transformers import DynamicCache

    with register_flattening_functions(patch_transformers=True):
        before = registry_snapshot.take()
        with pytest.raises(NotRegisteredError, match="DynamicCache is held by a block, which lets it go when it ends"):
            unregister_class_flattening(DynamicCache)
        assert changes_since(before) == []


@needs_transformers
def test_a_class_of_a_block_cannot_be_registered_with_other_functions():
    """Inside a block its functions are in force; the message says to register before it."""
    from transformers import DynamicCache

    with register_flattening_functions(patch_transformers=True):
        before = registry_snapshot.take()
        with pytest.raises(AlreadyRegisteredError, match="DynamicCache is already registered by a block"):
            register_class_flattening(DynamicCache, *FUNCTIONS)
        assert changes_since(before) == []


@pytest.mark.parametrize("undo", [None, {}, {Pair: True}, set()], ids=["None", "an empty dict", "a dict", "a set"])
def test_only_what_a_registration_returned_can_be_undone(registered, before, undo):
    """The message shows the two lines that belong together, and nothing is undone."""
    with pytest.raises(InvalidRegistrationError, match=r"\n    undo = register_cache_flattening\("):
        unregister_cache_flattening(undo)
    assert changes_since(before) == []


def test_every_refusal_is_one_of_ours():
    """One `except` clause catches all of them."""
    for error in (AlreadyRegisteredError, InvalidRegistrationError, NotRegisteredError, RoundTripError):
        assert issubclass(error, FlattenError)


# make_flattening_function_for_dataclass


class HiddenState(dict):
    pass


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenPoint:
    x: Any
    y: Any = None


@dataclasses.dataclass(slots=True)
class SlottedPoint:
    x: Any
    y: Any = None


@pytest.mark.parametrize("cls", [HiddenState, Point, FrozenPoint, SlottedPoint], ids=lambda cls: cls.__name__)
def test_generated_functions_register_a_class(cls):
    """The three functions pass the check, and the class comes apart."""
    flatten_fn, flatten_with_keys_fn, unflatten_fn = make_flattening_function_for_dataclass(cls, set())
    obj = cls(x=torch.zeros(2), y=torch.ones(3))
    register_class_flattening(cls, flatten_fn, unflatten_fn, flatten_with_keys_fn, f_check=lambda: obj)
    try:
        leaves = pytree.tree_leaves(obj)
    finally:
        unregister_class_flattening(cls)
    assert [tuple(leaf.shape) for leaf in leaves] == [(2,), (3,)]


def test_the_class_joins_the_supported_ones():
    """The set that is passed in collects the classes."""
    supported = {Pair}
    make_flattening_function_for_dataclass(Point, supported)
    assert supported == {Pair, Point}


def test_no_functions_are_generated_for_a_class_without_fields():
    """A class that is neither a dataclass nor mapping-like is refused, and does not join the set."""
    supported = set()
    with pytest.raises(InvalidRegistrationError, match=r"Pair is neither a dataclass nor has keys\(\)"):
        make_flattening_function_for_dataclass(Pair, supported)
    assert supported == set()


@pytest.mark.parametrize("target", [None, Point(1, 2)], ids=["None", "an instance"])
def test_no_functions_are_generated_for_what_is_no_class(target):
    """The message names the call."""
    with pytest.raises(InvalidRegistrationError, match="make_flattening_function_for_dataclass: expected a class"):
        make_flattening_function_for_dataclass(target, set())


# register_cache_flattening and the block


@needs_transformers
def test_each_class_says_whether_this_call_put_ours_in_force():
    """The first call registers the caches; a second one finds them."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.modeling_outputs import BaseModelOutput

    expected = {DynamicCache, StaticCache, EncoderDecoderCache}
    if pytree.SUPPORTED_NODES[BaseModelOutput].flatten_with_keys_fn is None:  # transformers < 5.17
        expected.add(BaseModelOutput)
    first = register_cache_flattening(patch_transformers=True)
    second = register_cache_flattening(patch_transformers=True)
    unregister_cache_flattening(second)
    unregister_cache_flattening(first)
    done = {cls for cls, ours in first.items() if ours}
    assert expected <= done  # and whatever else this version of transformers has
    assert (BaseModelOutput in done) == (BaseModelOutput in expected)
    assert (second.keys(), any(second.values())) == (first.keys(), False)


@needs_transformers
def test_the_four_documented_classes_come_apart_inside_the_block():
    """`DynamicCache`, `StaticCache`, `EncoderDecoderCache` and `BaseModelOutput` are nodes there."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.modeling_outputs import BaseModelOutput

    with register_flattening_functions(patch_transformers=True):
        nodes = {cls for cls in (DynamicCache, StaticCache, EncoderDecoderCache, BaseModelOutput) if is_node(cls)}
    assert nodes == {DynamicCache, StaticCache, EncoderDecoderCache, BaseModelOutput}
    assert not any(map(is_node, (DynamicCache, StaticCache, EncoderDecoderCache)))


def is_node(cls):
    return cls in pytree.SUPPORTED_NODES


@needs_transformers
def test_the_block_yields_what_the_call_returns():
    """What was done can be read inside the block."""
    from transformers import DynamicCache

    with register_flattening_functions(patch_transformers=True) as undo:
        assert isinstance(undo, Undo)
        assert undo[DynamicCache] is True


def test_a_block_without_options_registers_nothing(before):
    """Nothing is asked for, so nothing is registered."""
    with register_flattening_functions() as undo:
        assert undo == {}
        assert changes_since(before) == []


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is not None, reason="diffusers is installed")
def test_a_library_that_is_missing_is_named(before):
    """The message holds the line that installs it, and what was registered so far is undone."""
    with pytest.raises(MissingDependencyError, match=r"needs diffusers, .*\n    pip install diffusers"):
        register_cache_flattening(patch_transformers=True, patch_diffusers=True)
    assert changes_since(before) == []


def test_functions_of_an_ordered_dict_subclass_keep_its_order():
    """Children stand in the order of the keys."""
    cls = type("Ordered", (OrderedDict,), {})
    flatten_fn, _, unflatten_fn = make_flattening_function_for_dataclass(cls, set())
    children, static = flatten_fn(cls([("b", 1), ("a", 2)]))
    assert (children, list(unflatten_fn(children, static).items())) == ([1, 2], [("b", 1), ("a", 2)])
