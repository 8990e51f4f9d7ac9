"""Caches and outputs of Hugging Face models: how they are flattened, and how they are traced."""
