"""Versions of transformers' functions without branches, active during a trace."""
