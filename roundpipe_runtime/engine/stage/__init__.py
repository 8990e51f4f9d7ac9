"""Run one pipeline stage on one device: the forward and backward of layers, and the loss."""
