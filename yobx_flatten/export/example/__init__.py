"""Build the example of an export: arguments, their dynamic sizes, and the caller's assumptions."""
