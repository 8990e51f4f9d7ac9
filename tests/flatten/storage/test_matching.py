"""Which leaf is which input of a graph."""

import pytest

from yobx_flatten import make_dynamic_cache
from yobx_flatten.trees.naming import leaves_of, match, plain_names


@pytest.mark.parametrize(
    ("graph", "spellings", "expected"),
    [
        (["a", "b"], [["b"], ["a"]], {"a": 1, "b": 0}),
        (["past_key_w8_0"], [["past.0.key", "past.key_W8_0"]], {"past_key_w8_0": 0}),
        (["a"], [["b"], ["a"], ["c"]], {"a": 1}),
        (["linear", "cat"], [["logits"], ["present.0"]], {"linear": 0, "cat": 1}),
        (["logits", "cat"], [["logits"], ["present.0"]], {"logits": 0}),
        (["x", "y"], [["x"], ["1"]], {"x": 0, "y": 1}),
        (["cat", "logits"], [["logits"], ["present.0"]], {"logits": 0}),
        (["a", "z"], [["a"], ["b"], ["c"]], {"a": 0}),
        (["a.b", "a_b"], [["a_b"], ["a.b"]], {"a.b": 1, "a_b": 0}),
        ([], [["a"]], {}),
    ],
)  # fmt: skip
def test_names_come_first_then_the_order(graph, spellings, expected):
    """Exactly, then without regard to case and signs, then by place where there are no names."""
    assert match(graph, spellings) == expected


def test_keys_alone_are_what_torch_export_uses():
    """`past_key_values_key_0` once dots are underscores."""
    import torch

    cache = make_dynamic_cache([(torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1))])
    inputs = {"input_ids": torch.zeros(1), "past_key_values": cache}
    assert plain_names(inputs) == ["input_ids", "past_key_values.key_0", "past_key_values.value_0"]
    assert [leaf.sum().item() for leaf in leaves_of(inputs)] == [0, 0, 2]
