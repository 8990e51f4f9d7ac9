"""Flatten the caches of transformers: every layer class, its leaves and its static part."""
