"""``roundpipe doctor``: check an installation."""
