"""Ranks that hold successive stages of a model."""
