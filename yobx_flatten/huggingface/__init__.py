"""Caches and outputs of Hugging Face models: how they come apart, and how a trace gets through them."""
