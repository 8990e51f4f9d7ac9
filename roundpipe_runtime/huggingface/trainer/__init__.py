"""``transformers.Trainer`` with a pipeline in it."""
