"""The word that the installed transformers has for the cache of its models."""

from yobx_flatten.huggingface.cache_names import cache_of as cache_of
from yobx_flatten.huggingface.cache_names import installed_name

WORD = installed_name()
