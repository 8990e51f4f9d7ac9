"""Functions for chat templates under their former import path; the module `texts` defines them."""

from .texts import chat_tokenizer as chat_tokenizer
from .texts import message_tokens as message_tokens
