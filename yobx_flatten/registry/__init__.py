"""Manage all registrations; each file writes the table of one library."""
