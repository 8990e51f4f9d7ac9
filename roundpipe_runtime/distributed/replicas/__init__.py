"""Ranks that train the same model on different rows."""
