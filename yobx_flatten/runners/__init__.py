"""Open exported files in a runtime (such as onnxruntime), and call them with inputs and outputs by name."""
