"""Which registrations hold which class, and one file per library's table."""
