"""A program or an ONNX file, replayed next to the eager module before it is handed out."""
