"""A run from its inputs to its commit."""
