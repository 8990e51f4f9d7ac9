"""Run a pipeline stage on a device: its layers, the loss, and their gradients."""
