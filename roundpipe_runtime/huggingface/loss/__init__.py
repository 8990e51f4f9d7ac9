"""Losses of transformers, microbatch by microbatch."""
