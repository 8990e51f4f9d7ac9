"""Run the layers of a model on devices, and add the gradients to the parameters."""
