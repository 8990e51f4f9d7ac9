"""Write a program for a runtime other than onnxruntime, and replay it there."""
