"""``roundpipe plan``: estimate the memory and step time of a training."""
