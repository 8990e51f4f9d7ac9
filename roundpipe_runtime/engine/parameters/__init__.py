"""Copy parameters to a device, and allocate the memory of their gradients."""
