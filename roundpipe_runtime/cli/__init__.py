"""The command line ``roundpipe``: one file for each command."""
