"""Shared by both packages: contents of objects, effects of a call, comparisons."""
