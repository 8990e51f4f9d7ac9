"""Rows that are cut along their tokens over processes: loss, gradients and weights of the reference model."""

import pytest

from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow
MODULE = "tests.runtime.distributed.long_rows_ranks"


@pytest.fixture(scope="module", params=[2, 3])
def found(request):
    return run_ranks(f"{MODULE}:in_ranks", request.param, timeout=240)


@pytest.mark.parametrize("name", ["llama", "queries share keys", "tied", "short rows", "adapters"])
def test_trainings_are_those_of_whole_rows(found, name):
    """Steps with odd lengths, rows that end early, and tokens without labels, in float64."""
    if name == "adapters" and len(found) == 3:
        pytest.skip("this model has four heads, which three processes cannot share")
    for rank in found:
        one = rank[name]
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-6)  # the model's loss is in float32
        assert one["distance"] < 1e-6
        assert not one["whole"]
        assert one["attention"]
        assert one["sent"] > 0
    assert all(rank[name]["losses"] == found[0][name]["losses"] for rank in found)


def test_each_run_has_the_same_bits(found):
    assert all(rank["again"]["is the same"] for rank in found)


def test_each_device_has_its_share_of_the_activations():
    for own, whole in run_ranks(f"{MODULE}:memory", 2, timeout=100):
        assert 0.45 * whole < own < 0.6 * whole


def test_an_error_of_one_process_ends_the_call_of_all():
    ranks = run_ranks(f"{MODULE}:failures", 2, timeout=100)
    kinds = [rank["layer"][0] for rank in ranks]
    assert kinds == ["DistributedError", "KeyError"]
    assert "Rank 1 failed" in ranks[0]["layer"][1]
    for rank in ranks:
        assert rank["gradients"] == 0
        assert rank["batches"][0] == "DistributedError"
        assert "the batch is" in rank["batches"][1]
        assert rank["next"][0] == pytest.approx(rank["next"][1], rel=1e-6)


def test_what_cannot_be_cut_is_refused_in_one_line():
    for rank in run_ranks(f"{MODULE}:refusals", 2, timeout=100):
        assert {kind for kind, _ in rank.values()} <= {"ConfigError", "StageError"}
        texts = {name: text for name, (_, text) in rank.items()}
        assert "4 query heads and 1 key/value heads, which 2 processes cannot share" in texts["heads"]
        assert "output_router_logits = False" in texts["router"]
        assert "one device in each process, found 2" in texts["devices"]
        assert "padded on the left" in texts["left"]
        assert "Labels of padding would be trained" in texts["padding"]
        assert "also has position_ids" in texts["positions"]
        assert "attends to 8 tokens of a row of 12" in texts["window"]
