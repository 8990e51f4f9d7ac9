"""Choices that a calibration text makes for a quantized file: how weights are rounded, and inputs split."""
