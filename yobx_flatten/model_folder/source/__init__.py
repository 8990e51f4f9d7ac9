"""Find the model to export: a folder, a name, an adapter or a configuration."""
