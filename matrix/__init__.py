"""The matrix: every model type of the installed transformers against everything the package promises.

``python -m matrix`` builds each type with random weights from a small configuration, flattens its cache and continues,
exports it, replays the program at other sizes, stores and loads it, and runs it in onnxruntime. One process per type,
results in one JSON file, and a page made from that file alone.
"""
