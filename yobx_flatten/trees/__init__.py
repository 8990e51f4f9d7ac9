"""Any nested object: one level of it, its leaves, their names and dynamic shapes, the whole in a line."""
