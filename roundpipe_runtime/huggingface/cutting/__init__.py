"""Cut a transformers model into pieces of a pipeline, which are found by running the model."""
