"""Write an ``ExportedProgram`` as an ONNX file, and compare the file with the eager module."""
