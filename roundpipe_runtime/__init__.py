"""A pipeline runtime that trains models larger than the device: not there yet.

This package will cut a model into stages, keep its parameters on the host, and move stages and microbatches
through one or several devices, so that what a device must hold at a time is a stage and not the model. It will
use the registrations of `yobx_flatten` to split nested inputs and to join nested outputs.

Nothing of it is here today: the package is in the distribution so that its name, its typing marker and its
import rules (importing it starts no thread and touches no accelerator) are in place.
"""

__all__: list[str] = []
