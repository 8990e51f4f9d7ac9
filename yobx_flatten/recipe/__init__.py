"""Describe how a class is flattened and rebuilt, without notifying any library."""
