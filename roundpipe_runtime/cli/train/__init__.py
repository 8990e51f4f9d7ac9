"""``roundpipe train``: train a language model on text."""
