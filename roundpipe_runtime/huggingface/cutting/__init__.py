"""Split a Hugging Face model into modules of a pipeline, by running its forward on an example."""
