"""Import private names of other libraries: one file per library, and no other place."""
