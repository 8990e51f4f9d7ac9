"""Modules that both packages use: contents of objects, effects of a call, comparisons."""
