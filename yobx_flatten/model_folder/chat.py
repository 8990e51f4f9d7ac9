"""The chat template of a folder, under the name that this module had before it became a part of `texts`."""

from .texts import chat_tokenizer as chat_tokenizer
from .texts import message_tokens as message_tokens
