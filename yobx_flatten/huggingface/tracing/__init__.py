"""Versions of transformers' functions without branches, in force during a trace."""
