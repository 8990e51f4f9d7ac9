"""Hold all registrations, with one file per library's table."""
