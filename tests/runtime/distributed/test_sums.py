"""Groups, shards and the order of the sums, without processes: ranks are threads that exchange through a list."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe_runtime.device.protocol import NOW
from roundpipe_runtime.distributed.ranks.ranks import Ranks
from roundpipe_runtime.distributed.replicas.reduction import (
    Reduction,
    ReductionPlan,
    groups_of,
    rows_of_rank,
)
from roundpipe_runtime.distributed.weights import RankStore, clip_grad_norm, pieces, shards
from roundpipe_runtime.optim.layer_contents import scan
from tests.cases import examples
from tests.runtime.distributed.thread_ranks import ThreadRanks, in_threads


@given(rows=st.integers(0, 40), replicas=st.integers(1, 9), size=st.integers(1, 9))
def test_groups_do_not_depend_on_the_ranks(rows, replicas, size):
    size = min(size, replicas)
    groups = [part.tolist() for part in torch.arange(rows).tensor_split(replicas)]
    for rank in range(size):
        own = list(groups_of(rank, size, replicas))
        given_rows = rows_of_rank(rows, rank, size, replicas)
        cut = [part.tolist() for part in torch.tensor(given_rows, dtype=torch.int64).tensor_split(len(own))]
        assert cut == [groups[group] for group in own]


@given(rows=st.integers(1, 20), shard_count=st.integers(1, 5), copies=st.integers(1, 4))
def test_pieces_are_a_partition_of_the_rows(rows, shard_count, copies):
    matrix = torch.arange(rows * 2).reshape(rows, 2)
    found = pieces(matrix, shard_count, copies)
    assert torch.equal(torch.cat(found).sort(0).values, matrix)
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


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_is_that_of_torch(norm_type):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(7, 3), (4,), (2, 3, 2), ()]]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, parameter in zip(copies, parameters, strict=True):
        copy.grad = parameter.grad.clone()
    expected = nn.utils.clip_grad_norm_(copies, 1.0, norm_type)
    found = clip_grad_norm(parameters, Ranks(), 1.0, norm_type)
    torch.testing.assert_close(found, expected)
    for copy, parameter in zip(copies, parameters, strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad)


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
