"""RoundPipe(host_weights="shared"): one copy of the weights for all processes of a machine."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_runtime.distributed.weights.shared_store import first_of_shards, routes
from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


@given(machines=st.lists(st.integers(0, 3), min_size=1, max_size=8), copies=st.integers(1, 3))
def test_each_shard_comes_to_each_machine_once(machines, copies):
    """It is written there by a rank that steps it, or sent by one that writes it elsewhere to one that is there."""
    count = len(machines)
    machines = machines * copies
    writers = first_of_shards(machines, count)
    arrived = [(machines[receiver], shard) for shard, _, receiver in routes(machines, count)]
    assert sorted([*writers, *arrived]) == [(m, shard) for m in sorted(set(machines)) for shard in range(count)]
    assert all(rank % count == shard and machines[rank] == machine for (machine, shard), rank in writers.items())
    for shard, sender, _ in routes(machines, count):
        assert writers[machines[sender], shard] == sender


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What three ranks found, of which the first two are on one machine."""
    if sys.platform != "linux":
        pytest.skip("memory is shared through /proc")
    folder = tmp_path_factory.mktemp("shared")
    return run_ranks("tests.runtime.distributed.shared_ranks:in_ranks", 3, str(folder))


def test_processes_of_a_machine_have_their_parameters_in_the_same_memory(ranks):
    """Of no file system, so that nothing of it is left; another machine has its own."""
    first, second, other = (rank["memory"] for rank in ranks)
    assert first == second
    assert len(first) == len(other) == 1
    assert first != other
    assert all("/memfd:roundpipe (deleted)" in found for (found,) in (first, other))


def test_a_run_waits_for_rows_that_another_process_writes_late(ranks):
    """Weights are those of one process, bit by bit."""
    assert [rank["late writer"] for rank in ranks] == [True] * 3


def test_a_step_waits_for_a_forward_of_another_process(ranks):
    """It reads all layers as they were."""
    assert [rank["late reader"] for rank in ranks] == [True] * 3


def test_a_checkpoint_is_loaded_into_shared_weights(ranks):
    """Weights, moments and the step that follows are those of the training that was saved."""
    assert [rank["resumed"] for rank in ranks] == [True] * 3


def test_a_parameter_that_other_processes_would_not_see_is_refused(ranks):
    """On all ranks, with its name, before anything runs."""
    for number, rank in enumerate(ranks):
        kind, text = rank["refused"]["replaced"]
        assert kind == "DistributedError"
        assert "'0.linear.weight' was replaced after the processes of this machine began to share" in text
        assert number == 1 or "Rank 1 failed" in text


def test_a_mesh_without_shards_is_refused(ranks):
    """Each process would write all of the weights."""
    for rank in ranks:
        kind, text = rank["refused"]["whole"]
        assert (kind, 'init_device_mesh("cpu", (3,))' in text) == ("ConfigError", True)
