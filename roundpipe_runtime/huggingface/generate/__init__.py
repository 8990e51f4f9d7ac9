"""``generate`` of transformers through a pipeline."""
