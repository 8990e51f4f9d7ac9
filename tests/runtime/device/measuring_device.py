"""A virtual device that counts the memory of what is computed on it, not only of what is copied to it."""

from roundpipe_runtime import VirtualDevice
from roundpipe_runtime.estimate.footprint import Footprint


class MeasuringDevice(VirtualDevice):
    """Every tensor that a stage has here counts: copies, activations, gradients, what an operation needs."""

    def __init__(self, name: str = "virtual:0", **options) -> None:
        super().__init__(name, **options)
        self.footprint = Footprint()

    def allocate(self, like):
        tensor = super().allocate(like)
        self.footprint.count(tensor)
        return tensor

    def computing(self, after=None):
        return self.footprint
