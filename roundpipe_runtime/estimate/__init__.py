"""Estimate memory and time of a training before anything is allocated."""
