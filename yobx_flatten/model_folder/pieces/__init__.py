"""Split a model into the modules that become files."""
