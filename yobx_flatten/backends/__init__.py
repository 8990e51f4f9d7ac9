"""One file per library that takes objects apart; all answer the same questions (see :mod:`.contract`)."""
