r"""Tokenize a conversation with its model's chat template, and mark the tokens of the answers.

::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    ...................................................^^^^^^^^^^^^^^^^^ count

A template with ``{% generation %}`` blocks marks the answers itself. Without them an answer is what the template adds
for its message to the messages before it, with the beginning of an answer.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from yobx_flatten.errors.failures import raised_as
from yobx_flatten.model_folder.source.tokenizer_files import readable

from ..errors import FineTuneError
from .conversations import Conversation
from .tokenizer import FolderTokenizer, Tokenizer

__all__ = ["ChatTokens", "Encoder"]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True)
class ChatTokens:
    """Tokens of one conversation.

    Attributes:
        ids: tokens.
        counts: whether each token counts for the loss.
    """

    ids: list[int]
    counts: list[bool]


class Encoder:
    """Turns conversations into tokens."""

    # template: file with a chat template, which is saved with the tokenizer. Default: the tokenizer's own.

    def __init__(self, tokenizer: Tokenizer, template: pathlib.Path | None = None) -> None:
        if not isinstance(tokenizer, FolderTokenizer):
            raise FineTuneError(
                "Conversations need a tokenizer with special tokens, and bytes have none for them. Name a model with "
                "a tokenizer, or its folder: --tokenizer DIR"
            )
        self._inner, self.name = tokenizer.inner, tokenizer.name
        if template is not None:
            try:
                self._inner.chat_template = template.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise FineTuneError(f"The chat template {template} cannot be read: {error}") from error
        found = self._inner.chat_template
        found = found.get("default") if isinstance(found, dict) else found
        self._has_template, self._marks_answers = found is not None, bool(found and _MARKS.search(found))

    def __call__(self, conversation: Conversation) -> ChatTokens:
        """Return the tokens of a conversation."""
        if conversation.completion is not None:
            return self._text(conversation.prompt, conversation.completion)
        if not self._has_template:
            raise FineTuneError(
                f"{self.name} has no chat template, which {conversation.place} needs. Give one: --chat-template "
                'template.jinja; or write text: {"prompt": "...", "completion": "..."}'
            )
        if self._marks_answers and not conversation.first_counted:
            found = self._applied(conversation, len(conversation.messages), return_assistant_tokens_mask=True)
            return ChatTokens(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])
        return self._by_prefix(conversation)

    def _text(self, prompt: str, completion: str) -> ChatTokens:
        """Text without a template: the completion counts, with the end of text after it."""
        with readable(self.name, FineTuneError):
            before = self._inner(prompt)["input_ids"]
            ids = self._inner(prompt + completion)["input_ids"]
        end = self._inner.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        start = _common(before, ids)
        return ChatTokens(ids, [place >= start for place in range(len(ids))])

    def _by_prefix(self, conversation: Conversation) -> ChatTokens:
        ids = self._ids(conversation, len(conversation.messages))
        whole = self._rendered(conversation, len(conversation.messages))
        counts = [False] * len(ids)
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or number < conversation.first_counted:
                continue
            before = self._rendered(conversation, number, add_generation_prompt=True)
            after = self._rendered(conversation, number + 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise FineTuneError(
                    f"{conversation.place}: the chat template of {self.name} writes earlier messages in another way "
                    "when more follow, so its answers cannot be found. Mark them in a template of your own with "
                    "{% generation %} and {% endgeneration %}: --chat-template template.jinja"
                )
            start = _common(self._ids(conversation, number, add_generation_prompt=True), ids)
            stop = len(ids) if after == whole else _common(self._ids(conversation, number + 1), ids)
            counts[start:stop] = [True] * (stop - start)
        return ChatTokens(ids, counts)

    def _ids(self, conversation: Conversation, count: int, **options: Any) -> list[int]:
        return list(self._applied(conversation, count, **options)["input_ids"]) if count or options else []

    def _rendered(self, conversation: Conversation, count: int, **options: Any) -> str:
        return str(self._applied(conversation, count, tokenize=False, **options)) if count or options else ""

    def _applied(self, conversation: Conversation, count: int, *, tokenize: bool = True, **options: Any) -> Any:
        options = {"tools": conversation.tools, "tokenize": tokenize, **options}
        if tokenize:
            options["return_dict"] = True
        refused = f"{conversation.place}: the chat template of {self.name} does not take it"
        # a template raises what it likes, and jinja2 errors of its own
        with raised_as(lambda error: FineTuneError(f"{refused}: {' '.join(str(error).split())[:200]}")):
            return self._inner.apply_chat_template(list(conversation.messages[:count]), **options)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that both begin with: the last one of a text may be another one when text follows."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
