"""Which rows of each global batch a rank gets."""

import itertools
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from roundpipe_runtime import ConfigError
from roundpipe_runtime.distributed.replicas.sampler import ReplicaBatchSampler, collate_with_empty


def parts_of(batches, replicas, size):
    """What each rank gets of each batch."""
    samplers = [ReplicaBatchSampler(batches, replicas=replicas, rank=rank, size=size) for rank in range(size)]
    return list(zip(*samplers, strict=True))


def groups(batch, replicas):
    """The groups of a batch, as torch splits."""
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
    for batch, parts in zip(batches, parts_of(batches, replicas, size), strict=True):
        assert joined(parts, replicas, size, len(batch)) == batch


@given(rows=st.integers(0, 30), replicas=st.integers(1, 8), size=st.integers(1, 8))
def test_the_groups_do_not_depend_on_the_number_of_ranks(rows, replicas, size):
    batch = list(range(rows))
    for rank, part in enumerate(parts_of([batch], replicas, size)[0]):
        own = range(rank, replicas, size)
        cut = groups(part, len(own)) if own else []
        assert cut == [groups(batch, replicas)[group] for group in own]


def test_samplers_of_torch_and_the_last_batch():
    def drawn(size):
        shuffled = RandomSampler(range(7), generator=torch.Generator().manual_seed(3))
        batches = list(BatchSampler(shuffled, batch_size=6, drop_last=False))
        assert [len(batch) for batch in batches] == [6, 1]
        return [
            joined(parts, 3, size, len(batch)) for batch, parts in zip(batches, parts_of(batches, 3, size), strict=True)
        ]

    assert drawn(1) == drawn(2) == drawn(3)
    assert sorted(itertools.chain(*drawn(2))) == list(range(7))
    assert parts_of([[4]], 3, 3)[0] == ([4], [], [])


def test_a_loader_gives_a_rank_without_rows_an_empty_batch():
    data = [{"x": torch.full((2,), float(row)), "label": row} for row in range(5)]
    batches = BatchSampler(SequentialSampler(data), batch_size=4, drop_last=False)
    sampler = ReplicaBatchSampler(batches, replicas=2, rank=1, size=2)
    assert len(sampler) == 2
    first, last = DataLoader(data, batch_sampler=sampler, collate_fn=collate_with_empty(default_collate, data[0]))
    assert first["x"].tolist() == [[2, 2], [3, 3]]
    assert first["label"].tolist() == [2, 3]
    assert (last["x"].shape, last["label"].shape) == ((0, 2), (0,))


def test_a_dataset_of_the_library_datasets():
    """It takes lists of rows, empty ones also."""
    data = pytest.importorskip("datasets").Dataset.from_dict({"x": [[0.0], [1.0], [2.0]]}).with_format("torch")
    batches = BatchSampler(SequentialSampler(data), batch_size=2, drop_last=False)
    sampler = ReplicaBatchSampler(batches, replicas=2, rank=1, size=2)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate_with_empty(default_collate, data[0]))
    assert [batch["x"].tolist() for batch in loader] == [[[1.0]], []]


class TwoRanks:
    """The ranks of a pipeline, of which the other one states the digest of other rows."""

    def __init__(self, other=None):
        self.rank, self.size, self.other = 0, 2, other
        self.calls = 0

    def exchange(self, value):
        self.calls += 1
        return [value, self.other or value]


def test_a_pipeline_has_the_numbers():
    ranks = TwoRanks()
    sampler = ReplicaBatchSampler([[1, 2, 3], [4]], types.SimpleNamespace(replicas=2, ranks=ranks))
    assert list(sampler) == [[1, 2], [4]]
    assert (list(sampler), ranks.calls) == ([[1, 2], [4]], 2)


def test_ranks_that_draw_other_rows_are_refused():
    sampler = ReplicaBatchSampler([[1, 2]], types.SimpleNamespace(replicas=2, ranks=TwoRanks("another")))
    with pytest.raises(
        ConfigError, match=r"Rank 1 draws different rows[\s\S]*generator=torch.Generator\(\).manual_seed\(0\)"
    ):
        next(iter(sampler))


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
