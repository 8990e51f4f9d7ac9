"""What both command lines print with: tables, progress, errors as a line."""
