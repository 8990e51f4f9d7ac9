"""Wrap ``torch.export`` and ``torch.onnx.export`` while a block is open."""
