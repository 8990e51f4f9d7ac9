"""`find_unregistered`, `check_recipe`, `explain`, `compare_specs`: what torch does not flatten, how trees differ."""

import collections
import dataclasses
import textwrap
from typing import Any

import hypothesis.strategies as st
import numpy
import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from hypothesis import given
from transformers import DynamicCache

from tests import fresh_process
from tests.flatten.core.test_compare import Trap
from tests.modules import module_class
from yobx_flatten import register, register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.diagnose import check_recipe, compare_specs, explain, find_unregistered
from yobx_flatten.diagnose.checks import recipe_of
from yobx_flatten.diagnose.comparison import compare_spec_texts
from yobx_flatten.errors import InvalidArgumentError, InvalidRegistrationError, NotRegisteredError, RoundTripError
from yobx_flatten.huggingface import make_dynamic_cache
from yobx_flatten.registry.recipe.roundtrip import CHECKS
from yobx_flatten.testing import recipe_tests

X = torch.zeros(2, 3)


class Plain:
    def __init__(self, children):
        for name, child in zip("abcdef", children, strict=False):
            setattr(self, name, child)


class Slotted:
    __slots__ = ("a", "b", "c", "parent")

    def __init__(self, children):
        for name, child in zip("abc", children, strict=False):
            setattr(self, name, child)


@dataclasses.dataclass
class Fields:
    children: Any


class Items(dict):
    pass


class Row(list):
    pass


Pair = collections.namedtuple("Pair", ["left", "right"])  # the plain kind is the one to look at


def paths(tree, **options):
    return [found.path for found in find_unregistered(tree, **options)]


# how to make an object of its children, and whether torch takes it apart
MAKERS = {
    "list": (list, True),
    "tuple": (tuple, True),
    "dict": (lambda children: dict(zip(["x", 3, (1, "y")], children, strict=False)), True),
    "deque": (collections.deque, True),
    "pair": (lambda children: Pair(children, None), True),
    "plain": (Plain, False),
    "slotted": (Slotted, False),
    "fields": (Fields, False),
    "items": (lambda children: Items(zip("abc", children, strict=False)), False),
    "row": (Row, False),
}


@dataclasses.dataclass
class Planted:
    tree: Any
    opaque: list[Any]


@st.composite
def nests(draw, back_references=False, depth=4):
    opaque: list[Any] = []
    later: list[Any] = []

    def build(depth):
        kind = draw(st.sampled_from(["tensor", "value", *MAKERS] if depth else ["tensor", "value"]))
        if kind in ("tensor", "value"):
            return (torch.zeros(1), True) if kind == "tensor" else (draw(st.sampled_from([1, "a", None, 2.5])), False)
        built = [build(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        make, is_known = MAKERS[kind]
        made, holds = make([child for child, _ in built]), any(holds for _, holds in built)
        if holds and not is_known:
            opaque.append(made)
        if kind in ("plain", "slotted") and draw(st.booleans()):
            later.append(made)
        return made, holds

    tree, _ = build(depth)
    if back_references:
        for obj in later:
            obj.parent = tree
    return Planted(tree, opaque)


@given(nests())
def test_all_that_is_planted_is_found_and_nothing_else(planted):
    found = find_unregistered(planted.tree)
    reached = [eval(one.path, {"tree": planted.tree}) for one in found]
    assert {id(obj) for obj in reached} == {id(obj) for obj in planted.opaque}
    assert [type(obj) for obj in reached] == [one.cls for one in found]
    assert all(one.nbytes == 4 * one.tensors > 0 for one in found)


@given(nests(back_references=True))
def test_all_that_is_planted_is_found_in_nests_that_go_round(planted):
    found = find_unregistered(planted.tree)
    reached = {id(eval(one.path, {"tree": planted.tree})) for one in found}
    assert {id(obj) for obj in planted.opaque} <= reached


def test_the_leaf_and_what_is_inside_it_are_told_apart_and_the_text_names_place_class_size_and_line():
    outer, inner = find_unregistered({"s": [Plain([X, Slotted([X])])]}, name="kwargs")
    assert (outer.path, outer.cls, outer.tensors, outer.inside) == ("kwargs['s'][0]", Plain, 1, None)
    assert (inner.path, inner.cls, inner.inside) == ("kwargs['s'][0].b", Slotted, "kwargs['s'][0]")
    (found,) = find_unregistered([Plain([X, torch.zeros(500)])], name="args")
    assert str(found) == (
        "args[0] is a tests.flatten.diagnose.test_opaque.Plain, which torch does not know how to flatten. It holds "
        "2 tensors, 2.02 kB. Register it first:\n"
        "    register(Plain, children=['a', 'b'])"
    )


def test_what_torch_takes_apart_is_not_found_one_object_in_two_places_twice_and_a_tensor_in_two_once():
    tree = {"a": [X, (1, None)], "b": Pair(X, "s"), "c": Plain([1, [2]]), "d": print, "e": collections.deque([X])}
    assert paths({**tree, "f": [lambda: X, X.add_, Plain([lambda: X])]}) == []
    shared = Plain([X, [X, X]])
    assert paths([shared, {"again": shared}]) == ["tree[0]", "tree[1]['again']"]
    (found,) = find_unregistered(shared)
    assert (found.path, found.tensors, found.nbytes) == ("tree", 1, 24)


def test_a_registered_class_is_not_found_and_what_is_in_it_is_and_a_flatten_function_that_fails_says_where():
    flatten = lambda obj: ([obj.a], None)  # noqa: E731 # a function without a name is what many users write
    keyed = lambda obj: ([(torch.utils._pytree.GetAttrKey("a"), obj.a)], None)  # noqa: E731 # as above
    register_class_flattening(Plain, flatten, lambda children, _: Plain(list(children)), keyed)
    try:
        assert paths([Plain([Slotted([X])])]) == ["tree[0].a"]
    finally:
        unregister_class_flattening(Plain)

    def fails(obj):
        raise ArithmeticError("no")

    register_class_flattening(Plain, fails, lambda children, _: None, None)
    try:
        with pytest.raises(ArithmeticError, match="no") as raised:
            find_unregistered({"a": [Plain([])]})
        assert raised.value.__notes__ == ["while tree['a'][0], tests.flatten.diagnose.test_opaque.Plain, was flattened"]
    finally:
        unregister_class_flattening(Plain)


def test_sets_and_modules_are_leaves_to_torch_and_nothing_of_an_object_runs():
    (found,) = find_unregistered([{X}])
    assert (found.cls, found.tensors) == (set, 1)
    assert "torch flattens lists, tuples and dicts: pass one of these" in str(found)
    found = find_unregistered({"m": torch.nn.Linear(2, 3)})[0]
    assert (found.path, found.tensors, found.nbytes) == ("tree['m']", 2, 36)
    assert "make it a submodule" in str(found)
    (found,) = find_unregistered([Trap()])
    assert found.path == "tree[0]"
    assert "It holds 1 tensor, 24 bytes" in str(found)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: Plain([inner])], ids=["list", "object"])
def test_deep_nests_are_walked_and_a_list_that_holds_itself_ends(wrap):
    """torch itself recurses until it fails."""
    tree = Plain([X])
    for _ in range(3000):
        tree = wrap(tree)
    assert len(paths(tree)) in (1, 3001)
    around = [Plain([X])]
    around.append(around)
    assert paths(around) == ["tree[0]"]


def test_a_cache_is_one_finding_and_left_alone_where_it_is_registered():
    cache = make_dynamic_cache([(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)) for _ in range(3)])
    (found,) = find_unregistered({"past_key_values": cache}, name="kwargs")
    assert (found.path, found.tensors, found.nbytes) == ("kwargs['past_key_values']", 6, 6 * 96)
    assert found.remedy == "with register_flattening_functions(patch_transformers=True): ..."
    assert paths(Plain([cache])) == ["tree", "tree.a"]
    with register_flattening_functions(patch_transformers=True):
        assert paths(Plain([cache])) == ["tree"]
        check_recipe(DynamicCache, cache)


@pytest.mark.parametrize("library", ["numpy", "jax.numpy"])
def test_arrays_count_inside_objects(library):
    arrays = pytest.importorskip(library, reason="JAX is optional")
    (found,) = find_unregistered(Plain([arrays.zeros(4, dtype="float32")]))
    assert (found.tensors, found.nbytes) == (1, 16)


def test_no_framework_is_imported():
    program = """
import sys, torch
from yobx_flatten import explain, find_unregistered
class A:
    pass
a = A()
a.x = torch.zeros(2)
print(len(find_unregistered([a])), str(explain([a]))[:4])
print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "transformers", "flax", "diffusers", "onnx"}))
"""
    assert fresh_process.run("-c", program).stdout == "1 tree\n[]\n"


class Bag:
    def __init__(self, children, static=None):
        self.children, self.static = children, static


def flatten(bag):
    return bag.children, bag.static


def unflatten(children, static):
    return Bag(list(children), static)


def problem(sample, flatten=flatten, unflatten=unflatten):
    register_class_flattening(Bag, flatten, unflatten, None)
    try:
        check_recipe(Bag, sample)
    except RoundTripError as error:
        return str(error)
    finally:
        unregister_class_flattening(Bag)
    return ""


def test_a_class_that_torch_does_not_know_a_sample_of_another_and_a_wrong_recipe_of_torch_are_named():
    """torch 2.13 itself gives a tuple for a `torch.Size`."""
    with pytest.raises(
        NotRegisteredError, match=r"does not know how to flatten .*Bag\. Register the class:\n    register"
    ):
        check_recipe(Bag, Bag([]))
    with pytest.raises(InvalidArgumentError, match=r"expected an instance of builtins\.list, found the tuple"):
        check_recipe(list, (1,))
    with pytest.raises(InvalidRegistrationError, match="expected a class as first argument"):
        check_recipe([1], [1])
    with pytest.raises(RoundTripError, match="Size: f_unflatten returned a tuple instead of a Size"):
        check_recipe(torch.Size, torch.Size([2, 3]))


def test_tensors_in_the_static_part_and_an_unflatten_that_makes_tensors_or_looks_at_its_children_are_found():
    """torch.export puts other things in the place of the children; containers among them stay what they are."""
    assert problem(Bag([], (1, {"a": [torch.ones(2)]}))).startswith(
        "Bag: its tree spec cannot be stored in a saved program: Static data holds the Tensor tensor([1., 1.])"
    )

    def unflatten_with_a_mask(children, static):
        bag = Bag(list(children), static)
        bag.mask = torch.zeros(3)
        return bag

    assert problem(Bag([X]), unflatten=unflatten_with_a_mask).startswith(
        "Bag: f_unflatten must not make tensors, but calls torch.ops.aten.zeros.default. Exports "
        "store new tensors as constants."
    )

    def unflatten_by_shape(children, static):
        bag = Bag(list(children), static)
        bag.rows = children[0].shape[0]
        return bag

    assert "f_unflatten fails with placeholders, which torch.export and JAX pass as children (Attri" in problem(
        Bag([X]), unflatten=unflatten_by_shape
    )

    def unflatten_of_a_list(children, static):
        (children,) = children
        return Bag([list(children)], static)

    assert problem(Bag([[X]]), unflatten=unflatten_of_a_list) == ""


def test_static_data_that_does_not_hash_is_found():
    """Lists and dicts are fine: they are frozen on the way to JAX."""

    class Loose:
        __hash__ = None

        def __eq__(self, other):
            return True

    assert problem(Bag([], [1, {"a": 2}])) == ""
    register_class_flattening(Bag, flatten, unflatten, None)
    try:
        with pytest.raises(RoundTripError, match="Loose"):
            CHECKS["the static part hashes"](recipe_of(Bag), Bag([], Loose()))
    finally:
        unregister_class_flattening(Bag)


# the registrations of torch itself, which a saved program relies on
test_recipes = recipe_tests([X, {"a": X}], (X,), collections.OrderedDict(a=X), collections.deque([X]))


def test_one_test_is_made_for_each_sample_and_check_and_fails_like_the_check():
    sizes = [len(mark.args[1]) for mark in test_recipes.pytestmark]
    assert sorted(sizes) == sorted([4, len(CHECKS)])
    with pytest.raises(NotRegisteredError):
        recipe_tests(Bag([]))(sample=Bag([]), check="comes back the same")


@dataclasses.dataclass
class HiddenState:
    hidden: object
    step: int = dataclasses.field(default=1, metadata={"static": True})


@pytest.fixture(autouse=True)
def _state_is_registered():
    register(HiddenState, backends="torch")
    yield
    unregister_class_flattening(HiddenState)


class Opaque:
    def __init__(self):
        self.a, self.b = X, [X.long()]


def drawn(tree, **options):
    return str(explain(tree, **options))


def lines(text):
    return textwrap.dedent(text).strip("\n")


def cache_of(layers):
    made = transformers.DynamicCache()
    for layer in range(layers):
        made.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
    return made


def placed(differences):
    return [(one.path, one.first, one.second) for one in differences]


def test_containers_tensors_arrays_and_values():
    array = numpy.zeros((2, 2), dtype="int32")
    tree = {"s": HiddenState(X, 7), "w": array, "x": X.to(torch.bfloat16), "y": [1, None], "z": ("text", torch.float16)}
    assert drawn(tree, name="kwargs") == lines("""
        kwargs: dict of 5
        ├─ ['s']: HiddenState, static [7]
        │  └─ .hidden: float32[2, 3]
        ├─ ['w']: numpy int32[2, 2]
        ├─ ['x']: bfloat16[2, 3]
        ├─ ['y']: list of 2
        │  ├─ [0]: 1
        │  └─ [1]: None
        └─ ['z']: tuple of 2
           ├─ [0]: 'text'
           └─ [1]: torch.float16
    """)


def test_an_object_that_is_not_registered_is_marked_the_line_stands_below_and_rows_tell_what_they_are():
    assert drawn([Opaque(), X, Opaque()]) == lines("""
        tree: list of 3
        ├─ [0]: ✗ Opaque, not registered: 2 tensors, 72 bytes
        ├─ [1]: float32[2, 3]
        └─ [2]: ✗ Opaque, not registered: 2 tensors, 72 bytes

        ✗ Register it first:
            register(Opaque, children=['a', 'b'])
    """)
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


def test_equal_layers_are_one_row_with_what_is_below_also_where_two_kinds_take_turns():
    layers = [{"k": X, "v": X.long()} for _ in range(24)]
    in_turn = {f"{kind}_{i}": X if kind == "key" else X[0] for i in range(3) for kind in ("key", "value")}
    assert drawn({"a": layers, "b": [X, X], "c": [X, X, X, X.long(), X, X, X, X], "d": in_turn}) == lines("""
        tree: dict of 4
        ├─ ['a']: list of 24
        │  └─ [0] … [23]: 24 × dict of 2
        │     ├─ ['k']: float32[2, 3]
        │     └─ ['v']: int64[2, 3]
        ├─ ['b']: list of 2
        │  ├─ [0]: float32[2, 3]
        │  └─ [1]: float32[2, 3]
        ├─ ['c']: list of 8
        │  ├─ [0] … [2]: 3 × float32[2, 3]
        │  ├─ [3]: int64[2, 3]
        │  └─ [4] … [7]: 4 × float32[2, 3]
        └─ ['d']: dict of 6
           ├─ ['key_0'] … ['key_2']: 3 × float32[2, 3]
           └─ ['value_0'] … ['value_2']: 3 × float32[3]
    """)


def test_a_cache_outside_and_inside_of_the_block():
    cache = cache_of(4)
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


def test_rows_are_cut_at_the_width_an_object_that_holds_itself_ends_and_a_repr_that_fails_is_named():
    text = drawn(["a" * 200], width=40)
    assert max(map(len, text.split("\n"))) == 40
    assert text.endswith("…")
    tree = [1]
    tree.append(tree)
    assert drawn(tree).endswith("└─ [1]: … (the same object again)")

    class Shy:
        def __repr__(self):
            raise ValueError

    register_class_flattening(Opaque, lambda o: ([o.a], Shy()), lambda children, _: Opaque(), None)
    try:
        assert "its __repr__ raised ValueError" in drawn(Opaque(), width=200)
        assert drawn([Shy()], width=200).endswith("Shy, a leaf without tensors")
    finally:
        unregister_class_flattening(Opaque)


DIFFERENCES = {
    "length": ([1, 2], [1], [("tree", "list of 2", "list of 1")]),
    "class": ([1, (2,)], [1, [2]], [("tree[1]", "tuple of 1", "list of 1")]),
    "leaf": ({"a": 1}, {"a": [1]}, [("tree['a']", "a leaf", "list of 1")]),
    "keys": (
        {"a": 1, "b": 2},
        {"a": 1, "c": 3},
        [("tree['b']", "a leaf", "not there"), ("tree['c']", "not there", "a leaf")],
    ),
    "order": ({"a": 1, "b": 2}, {"b": 1, "a": 2}, [("tree", "in the order ['a'], ['b']", "['b'], ['a']")]),
    "static": ([HiddenState(1, 5)], [HiddenState(1, 6)], [("tree[0]", "static [5]", "static [6]")]),
    "field": (HiddenState([1]), HiddenState(1), [("tree.hidden", "list of 1", "a leaf")]),
    "call": (((1,), {"y": [1]}), ((1,), {"y": [1, 2]}), [("kwargs['y']", "list of 1", "list of 2")]),
}


@pytest.mark.parametrize(("first", "second", "expected"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_each_difference_has_its_place(first, second, expected):
    texts = [str(pytree.tree_structure(tree)) for tree in (first, second)]
    assert placed(compare_specs(first, second)) == expected
    assert placed(compare_spec_texts(*texts, ("first", "second"))) == expected


def test_named_tuples_are_told_apart_and_the_text_shows_both_values_under_the_path():
    assert placed(compare_specs(Pair(1, [2]), Pair(1, 2))) == [("tree.right", "list of 1", "a leaf")]
    (found,) = compare_specs([1, 2], (1, 2), name="outputs", names=("exported", "called"))
    assert str(found) == "outputs\n    exported: list of 2\n    called:   tuple of 2"
    with pytest.raises(InvalidArgumentError, match="names must be a pair"):
        compare_specs(1, 2, names=("one",))


@given(nests())
def test_specs_differ_exactly_when_there_is_a_difference(planted):
    spec, other = pytree.tree_structure(planted.tree), pytree.tree_structure([planted.tree, 1])
    assert compare_specs(spec, spec) == []
    assert bool(compare_specs(spec, other)) == (spec != other)


def test_a_program_is_compared_by_its_inputs_and_caches_by_the_names_of_their_leaves():
    x = torch.ones(2)
    program = torch.export.export(module_class("Takes", lambda self, x, y: x)(), (x,), {"y": {"a": x + 1}})
    assert compare_specs(program, ((x,), {"y": {"a": x}})) == []
    assert placed(compare_specs(program, ((x,), {"y": x}))) == [("kwargs['y']", "dict with ['a']", "a leaf")]
    with register_flattening_functions(patch_transformers=True):
        found = compare_specs({"past": cache_of(1)}, {"past": cache_of(2)})
    assert placed(found) == [(f"tree['past']['{part}_1']", "not there", "a leaf") for part in ("key", "value")]


@pytest.mark.parametrize("text", ["", "TreeSpec", "TreeSpec(list, None, [*)", "PyTreeSpec([*, *])"])
def test_a_text_that_is_no_spec_gives_none(text):
    """A future torch may print another form."""
    assert compare_spec_texts(text, text, ("a", "b")) is None
