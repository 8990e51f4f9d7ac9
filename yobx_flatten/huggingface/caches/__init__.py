"""Flatten transformers KV caches, with layers of any class, to tensors (leaves) and static data."""
