"""Nested values in ONNX files: stored, read back, replayed against a model."""
