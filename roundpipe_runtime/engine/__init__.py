"""The execution engine runs the layers of a model on devices, and adds the gradients to the parameters."""
