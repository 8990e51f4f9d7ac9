"""The documents' code prints what they print; `register_class_flattening` refuses bad input by name."""

import gc
import importlib.util
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
    assert changes_since(before) == []


@pytest.mark.parametrize(
    ("position", "given", "said"),
    [
        (0, "not a function", "f_flatten must be a function (obj), found the str 'not a function'."),
        (1, None, "f_unflatten must be a function (children, static), found None."),
        (2, "not a function", "f_flatten_with_keys must be a function (obj), found the str 'not a function'."),
    ],
)
def test_what_cannot_be_called_is_refused(before, position, given, said):
    functions = list(FUNCTIONS)
    functions[position] = given
    with pytest.raises(InvalidRegistrationError) as caught:
        register_class_flattening(Pair, *functions)
    assert str(caught.value) == f"register_class_flattening(Pair): {said}"
    assert changes_since(before) == []


@pytest.mark.parametrize(
    ("position", "argument", "function"),
    [
        (0, "f_flatten", lambda pair, other: ([], None)),
        (1, "f_unflatten", lambda children, static, *, needed: Pair(*children)),
        (2, "f_flatten_with_keys", lambda: ([], None)),
    ],
)
def test_a_function_of_another_signature_is_refused(before, position, argument, function):
    functions = list(FUNCTIONS)
    functions[position] = function
    with pytest.raises(InvalidRegistrationError, match=rf"register_class_flattening\(Pair\): {argument} is called as"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


@pytest.mark.parametrize("f_check", [3, lambda pair: pair], ids=["not callable", "takes an argument"])
def test_a_check_that_cannot_be_called_is_refused(before, f_check):
    with pytest.raises(InvalidRegistrationError, match=r"register_class_flattening\(Pair\): f_check"):
        register_class_flattening(Pair, *FUNCTIONS, f_check=f_check)
    assert changes_since(before) == []


def test_what_is_no_class_cannot_be_unregistered(before):
    with pytest.raises(InvalidRegistrationError, match=r"\n    unregister_class_flattening\(MyClass, \.\.\.\)"):
        unregister_class_flattening("Pair")
    assert changes_since(before) == []


def test_a_class_of_others_cannot_be_unregistered(registered_by_others, before):
    with pytest.raises(NotRegisteredError, match=r"Pair was registered by other code .* It stays registered"):
        unregister_class_flattening(Pair)
    assert changes_since(before) == []


@pytest.mark.parametrize("undo", [None, {Pair: True}], ids=["None", "a dict"])
def test_only_what_a_registration_returned_can_be_undone(registered, before, undo):
    with pytest.raises(InvalidRegistrationError, match=r"\n    undo = register_cache_flattening\("):
        unregister_cache_flattening(undo)
    assert changes_since(before) == []


def test_a_registration_of_others_returns_false_and_stays(registered_by_others, before):
    assert register_class_flattening(Pair, *FUNCTIONS) is False
    assert changes_since(before) == []


@pytest.mark.parametrize(
    "functions", [(lambda pair: ([], None), unflatten), (flatten, unflatten, lambda pair: ([], None))]
)
def test_other_functions_are_refused(registered, before, functions):
    with pytest.raises(AlreadyRegisteredError, match=r"pair\.Pair is already .*\n    unregister_class_flattening"):
        register_class_flattening(Pair, *functions)
    assert changes_since(before) == []


def test_children_without_keys_are_numbered():
    register_class_flattening(Pair, flatten, unflatten, None)
    try:
        paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(Pair(1, 2))]
    finally:
        unregister_class_flattening(Pair)
    assert paths == ["[0]", "[1]"]


def test_a_registered_class_survives_storage():
    register_class_flattening(Pair, lambda pair: ([pair.a], (1, {2: pair.b})), lambda c, s: Pair(c[0], s[1][2]), None)
    try:
        spec = pytree.tree_structure(Pair(0, (True, None)))
        stored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    finally:
        unregister_class_flattening(Pair)
    assert stored == spec
    assert stored.context == (1, {2: (True, None)})


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


@pytest.mark.parametrize("f_check", [sample, lambda: None, lambda: True], ids=["instance", "None", "True"])
def test_a_check_that_passes_registers(f_check):
    done = register_class_flattening(Pair, *FUNCTIONS, f_check=f_check)
    unregister_class_flattening(Pair)
    assert done is True


def test_a_check_may_use_the_registration():
    seen = []

    def f_check():
        seen.extend(pytree.tree_leaves(Pair(1, 2)))

    register_class_flattening(Pair, *FUNCTIONS, f_check)
    unregister_class_flattening(Pair)
    assert seen == [1, 2]


def test_a_check_is_not_run_for_a_class_that_is_registered(registered):
    assert register_class_flattening(Pair, *FUNCTIONS, f_check=lambda: False) is False


class CheckFailedError(Exception):
    pass


def raise_check_failed(*args):
    raise CheckFailedError


def test_a_check_that_returns_false_undoes_the_registration(before):
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
    with pytest.raises(RoundTripError, match=message):
        register_class_flattening(Pair, *functions, f_check=sample)
    assert changes_since(before) == []


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


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
    exec(compile(example, "<document>", "exec"), {"__name__": "document"})
    assert capsys.readouterr().out == printed
