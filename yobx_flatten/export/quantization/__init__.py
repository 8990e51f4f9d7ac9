"""Choose how weights are stored in fewer bits, and measure what that costs."""
