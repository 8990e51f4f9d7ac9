"""Print for both command lines: tables, progress, and errors as one line."""
