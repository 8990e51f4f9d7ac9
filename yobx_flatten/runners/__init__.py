"""Open and call exported files: inputs by name in, outputs by name out."""
