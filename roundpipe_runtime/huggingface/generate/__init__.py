"""Run ``generate`` of transformers through a pipeline."""
