"""How far quantised outputs are apart, by numbers that can be worked out by hand."""

import math

import pytest
import torch

from yobx_flatten import InvalidArgumentError, Quantization
from yobx_flatten.export.proof.quality import Distance

ALLOWED = {"weights": "int8", "block_size": 0, "allowed": 1.01}


def measured(expected, found):
    distance = Distance()
    distance.add(expected, found)
    return distance.quality(**ALLOWED)


def test_outputs_without_scores_are_compared_by_size():
    """One apart, by 0.5 on average, and more than the spread; integers and empty tensors state nothing."""
    ints, empty = torch.tensor([1, 2]), torch.zeros(0)
    expected = {"hidden": torch.tensor([3.0, 4.0]), "ids": ints, "empty": empty}
    quality = measured(expected, {"hidden": torch.tensor([3.0, 5.0]), "ids": ints + 1, "empty": empty})
    assert (quality.max_difference, quality.mean_difference) == (1, 0.5)
    assert quality.relative_difference == pytest.approx(math.sqrt(1 / (0.5**2 + 0.5**2)))
    assert (quality.agreement, quality.perplexity_ratio) == (None, None)
    assert str(quality) == "int8, one scale per output: max difference 1.0e+00; mean 5.0e-01, 141.4% of the outputs"
    same = measured(expected, expected)
    assert (same.ok, same.relative_difference) == (True, 0)


def test_outputs_that_are_not_finite_are_refused():
    """NaN is no small difference, whatever the sums are."""
    quality = measured({"hidden": torch.ones(2)}, {"hidden": torch.tensor([1.0, math.nan])})
    assert (quality.ok, quality.max_difference) == (False, math.inf)


def test_scores_of_padding_alone_state_nothing():
    """No position is left, so no greedy token can differ."""
    quality = measured({"logits": torch.zeros(1, 2, 5)}, {"logits": torch.ones(1, 2, 5)})
    assert (quality.positions, quality.agreement, quality.divergence, quality.ok) == (0, None, None, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "int3"}, r'weights must be "int8", "int4" or "keep", found \'int3\''),
        ({"tokens": [1, 2, 3]}, "list"),
    ],
)
def test_options_that_are_none_are_named(options, words):
    """Before anything is exported."""
    with pytest.raises(InvalidArgumentError, match=words):
        Quantization(**options)
