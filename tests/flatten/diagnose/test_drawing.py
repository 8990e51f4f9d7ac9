"""`explain` draws what torch makes of an object, in a form that a person reads."""

import dataclasses
import textwrap

import numpy
import torch
import transformers

from yobx_flatten import (
    explain,
    register,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)

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
