"""``roundpipe demo``: train a model larger than its devices, and compare with plain PyTorch."""
