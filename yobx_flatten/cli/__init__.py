"""The command line ``yobx-flatten``."""
