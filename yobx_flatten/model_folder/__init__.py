"""A model as a folder of exported files, with its configuration, its tokenizer, and cases that prove it."""
