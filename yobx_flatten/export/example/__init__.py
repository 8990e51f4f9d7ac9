"""Build the example of an export: arguments, their dynamic sizes, and what the caller states of them."""
