"""Choose how weights are quantized, and measure the error."""
