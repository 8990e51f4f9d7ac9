"""`explain` draws an object; `compare_specs` names the places in which two structures differ."""

import collections
import dataclasses
import textwrap

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from hypothesis import given

from tests.flatten.diagnose.test_opaque import nests
from tests.modules import module_class
from yobx_flatten import (
    InvalidArgumentError,
    compare_specs,
    explain,
    register,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)
from yobx_flatten.diagnose.comparison import compare_spec_texts

X = torch.zeros(2, 3)


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    step: int = dataclasses.field(default=1, metadata={"static": True})


class Opaque:
    def __init__(self):
        self.a, self.b = X, [X.long()]


def drawn(tree, **options):
    return str(explain(tree, **options))


def lines(text):
    return textwrap.dedent(text).strip("\n")


def test_containers_tensors_arrays_and_values():
    array = numpy.zeros((2, 2), dtype="int32")
    tree = {"w": array, "x": X.to(torch.bfloat16), "y": [1, None], "z": ("text", torch.float16)}
    assert drawn(tree, name="kwargs") == lines("""
        kwargs: dict of 4
        ├─ ['w']: numpy int32[2, 2]
        ├─ ['x']: bfloat16[2, 3]
        ├─ ['y']: list of 2
        │  ├─ [0]: 1
        │  └─ [1]: None
        └─ ['z']: tuple of 2
           ├─ [0]: 'text'
           └─ [1]: torch.float16
    """)


def test_an_object_that_is_not_registered_is_marked_and_the_line_stands_below():
    assert drawn([Opaque(), X, Opaque()]) == lines("""
        tree: list of 3
        ├─ [0]: ✗ Opaque, not registered: 2 tensors, 72 bytes
        ├─ [1]: float32[2, 3]
        └─ [2]: ✗ Opaque, not registered: 2 tensors, 72 bytes

        ✗ Register it first:
            register(Opaque, children=['a', 'b'])
    """)


def test_static_parts_are_shown():
    register(State, backends="torch")
    try:
        assert drawn(State(X, 7)) == lines("""
            tree: State, static [7]
            └─ .hidden: float32[2, 3]
        """)
    finally:
        unregister_class_flattening(State)


def test_equal_layers_are_one_with_what_is_below():
    assert drawn({"a": [{"k": X, "v": X.long()} for _ in range(24)], "b": [X, X]}) == lines("""
        tree: dict of 2
        ├─ ['a']: list of 24
        │  └─ [0] … [23]: 24 × dict of 2
        │     ├─ ['k']: float32[2, 3]
        │     └─ ['v']: int64[2, 3]
        └─ ['b']: list of 2
           ├─ [0]: float32[2, 3]
           └─ [1]: float32[2, 3]
    """)


def test_a_layer_that_differs_stands_alone():
    layers = [X, X, X, X.long(), X, X, X, X]
    assert drawn(layers) == lines("""
        tree: list of 8
        ├─ [0] … [2]: 3 × float32[2, 3]
        ├─ [3]: int64[2, 3]
        └─ [4] … [7]: 4 × float32[2, 3]
    """)


def test_siblings_that_take_turns_are_one_row_each():
    tree = {f"{kind}_{i}": X if kind == "key" else X[0] for i in range(3) for kind in ("key", "value")}
    assert drawn(tree) == lines("""
        tree: dict of 6
        ├─ ['key_0'] … ['key_2']: 3 × float32[2, 3]
        └─ ['value_0'] … ['value_2']: 3 × float32[3]
    """)


def test_a_cache_outside_and_inside_of_the_block():
    cache = transformers.DynamicCache()
    for layer in range(4):
        cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
    assert drawn({"past_key_values": cache}) == lines("""
        tree: dict of 1
        └─ ['past_key_values']: ✗ DynamicCache, not registered: 8 tensors, 768 bytes

        ✗ Register it first:
            with register_flattening_functions(patch_transformers=True): ...
    """)
    with register_flattening_functions(patch_transformers=True):
        assert drawn({"past_key_values": cache}) == lines("""
            tree: dict of 1
            └─ ['past_key_values']: DynamicCache
               ├─ ['key_0'] … ['key_3']: 4 × float32[1, 2, 3, 4]
               └─ ['value_0'] … ['value_3']: 4 × float32[1, 2, 3, 4]
        """)


def test_rows_are_cut_at_the_width():
    text = drawn(["a" * 200], width=40)
    assert max(map(len, text.split("\n"))) == 40
    assert text.endswith("…")


def test_an_object_that_holds_itself_ends():
    tree = [1]
    tree.append(tree)
    assert drawn(tree).endswith("└─ [1]: … (the same object again)")


def test_a_repr_that_fails_is_named():

    class Shy:
        def __repr__(self):
            raise ValueError

    register_class_flattening(State, lambda s: ([s.hidden], Shy()), lambda children, _: State(*children), None)
    try:
        assert "its __repr__ raised ValueError" in drawn(State(X), width=200)
        assert drawn([Shy()], width=200).endswith("Shy, a leaf without tensors")
    finally:
        unregister_class_flattening(State)


def test_rows_tell_what_they_are():
    drawing = explain({"x": X, "o": [Opaque()], "n": 1})
    assert [(row.depth, row.label, row.kind) for row in drawing.rows] == [
        (0, "tree", "node"),
        (1, "['x']", "tensor"),
        (1, "['o']", "node"),
        (2, "[0]", "opaque"),
        (1, "['n']", "value"),
    ]
    assert [found.path for found in drawing.unregistered] == ["tree['o'][0]"]
    assert repr(drawing) == str(drawing)


Pair = collections.namedtuple("Pair", ["left", "right"])  # the plain kind, whose spec is unlike the others


@dataclasses.dataclass
class HeldState:
    hidden: object
    step: int = dataclasses.field(default=1, metadata={"static": True})


@pytest.fixture(autouse=True)
def _state_is_registered():
    register(HeldState, backends="torch")
    yield
    unregister_class_flattening(HeldState)


DIFFERENCES = [
    pytest.param([1, 2], [1], [("tree", "list of 2", "list of 1")], id="length"),
    pytest.param([1, (2,)], [1, [2]], [("tree[1]", "tuple of 1", "list of 1")], id="class"),
    pytest.param({"a": 1}, {"a": [1]}, [("tree['a']", "a leaf", "list of 1")], id="leaf"),
    pytest.param(
        {"a": 1, "b": 2},
        {"a": 1, "c": 3},
        [("tree['b']", "a leaf", "not there"), ("tree['c']", "not there", "a leaf")],
        id="keys",
    ),
    pytest.param(
        {"a": 1, "b": 2}, {"b": 1, "a": 2}, [("tree", "in the order ['a'], ['b']", "['b'], ['a']")], id="order"
    ),
    pytest.param([HeldState(1, 5)], [HeldState(1, 6)], [("tree[0]", "static [5]", "static [6]")], id="static"),
    pytest.param(HeldState([1]), HeldState(1), [("tree.hidden", "list of 1", "a leaf")], id="field"),
    pytest.param(
        ((1,), {"x": 1, "y": [1]}),
        ((1,), {"x": 1, "y": [1, 2]}),
        [("kwargs['y']", "list of 1", "list of 2")],
        id="call",
    ),
]


@pytest.mark.parametrize(("first", "second", "expected"), DIFFERENCES)
def test_each_difference_has_its_place(first, second, expected):
    texts = [str(pytree.tree_structure(tree)) for tree in (first, second)]
    for found in (compare_specs(first, second), compare_spec_texts(*texts, ("first", "second"))):
        assert [(one.path, one.first, one.second) for one in found] == expected


def test_named_tuples_are_told_apart():
    (found,) = compare_specs(Pair(1, [2]), Pair(1, 2))
    assert (found.path, found.first, found.second) == ("tree.right", "list of 1", "a leaf")


@given(nests())
def test_specs_differ_exactly_when_there_is_a_difference(planted):
    spec = pytree.tree_structure(planted.tree)
    other = pytree.tree_structure([planted.tree, 1])
    assert compare_specs(spec, spec) == []
    assert bool(compare_specs(spec, other)) == (spec != other)


def test_the_text_shows_both_values_under_the_path():
    (found,) = compare_specs([1, 2], (1, 2), name="outputs", names=("exported", "called"))
    assert str(found) == "outputs\n    exported: list of 2\n    called:   tuple of 2"


def test_a_program_is_compared_by_its_inputs():

    takes = module_class("Takes", lambda self, x, y: x)()
    x = torch.ones(2)
    program = torch.export.export(takes, (x,), {"y": {"a": x + 1}})
    assert compare_specs(program, ((x,), {"y": {"a": x}})) == []
    (found,) = compare_specs(program, ((x,), {"y": x}))
    assert (found.path, found.first, found.second) == ("kwargs['y']", "dict with ['a']", "a leaf")


def test_caches_of_other_layers_differ_in_the_names_of_their_leaves():

    def cache(layers):
        made = transformers.DynamicCache()
        for layer in range(layers):
            made.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), layer)
        return made

    with register_flattening_functions(patch_transformers=True):
        found = compare_specs({"past": cache(1)}, {"past": cache(2)})
    assert [(one.path, one.first, one.second) for one in found] == [
        ("tree['past']['key_1']", "not there", "a leaf"),
        ("tree['past']['value_1']", "not there", "a leaf"),
    ]


@pytest.mark.parametrize("text", ["", "TreeSpec", "TreeSpec(list, None, [*)", "PyTreeSpec([*, *])"])
def test_a_text_that_is_no_spec_gives_none(text):
    """A future torch may print another form."""
    assert compare_spec_texts(text, text, ("a", "b")) is None


def test_names_must_be_two():
    with pytest.raises(InvalidArgumentError, match="names must be a pair"):
        compare_specs(1, 2, names=("one",))
