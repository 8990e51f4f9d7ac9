"""Who holds which class, and one file per library's table."""
