"""Flatten the transformers caches: every layer class, its leaves and its static part."""
