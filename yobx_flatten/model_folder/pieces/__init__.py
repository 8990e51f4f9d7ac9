"""Split a model into modules that are exported to one file each."""
