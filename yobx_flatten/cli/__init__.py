"""The command line ``yobx-flatten``: one file for each command."""
