"""Write a program as an ONNX file, and replay it."""
