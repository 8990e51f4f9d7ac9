"""Groups of rows in one process, sums over ranks, what they send, and samplers of their rows."""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_runtime.device.protocol import NOW
from roundpipe_runtime.distributed.ranks.alarm import Alarm, Process
from roundpipe_runtime.distributed.replicas.reduction import Reduction, ReductionPlan, groups_of, rows_of_rank
from roundpipe_runtime.distributed.replicas.sampler import ReplicaBatchSampler, collate_with_empty
from roundpipe_runtime.distributed.weights import RankStore, pieces, shards
from roundpipe_runtime.errors import ConfigError, RoundPipeWarning, StageError
from roundpipe_runtime.optim.layer_contents import scan
from roundpipe_runtime.pipeline import roundpipe
from tests.cases import examples
from tests.runtime.distributed.processes import run_ranks
from tests.runtime.distributed.thread_ranks import ThreadRanks, in_threads
from tests.runtime.small import batch, near, near_gradients, small_model

MEAN = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
MSE = nn.functional.mse_loss


def run(pipeline, inputs, labels, **options):
    return pipeline.forward_backward((inputs,), label=labels, loss_fn=MSE, run_config=MEAN, **options)


@pytest.mark.parametrize("replicas", [1, 2, 3, 9])
def test_groups_have_the_outputs_and_the_gradient_of_the_whole_batch(wrap, replicas):
    (inputs, labels), model, plain = batch(7), small_model(), small_model()
    inputs.requires_grad_()
    expected = plain(inputs)
    loss = MSE(expected, labels)
    loss.backward()
    exact, inputs.grad = inputs.grad, None
    pipeline = wrap(model, replicas=replicas)
    found, outputs = run(pipeline, inputs.detach(), labels, return_outputs=True)
    assert near(found, loss.detach())
    assert near(outputs, expected.detach())
    assert near_gradients(model, plain)
    assert (pipeline.replicas, pipeline.mesh) == (replicas, None)
    model.zero_grad()
    loss = MSE(pipeline(inputs, roundpipe_run_config=MEAN), labels)
    loss.backward(retain_graph=True)
    assert near(inputs.grad, exact)
    assert near_gradients(model, plain)
    if replicas > 1:
        with pytest.raises(StageError, match="one backward"):
            loss.backward()


def test_sums_of_several_batches_may_wait(wrap):
    model, plain = small_model(), small_model()
    pipeline = wrap(model, replicas=2)
    for seed in (1, 2):
        inputs, labels = batch(7, seed)
        MSE(plain(inputs), labels).backward()
        with pipeline.no_sync() if seed == 1 else torch.enable_grad():
            run(pipeline, inputs, labels)
        if seed == 1:
            assert all(parameter.grad is None for parameter in model.parameters())
    assert near_gradients(model, plain)


@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_gradients_are_clipped_as_torch_does(wrap, norm_type, replicas):
    model, plain = small_model(), small_model()
    inputs, labels = batch(6)
    MSE(plain(inputs), labels).backward()
    pipeline = wrap(model, replicas=replicas)
    run(pipeline, inputs, labels)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    assert near(pipeline.clip_grad_norm_(0.01, norm_type), expected)
    assert near_gradients(model, plain)


def test_a_call_that_groups_cannot_make_is_refused(wrap):
    model, plain = small_model(), small_model()
    pipeline = wrap(model, replicas=2)
    inputs, labels = batch(6)
    with pytest.raises(ConfigError, match="computes gradients, but gradients are switched off here"), torch.no_grad():
        run(pipeline, inputs, labels)
    MSE(plain(inputs), labels).backward()
    run(pipeline, inputs, labels)
    assert near_gradients(model, plain)
    with pytest.raises(ConfigError, match=r"norm_type must be positive, like 2\.0, found 0"):
        pipeline.clip_grad_norm_(1.0, 0)
    inputs[2] = math.nan
    run(pipeline, inputs, labels)
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan, which cannot be clipped"):
        pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert math.isnan(pipeline.clip_grad_norm_(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be a whole number of at least 1, found 0"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype must be a floating dtype"),
        ({"mesh": "cpu"}, r'init_device_mesh\("cpu", \(torch.distributed.get_world_size\(\),\)\)'),
    ],
)
def test_an_option_that_cannot_be_is_refused(wrap, options, message):
    with pytest.raises(ConfigError, match=message):
        wrap(small_model(), **options)


def test_a_pipeline_without_a_mesh_warns_in_a_group(wrap, monkeypatch):
    """Once: each process would train a model of its own."""
    monkeypatch.setattr(roundpipe, "_world_size", lambda: 2)
    pipeline = wrap(small_model())
    with pytest.warns(RoundPipeWarning, match=r'mesh=init_device_mesh\("cpu"'):
        run(pipeline, *batch(6))
    run(pipeline, *batch(6))
    with OptimizerCtx():
        assert len(list(pipeline.parameters())) == len(list(pipeline.model.parameters()))


def test_the_auxiliary_loss_of_groups_is_that_of_the_whole_batch():
    pytest.importorskip("transformers")
    from tests.runtime.distributed.trainings import model

    plain, ours = model("mixtral")(), model("mixtral")()
    tokens = torch.randint(3, 96, (7, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    rows = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
    expected = plain.train()(**rows)
    expected.loss.backward()
    pipeline = wrap_model_to_roundpipe(ours, lower_threshold=0, devices="virtual:2", replicas=3, check=False).train()
    loss, output = pipeline.forward_backward(input_kwargs=rows, return_outputs=True)
    assert near(loss, expected.loss.detach())
    assert near(output.aux_loss, expected.aux_loss.detach())
    assert near_gradients(ours, plain)


@given(rows=st.integers(1, 20), shard_count=st.integers(1, 5), copies=st.integers(1, 4))
def test_pieces_are_a_partition_of_the_rows(rows, shard_count, copies):
    matrix = torch.arange(rows * 2).reshape(rows, 2)
    assert torch.equal(torch.cat(pieces(matrix, shard_count, copies)).sort(0).values, matrix)
    assert torch.equal(torch.cat(shards(matrix, shard_count)), matrix)


def reduced(model, gradients, replicas, ranks, wire_dtype):
    """The sums of one rank, as rows of the targets, by the name of the parameter."""
    store = RankStore(model, None, ranks)
    contents = scan(list(model))
    reduction = Reduction(ReductionPlan(contents, store, replicas, wire_dtype), ranks)
    for turn, group in enumerate(groups_of(ranks.rank, ranks.size, replicas)):
        for layer in contents:
            landed = {p: (gradients[group][p].clone(), NOW) for p in layer.parameters() if p in gradients[group]}
            reduction.land(turn, layer.index, landed)
    reduction.run()
    had = set().union(*ranks.exchange(reduction.had))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(p)]: rows for layer in reduction.results(1.0, had) for p, rows in layer.items()}


@settings(max_examples=examples(25), deadline=None)
@given(
    replicas=st.integers(1, 5), num_shards=st.integers(1, 3), num_copies=st.integers(1, 2), is_short=st.booleans(),
    missing=st.booleans(),
)  # fmt: skip
def test_the_fold_has_the_bits_of_a_loop_over_groups(replicas, num_shards, num_copies, is_short, missing):
    """For any mesh: the contribution of each group, rounded once, added in ascending order."""
    size = num_shards * num_copies
    replicas = max(replicas, size)
    torch.manual_seed(replicas)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    wire_dtype = torch.bfloat16 if is_short else None
    gradients = [{p: torch.randn_like(p) for p in model.parameters()} for _ in range(replicas)]
    if missing and replicas > 1:
        del gradients[0][model[0].weight]  # no row of the first group came here
    expected = {}
    for name, parameter in model.named_parameters():
        total = None
        for group in gradients:
            part = group.get(parameter, torch.zeros_like(parameter))
            part = part.to(wire_dtype).float() if wire_dtype is not None and replicas > 1 else part
            total = part.clone() if total is None else total + part
        expected[name] = total

    def run(wire, rank):
        return reduced(model, gradients, replicas, ThreadRanks(wire, rank, num_shards, num_copies), wire_dtype)

    for rank, found in enumerate(in_threads(size, run)):
        for name, total in expected.items():
            rows = total if total.dim() < 2 else shards(total, num_shards)[rank % num_shards]
            assert torch.equal(found[name], rows.detach())


@given(stops=st.lists(st.integers(0, 4), min_size=3, max_size=3))
@settings(max_examples=examples(20), deadline=None)
def test_ranks_that_stop_anywhere_do_not_wait_for_each_other(stops):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))

    def run(wire, rank):
        ranks = ThreadRanks(wire, rank, 3)
        contents = scan(list(model))
        reduction = Reduction(ReductionPlan(contents, RankStore(model, None, ranks), 3, None), ranks)
        thread = threading.Thread(target=reduction.run)
        thread.start()
        for layer in list(reversed(contents))[: stops[rank]]:
            reduction.land(0, layer.index, {p: (torch.ones_like(p), NOW) for p in layer.parameters()})
        begun[rank] = reduction.stop()
        verdict.wait(20)
        reduction.finish(max(begun))
        thread.join(20)
        return not thread.is_alive()

    begun = [0, 0, 0]
    verdict = threading.Barrier(3)
    assert in_threads(3, run) == [True, True, True]


def sent_in_a_step():
    """Bytes of gradients and of weights that a rank sends in its second step, and the numbers that are trained."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(192, 384), nn.ReLU(), nn.Linear(384, 192)).to(torch.bfloat16)
    mesh, config = dist.init_device_mesh("cpu", (dist.get_world_size(),)), RoundPipeRunConfig(num_microbatch=3)
    model = RoundPipe(layers, torch.float32, devices="virtual:1", name="counted", mesh=mesh, model_run_config=config)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(6, 192, dtype=torch.bfloat16)
    for _ in range(2):
        before = dict(model.ranks.sent)
        model.forward_backward((x,), label=x, loss_fn=lambda out, label: ((out - label) ** 2).sum())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.synchronize()
    found = {channel: model.ranks.sent[channel] - before.get(channel, 0) for channel in ("data", "weights")}
    model.close()
    return {**found, "numbers": sum(p.numel() for p in model.parameters())}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_send_shards_once_per_step(size):
    """The shards of the others: gradients in float32, weights in bfloat16, once in three microbatches, within 2 %."""
    found = run_ranks("tests.runtime.distributed.test_one_process:sent_in_a_step", size)
    of_others = (size - 1) / size * found[0]["numbers"]
    for rank in found:
        assert rank["data"] == pytest.approx(4 * of_others, rel=0.02)
        assert rank["weights"] == pytest.approx(2 * of_others, rel=0.02)


@contextlib.contextmanager
def sleeping():
    with subprocess.Popen(["sleep", "60"]) as child:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        yield child, Process(Process.here().machine, child.pid, started)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through /proc")
def test_a_process_that_is_stopped_may_go_on_until_its_time_is_over():
    alarm = Alarm(None, 0, 1)
    with sleeping() as (child, other):
        alarm._processes, alarm.patience = {0: Process.here(), 1: other, 2: other._replace(started="0")}, 2.0
        for _ in range(3):
            child.send_signal(signal.SIGSTOP)
            wait_for(other.is_stopped)
            for _ in range(4):
                alarm._end_stopped()
            assert alarm._stopped == {1: 2.0}
            child.send_signal(signal.SIGCONT)
            wait_for(lambda: not other.is_stopped())
            alarm._end_stopped()
            assert alarm._stopped == {}
            assert child.poll() is None
        child.send_signal(signal.SIGSTOP)
        wait_for(other.is_stopped)
        for _ in range(5):
            alarm._end_stopped()
        assert child.wait(10) == -signal.SIGKILL
        alarm._end_stopped()
        assert (alarm.seconds_stopped(1), alarm.seconds_stopped(2)) == (2.5, 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through /proc")
def test_a_process_has_ended_before_its_parent_hears_of_it():
    """Its number is still taken then; and another process with the number of one that ended is not that one."""
    here = Process.here()
    with sleeping() as (child, other):
        assert not other.has_ended()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert other.has_ended()
        child.wait()
        assert other.has_ended()
    assert not here.has_ended()
    assert not here.is_stopped()
    assert here._replace(started="0").has_ended()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def parts_of(batches, replicas, size):
    samplers = [ReplicaBatchSampler(batches, replicas=replicas, rank=rank, size=size) for rank in range(size)]
    return list(zip(*samplers, strict=True))


def groups(batch, replicas):
    return [part.tolist() for part in torch.tensor(batch, dtype=torch.long).tensor_split(replicas)]


def joined(parts, replicas, size, count):
    """The rows of all ranks in the order of the groups: each rank cuts its rows again into its groups."""
    sizes = [len(group) for group in groups(list(range(count)), replicas)]
    left = [list(part) for part in parts]
    rows = []
    for group in range(replicas):
        own = left[group % size]
        rows += own[: sizes[group]]
        del own[: sizes[group]]
    assert not any(left)
    return rows


@given(
    batches=st.lists(st.lists(st.integers(0, 99), max_size=17), max_size=3),
    replicas=st.integers(1, 9),
    size=st.integers(1, 6),
)
def test_the_union_and_the_order_of_rows_are_those_of_the_batch(batches, replicas, size):
    for rows, parts in zip(batches, parts_of(batches, replicas, size), strict=True):
        assert joined(parts, replicas, size, len(rows)) == rows
        for rank in range(size if size <= replicas else 0):
            assert [rows[row] for row in rows_of_rank(len(rows), rank, size, replicas)] == parts[rank]


def test_samplers_of_torch_and_the_last_batch():
    def drawn(size):
        shuffled = RandomSampler(range(7), generator=torch.Generator().manual_seed(3))
        batches = list(BatchSampler(shuffled, batch_size=6, drop_last=False))
        assert [len(batch) for batch in batches] == [6, 1]
        parts = parts_of(batches, 3, size)
        return [joined(part, 3, size, len(batch)) for batch, part in zip(batches, parts, strict=True)]

    assert drawn(1) == drawn(2) == drawn(3)
    assert sorted(itertools.chain(*drawn(2))) == list(range(7))
    assert parts_of([[4]], 3, 3)[0] == ([4], [], [])


def loaded(data, batch_size):
    """The batches of the second of two ranks."""
    batches = BatchSampler(SequentialSampler(data), batch_size=batch_size, drop_last=False)
    sampler = ReplicaBatchSampler(batches, replicas=2, rank=1, size=2)
    assert len(sampler) == 2
    return DataLoader(data, batch_sampler=sampler, collate_fn=collate_with_empty(default_collate, data[0]))


def test_a_loader_gives_a_rank_without_rows_an_empty_batch():
    first, last = loaded([{"x": torch.full((2,), float(row)), "label": row} for row in range(5)], 4)
    assert first["x"].tolist() == [[2, 2], [3, 3]]
    assert first["label"].tolist() == [2, 3]
    assert (last["x"].shape, last["label"].shape) == ((0, 2), (0,))


def test_a_dataset_of_the_library_datasets():
    """It takes lists of rows, empty ones also."""
    data = pytest.importorskip("datasets").Dataset.from_dict({"x": [[0.0], [1.0], [2.0]]}).with_format("torch")
    assert [batch["x"].tolist() for batch in loaded(data, 2)] == [[[1.0]], []]


def test_a_pipeline_has_the_numbers_and_ranks_that_draw_other_rows_are_refused():
    other, calls = [], []

    def exchange(digest):
        calls.append(digest)
        return [digest, *(other or [digest])]

    ranks = types.SimpleNamespace(rank=0, size=2, exchange=exchange)
    sampler = ReplicaBatchSampler([[1, 2, 3], [4]], types.SimpleNamespace(replicas=2, ranks=ranks))
    assert list(sampler) == list(sampler) == [[1, 2], [4]]
    assert len(calls) == 2
    other.append("another")
    message = r"Rank 1 draws different rows[\s\S]*generator=torch.Generator\(\).manual_seed\(0\)"
    with pytest.raises(ConfigError, match=message):
        next(iter(ReplicaBatchSampler([[1, 2]], types.SimpleNamespace(replicas=2, ranks=ranks))))


@pytest.mark.parametrize(
    ("numbers", "stated"),
    [
        ({}, "ReplicaBatchSampler(batches, model)"),
        ({"replicas": 2, "rank": 2, "size": 2}, "rank=2 must be from 0 to 1"),
        ({"replicas": 0, "rank": 0, "size": 1}, "replicas=0 at least 1"),
    ],
)
def test_numbers_that_cannot_be(numbers, stated):
    with pytest.raises(ConfigError) as caught:
        ReplicaBatchSampler([], **numbers)
    assert stated in str(caught.value)


def test_the_number_of_the_epoch_is_passed_on():
    seen = []
    inner = types.SimpleNamespace(set_epoch=seen.append)
    ReplicaBatchSampler(inner, replicas=1, rank=0, size=1).set_epoch(3)
    ReplicaBatchSampler(types.SimpleNamespace(sampler=inner), replicas=1, rank=0, size=1).set_epoch(4)
    ReplicaBatchSampler([], replicas=1, rank=0, size=1).set_epoch(5)
    assert seen == [3, 4]
