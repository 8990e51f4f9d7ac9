"""Import private names of other libraries only here, in one file per library."""
