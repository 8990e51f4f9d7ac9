"""Split a model into modules, each of which is exported to one file."""
