"""``transformers.Trainer`` classes that train through a pipeline."""
