"""Run a stage: its layers, the loss, and their gradients."""
