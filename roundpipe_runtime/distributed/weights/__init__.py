"""Model state in parts, each held by one rank."""
