"""Caches of transformers as nodes: every layer class, its leaves and its static part."""
