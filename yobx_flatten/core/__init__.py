"""Modules that yobx_flatten and roundpipe_runtime share: contents of objects, side effects of calls, comparisons."""
