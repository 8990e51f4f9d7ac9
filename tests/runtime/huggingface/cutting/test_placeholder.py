"""Tests of roundpipe_runtime.huggingface.cutting.call_log."""

import pytest
import torch

from roundpipe_runtime.huggingface.cutting.stub import Key, NeedsValue, Placeholder, first_placeholder

KEY = Key(3, 0)


def test_a_placeholder_is_a_tensor_that_can_be_handed_on():
    """`isinstance`, identity, containers and the known form say nothing of the value."""
    made = Placeholder(KEY, torch.zeros(2, 5, dtype=torch.float16))
    assert isinstance(made, torch.Tensor)
    assert (made,)[0] is made
    assert (made.shape, made.dtype, made.device.type) == ((2, 5), torch.float16, "cpu")
    assert (made.size(1), made.dim(), len(made)) == (5, 2, 2)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: torch.nn.functional.linear(torch.ones(1, 5), x),
        lambda x: torch.cat([torch.ones(2, 5), x]),
        lambda x: torch.stack(tensors=[x]),
        lambda x: x[0],
        lambda x: x.to(torch.float64),
        lambda x: bool(x.any()),
        lambda x: x.requires_grad,
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.empty(2, 5).copy_(x),
    ],
)
def test_computing_with_a_placeholder_leaves_the_forward(operation):
    """Whatever reads or writes the value raises `NeedsValue`, which names the tensor."""
    with pytest.raises(NeedsValue) as caught:
        operation(Placeholder(KEY, torch.zeros(2, 5)))
    assert caught.value.key == KEY


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: torch.ones_like(x), torch.ones(2, 5, dtype=torch.float16)),
        (lambda x: torch.full_like(x, 3, dtype=torch.int64), torch.full((2, 5), 3)),
        (lambda x: x.new_zeros(4), torch.zeros(4, dtype=torch.float16)),
        (lambda x: x.new_tensor([7]), torch.tensor([7], dtype=torch.float16)),
    ],
)
def test_what_needs_the_form_only_is_made(operation, expected):
    made = operation(Placeholder(KEY, torch.zeros(2, 5, dtype=torch.float16)))
    assert type(made) is torch.Tensor
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)
    with pytest.raises(NeedsValue):
        operation(Placeholder(KEY, None))


def test_models_do_not_catch_it():
    """`except Exception` lets `NeedsValue` pass."""

    def careless():
        try:
            return Placeholder(KEY, torch.zeros(1)) * 2
        except Exception:
            return "caught"

    with pytest.raises(NeedsValue):
        careless()


def test_a_placeholder_is_found_among_leaves():
    """`first_placeholder` looks into lists and tuples."""
    made = Placeholder(KEY, None)
    assert first_placeholder([1, (torch.ones(1), [made])]) is made
    assert first_placeholder([1, torch.ones(1)]) is None
