"""Train one model in many processes, with results bitwise identical to one process.

A batch is split into R row groups, for any number N of ranks; row group g runs on rank g modulo N. As soon as the
gradients of a layer are complete, the ranks exchange them, and each rank sums a part of the gradients over all row
groups, in ascending order for every number of ranks. When all ranks have succeeded, the sums are scaled, and added to
the gradients of the parameters.
"""
