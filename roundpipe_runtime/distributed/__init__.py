"""Train one model in many processes, with results bitwise identical to one process.

A batch is split into R groups of rows, for any number N of ranks. Group g runs on rank g modulo N. As soon as the
gradients of a layer are complete, the ranks exchange these gradients. Each rank sums a part of the gradients over all
groups, always in ascending order of the groups. When all ranks have succeeded, the sums are scaled and added to the
gradients of the parameters.
"""
