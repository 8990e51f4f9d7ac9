"""Ranks that train the same model with other rows."""
