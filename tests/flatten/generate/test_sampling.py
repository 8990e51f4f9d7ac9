"""Which token comes next, against what transformers makes of the same scores."""

import pytest
import torch

from yobx_flatten import InvalidArgumentError, Sampling
from yobx_flatten.generate.sampling import TokenChooser, probabilities


def scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.9, 1.0])
def test_what_is_drawn_from_is_what_transformers_draws_from(temperature, top_k, top_p):
    """Temperature, then top_k, then top_p: the warpers of transformers in their order."""
    warpers = pytest.importorskip("transformers")
    expected = warpers.TemperatureLogitsWarper(temperature)(None, scores()) if temperature != 1.0 else scores()
    if top_k is not None:
        expected = warpers.TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None and top_p < 1.0:
        expected = warpers.TopPLogitsWarper(top_p)(None, expected)
    found = probabilities(scores(), Sampling(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(found, expected.softmax(-1))


def test_greedy_takes_the_likeliest_and_ignores_the_rest():
    assert TokenChooser(Sampling(temperature=9.0))(scores()).tolist() == scores().argmax(-1).tolist()


def test_a_seed_makes_draws_repeatable_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()

    def drawn(seed):
        choose = TokenChooser(Sampling(do_sample=True, seed=seed))
        return [choose(scores()).tolist() for _ in range(5)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_draws_have_the_probabilities():
    """Of 4000 draws, a token of probability 1/4 is drawn about 1000 times."""
    choose = TokenChooser(Sampling(do_sample=True, seed=0))
    row = torch.tensor([[0.25, 0.75]]).log().expand(4000, 2)
    assert abs(int((choose(row) == 0).sum()) - 1000) < 120


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0}, "temperature must be a number above 0, found the int 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top_k must be an int of 1 or more"),
        ({"top_k": True}, "top_k must be"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Sampling(**options)
