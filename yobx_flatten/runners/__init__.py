"""Exported things, opened and called: a file or a program takes inputs by name and returns outputs by name."""
