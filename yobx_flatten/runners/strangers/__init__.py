"""Programs of strangers: what torch would run of a file is read first."""
