"""Texts in the tokens of a model, by which weights are rounded and folders are compared."""
