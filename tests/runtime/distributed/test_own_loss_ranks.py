"""Losses that a Trainer computes of the rows of each process: gradients are their mean, as with DDP."""

import pytest

from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.extended)])
def found(request, tmp_path_factory):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    folder = tmp_path_factory.mktemp("trainer")
    return run_ranks("tests.runtime.distributed.own_loss_ranks:in_ranks", request.param, str(folder), timeout=240)


@pytest.mark.parametrize("name", ["function", "subclass"])
def test_numbers_are_those_of_the_trainer_with_ddp(found, name):
    for rank in found:
        logged, plain, distant = rank[name]
        assert len(plain) == 6
        assert logged == pytest.approx(plain, rel=1e-5)
        assert distant < 5e-6


def test_an_error_in_the_loss_of_one_process_ends_all(found):
    """With its rank and cause, while the others would wait for its gradients."""
    assert found[1]["failed"][0] == "KeyError"
    assert "a loss of one process" in found[1]["failed"][1]
    assert found[0]["failed"][0] == "DistributedError"
    assert "Rank 1 failed" in found[0]["failed"][1]


def test_more_groups_than_processes_are_refused(found):
    """Rows of a group in another process cannot be compared."""
    for rank in found:
        kind, text = rank["replicas"]
        assert kind == "ConfigError"
        assert "Leave replicas=4 out" in text


def test_trainers_of_trl_train_as_with_ddp(tmp_path):
    pytest.importorskip("trl", reason="these are its trainers")
    pytest.importorskip("peft", reason="the module with these trainings needs it")
    ranks = run_ranks("tests.runtime.distributed.own_loss_ranks:trl_in_ranks", 2, str(tmp_path), timeout=240)
    for rank in ranks:
        for ours, plain, distant in rank.values():
            assert len(plain) == 6
            for one, other in zip(ours, plain, strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
            assert distant < 1e-5
