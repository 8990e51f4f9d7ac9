"""Cut a batch into groups, whatever the number of ranks. No process is involved here.

::

    batch of 7 rows, 4 groups      rows 0, 1 | 2, 3 | 4, 5 | 6       the sizes of torch.tensor_split
    2 ranks                        rank 0 runs groups 0 and 2: rows 0, 1, 4, 5; rank 1 runs groups 1 and 3: rows 2, 3, 6
    3 ranks                        rank 0 runs groups 0 and 3, ranks 1 and 2 one each
"""

from __future__ import annotations

import itertools


def group_sizes(rows: int, replicas: int) -> list[int]:
    """Return the rows of each group of a batch.

    >>> group_sizes(7, 4)
    [2, 2, 2, 1]
    """
    return [rows // replicas + (group < rows % replicas) for group in range(replicas)]


def groups_of(rank: int, size: int, replicas: int) -> range:
    """Return the groups that a rank runs, ascending.

    >>> list(groups_of(1, 2, 5))
    [1, 3]
    """
    return range(rank, replicas, size)


def num_turns(size: int, replicas: int) -> int:
    """Return how many groups the rank with the most of them runs, one after the other.

    >>> num_turns(2, 5)
    3
    """
    return -(-replicas // size)


def rows_of_rank(rows: int, rank: int, size: int, replicas: int) -> list[int]:
    """Return the rows of a global batch for one rank: the rows of its groups, group after group.

    A rank that cuts them again with ``torch.tensor_split`` into its number of groups has these groups.

    >>> rows_of_rank(7, 1, 2, 4)
    [2, 3, 6]
    """
    stops = list(itertools.accumulate(group_sizes(rows, replicas), initial=0))
    return [row for group in groups_of(rank, size, replicas) for row in range(stops[group], stops[group + 1])]
