"""Text from exported files: a loop that hands the cache from one call to the next, without copying it."""
