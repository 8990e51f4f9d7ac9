"""Texts and conversations as rows of tokens."""
