"""The command line ``roundpipe``: one folder for each command."""
