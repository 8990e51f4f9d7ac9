"""Several processes train one model: the bits of one process, and errors that reach all of them."""

import os
import sys

import pytest

from tests.cases import cases
from tests.runtime.distributed.processes import run_ranks
from tests.runtime.distributed.trainings import CASES

pytestmark = pytest.mark.slow

# `make ranks` asks for fifty.
STEPS = int(os.environ.get("ROUNDPIPE_RANKS_STEPS", "2"))


# What three ranks cut in another way than two; all of it where there is time.
OF_THREE = [
    "llama", "mixtral, auxiliary loss", "backward by the caller, dropout", "more groups than ranks",
    "bfloat16 with masters", "accumulated on the rank", "lora, weights stay", "weights stay",
]  # fmt: skip
NAMES = {2: list(CASES), 3: list(CASES) if STEPS >= 50 else OF_THREE}


@pytest.fixture(scope="module", params=cases([2, 3], quick=[3]))
def world(request):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    return run_ranks(
        "tests.runtime.distributed.trainings:in_ranks", request.param, STEPS, NAMES[request.param],
        timeout=240 + 60 * STEPS,
    )  # fmt: skip


def test_ranks_have_the_bits_of_one_process(world):
    one = {name: digest for rank in world for name, digest in rank["one"].items()}
    assert set(one) == set(NAMES[len(world)])
    assert [rank["ranks"] for rank in world] == [one] * len(world)


def test_copies_of_shards_have_the_bits_of_one_process():
    pytest.importorskip("transformers")
    found = run_ranks("tests.runtime.distributed.trainings:in_copies", 4, "bfloat16 with masters")
    assert found == [[True]] * 4


@pytest.mark.parametrize(("where", "place"), [("layer", "layer 1 (Layer)"), ("loss", "loss"), ("argument", "loss_fn")])
def test_an_exception_on_one_rank_is_raised_on_all(world, where, place):
    found = [rank[f"fault: {where}"] for rank in world]
    assert found[-1]["error"][0] == ("ConfigError" if where == "argument" else "BadRowError")
    for other in found[:-1]:
        kind, text = other["error"]
        assert kind == "DistributedError"
        assert f"Rank {len(world) - 1} failed" in text
        assert place in text
    assert max(one["seconds"] for one in found) < 1
    assert all(one["unchanged"] and one["goes on"] for one in found)


def test_a_step_that_fails_on_one_rank_ends_on_all(world):
    found = [rank["step"] for rank in world]
    assert found[-1]["error"] == ["BadRowError", "a bad step"]
    assert all(f"The step function failed on rank {len(world) - 1}" in other["error"][1] for other in found[:-1])
    assert max(one["seconds"] for one in found) < 3


def test_an_infinity_in_one_shard_skips_the_step_on_all_ranks(world):
    assert [rank["infinity"] for rank in world] == [{"skipped": True, "scale": 2.0}] * len(world)


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor", "AdamW8bit"])
def test_an_optimizer_of_whole_matrices_is_refused(world, optimizer):
    for rank in world:
        kind, text = rank["refused"][optimizer]
        assert kind == "DistributedError"
        assert f'init_device_mesh("cpu", ({len(world)}, 1))' in text
        assert rank["refused"]["unchanged"]
        kind, text = rank["refused"]["whole parameters"]  # they get no gradient, so the optimizer would train nothing
        assert (kind, "with OptimizerCtx():" in text) == ("DistributedError", True)


@pytest.mark.parametrize(("what", "message"), [
    ("another model", "0.linear.weight is '(9, 9) torch.float32' on rank 1, and '(8, 8) torch.float32' on rank 0"),
    ("another call", "num_microbatch is 2 on rank 1, and 1 on rank 0"),
    ("another backward", "the call is 'backward' on rank 1, and 'forward_backward' on rank 0"),
])  # fmt: skip
def test_ranks_with_different_models_or_calls_are_refused(world, what, message):
    for rank in world:
        kind, text = rank["refused"][what]
        assert (kind, message in text) == ("DistributedError", True)


@pytest.mark.parametrize(
    "name", ["backward without rows", "evaluated alone", "weights of rank 0", "steps without the pipeline"]
)
def test_what_ranks_do_apart_leaves_them_alike(world, name):
    assert [rank[name] for rank in world] == [True] * len(world)


def test_a_rank_that_is_gone_is_named(world):
    for rank in world[:-1]:
        kind, text = rank["cut off"]["error"]
        assert kind == "DistributedError"
        assert f"Rank {len(world) - 1} is gone" in text
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in text
        assert rank["cut off"]["seconds"] < 10


def test_a_process_that_ends_in_a_call_ends_it_for_the_others():
    """Long before the timeout of the group, although their hooks wait 0.3 s each, also in a trial; it is named."""
    for (kind, text), seconds in run_ranks("tests.runtime.distributed.faults:killed", 3)[:2]:
        assert (kind, "Rank 2 is gone" in text) == ("DistributedError", True)
        assert seconds < 20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through /proc")
@pytest.mark.parametrize(
    ("is_alone", "stopped"),
    [
        pytest.param(False, 2, id="on one machine"),
        pytest.param(True, 2, id="alone on a machine"),
        pytest.param(True, 0, id="rank 0 alone on a machine"),
    ],
)
def test_a_process_that_is_stopped_in_a_call_ends_it_for_the_others(is_alone, stopped):
    """Its connections are open, and the timeout of the group is a minute; it is named after two seconds."""
    found = run_ranks("tests.runtime.distributed.faults:stopped", 3, 2.0, is_alone, stopped)
    assert found.pop(stopped) is None
    for (kind, text), seconds in found:
        assert kind == "DistributedError"
        assert f"Rank {stopped} is gone: its process was stopped (SIGSTOP) or did not answer for " in text
        assert 2.0 <= seconds < 30


@pytest.mark.parametrize("where", ["make", "load"])
def test_a_rank_that_ends_before_the_others_connect_to_it_is_reported(where, tmp_path):
    (kind, text), seconds = run_ranks("tests.runtime.distributed.faults:gone_early", 2, where, str(tmp_path))[0]
    assert (kind, "A rank is gone" in text) == ("DistributedError", True)
    assert seconds < 20
