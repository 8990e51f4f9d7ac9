"""Compute a layer again with the random numbers of its first run."""
