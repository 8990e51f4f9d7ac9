"""Train one model in many processes, with results bitwise identical to one process.

::

    replicas    a batch is split into R groups of rows, for any number N of ranks; group g runs on rank g modulo N
    reduction   when a layer's gradients are complete: ranks exchange shards, and add up the groups in ascending order
    commit      when all ranks have succeeded: the sums are scaled, and added to the gradients of the parameters

Gradients are summed in the same order for every number of processes.
"""

from __future__ import annotations
