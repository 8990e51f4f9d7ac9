"""Repair the graph of an ONNX file, and replace operators by operators that onnxruntime computes faster."""
