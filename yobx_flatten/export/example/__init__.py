"""What an export is made from: arguments, their dynamic sizes, and what the caller states of them."""
