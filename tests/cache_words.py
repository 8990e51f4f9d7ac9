"""The word that the installed transformers has for the cache of its models."""

from yobx_flatten.huggingface.cache_names import cache_of, installed_name

__all__ = ["WORD", "cache_of"]

WORD = installed_name()
