"""Wrap ``torch.export`` and ``torch.onnx.export`` in the ``with`` block of ``register_flattening_functions``."""
