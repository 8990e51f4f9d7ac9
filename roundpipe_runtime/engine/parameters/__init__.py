"""Parameters on a device, and the memory of their gradients."""
