"""Names that other libraries keep to themselves and this project needs: one file per library imports them, no other."""
