"""Losses of transformers models, computed microbatch by microbatch."""
