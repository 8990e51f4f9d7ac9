"""Split a Hugging Face model into the pieces of a pipeline, which are found by running the model."""
