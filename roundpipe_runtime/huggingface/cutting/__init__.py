"""A model of transformers as pieces of a pipeline, found by running it."""
