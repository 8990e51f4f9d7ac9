"""Stages of torch.distributed.pipelining that exchange registered objects, in processes connected by gloo."""

import pytest

from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow

RANKS = "tests.runtime.distributed.pipelining_ranks"


@pytest.fixture(scope="module")
def two():
    """What two processes show, rank by rank."""
    pytest.importorskip("transformers")
    return run_ranks(f"{RANKS}:two", 2)


@pytest.fixture(scope="module")
def one():
    return run_ranks(f"{RANKS}:one", 1)[0]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_gradients_are_those_of_one_process(two, schedule):
    """A registered dataclass with a static field crosses; loss, outputs and gradients are bitwise identical."""
    assert [rank["plain_stages"][schedule] for rank in two] == [True, True]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_stage_may_be_a_pipeline(two, schedule):
    """A RoundPipe in each stage gives the gradients of the whole model, bitwise."""
    assert [rank["roundpipe_stages"][schedule] for rank in two] == [True, True]


def test_an_output_of_transformers_crosses_with_its_cache(two):
    """Gradients come back through hidden states and keys."""
    assert [rank["with_a_cache"] for rank in two] == [True, True]


def test_a_forward_returns_the_joined_outputs_in_the_last_process(two):
    """Without gradients, before and after a training step; the other processes get None."""
    assert [rank["forward_alone"] for rank in two] == [True, True]


def test_each_process_gives_its_stages_keyword_arguments(two):
    """They are split like the rest, and a mean loss is the mean of the batch."""
    assert [rank["keyword_arguments"] for rank in two] == [True, True]


def test_an_unregistered_class_is_refused_in_all_processes(two):
    """The process of the stage names the class, the others the stage."""
    first, second = (rank["errors"]["unregistered"] for rank in two)
    assert first.startswith("UnregisteredObjectError: The output of stage 0: tree is a ")
    assert "register(Unregistered, children=['value'])" in first
    assert second.startswith("StageError: Stage 0, in another process, cannot be made: UnregisteredObjectError: ")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "twice",
            "ConfigError: The processes have the stages [0] (rank 0), [0] (rank 1). Each number, counted from 0, must",
        ),
        (
            "disagree",
            "ConfigError: The processes disagree on the pipeline:\n    rank 0: ScheduleGPipe, num_microbatch=2,",
        ),
    ],
)
def test_processes_that_do_not_fit_are_refused(two, case, told):
    """All of them raise the same error, before anything runs."""
    assert two[0]["errors"][case] == two[1]["errors"][case]
    assert two[0]["errors"][case].startswith(told)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("few rows", "SplitError: The example makes 1 microbatches, and the schedule runs 2."),
        ("uneven", "SplitError: args[0] is float32(3, 8) without gradient in microbatch 1, and float32(4, 8) without"),
        ("reads data", "StageError: Stage 0, a ReadsData, cannot be called on tensors without data: DataDependent"),
        ("rows of a batch", "SplitError: args[0] is float32(3, 8) without gradient in microbatch 0, and float32(4, 8)"),
    ],
)
def test_what_the_first_process_refuses(two, case, told):
    """The error states what was found and what was agreed."""
    assert two[0]["errors"][case].startswith(told)


def test_a_stage_can_state_its_output_instead_of_being_called(two):
    """A module whose code depends on data runs with `example_outputs`."""
    assert [rank["errors"]["told"] for rank in two] == [None, None]


def test_positional_arguments_are_those_of_the_first_process(two):
    """The error shows the call without them."""
    assert "pipeline.forward_backward(label=labels)" in two[1]["errors"]["arguments elsewhere"]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("bad", [0, 1])
def test_a_stage_that_fails_ends_the_batch_in_all_processes(two, schedule, bad):
    """Within a second: its own error there, its rank elsewhere; the next batch has the gradients of the one before."""
    found = [rank["failing"][f"{schedule}, rank {bad}"] for rank in two]
    assert found[bad] == ["ArithmeticError: a bad microbatch", True, True]
    assert found[1 - bad][0].startswith(f"DistributedError: Rank {bad} failed")
    assert found[1 - bad][0].endswith("ArithmeticError: a bad microbatch")
    assert found[1 - bad][1:] == [True, True]


def test_a_static_part_that_changes_is_an_error(one):
    """It is agreed on once; the error shows both."""
    assert (
        "The output of stage 0 for microbatch 1 has other classes or non-tensor values than the stages agreed on"
        in one["alone"]["static part"]
    )
    assert "agreed State(hidden=tensor, ids=tensor, depth=1)" in one["alone"]["static part"]
    assert "found  State(hidden=tensor, ids=tensor, depth=2)" in one["alone"]["static part"]


def test_sizes_that_change_are_an_error(one):
    """The tensor is named by its number, with both sizes."""
    assert "tensor 0 is float32(4, 16), and the stages agreed on float32(4, 8)" in one["alone"]["sizes"]


def test_a_loss_is_one_number(one):
    """Outputs with axes are not a loss."""
    assert one["alone"]["no number"].startswith(
        "LossError: The loss of microbatch 0 must be a 0-d tensor, found Tensor(4, 8)."
    )


def test_losses_of_microbatches_are_not_added_unasked(one):
    """A mean loss was multiplied by the number of microbatches, silently."""
    assert "the sum over microbatches is 2 times too large" in one["alone"]["no reduction"]
    assert 'loss_reduction="mean"' in one["alone"]["no reduction"]


def test_making_a_pipeline_runs_no_module(one):
    """Buffers, random numbers and counters stay as they were."""
    assert one["untouched"]
