"""Train one model in many processes, with results bitwise identical to one process.

::

    replicas    the batch is cut into R groups of rows, whatever the number of ranks; group g runs on rank g modulo N
    reduction   per layer, as its gradient lands: an all-to-all of shards, then a sum over the groups, ascending
    commit      one multiplication by the scale of the whole batch; layers descending within a parameter

Gradients are summed in the same order for every number of processes.
"""

from __future__ import annotations
