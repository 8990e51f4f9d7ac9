"""What a text decides of the integers of a file: how weights are rounded, and inputs split."""
