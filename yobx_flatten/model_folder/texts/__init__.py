"""Tokenized texts, to calibrate the rounding of weights and to compare folders."""
