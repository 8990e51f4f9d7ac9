"""Describe how a class is flattened and rebuilt, without registering the class with any library."""
