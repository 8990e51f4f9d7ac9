"""Rewrite the graph of an ONNX file: repairs, and operators that onnxruntime computes faster."""
