r"""Tokenize a conversation with its model's chat template, and mark the tokens of the answers.

::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    ...................................................^^^^^^^^^^^^^^^^^ count

A template with ``{% generation %}`` blocks marks the answers itself. Without them an answer is what the template adds
for its message to the messages before it, with the beginning of an answer.

Everything in a conversation is learnt or refused: each text and each field has to change what the template writes, or
be read by it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from yobx_flatten.errors.failures import raised_as, result_or
from yobx_flatten.files.document import read_text
from yobx_flatten.files.limited import Limited, limited
from yobx_flatten.model_folder.source.tokenizer_files import readable

from ..errors import FineTuneError
from .conversations import Conversation, Message
from .tokenizer import FolderTokenizer, Tokenizer

if TYPE_CHECKING:
    from jinja2 import nodes

_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

# Texts up to this length may stand in what a template writes by itself.
_SHORT = 30

_LARGEST = 2**24  # bytes of a template

# Variables of a template that are not a row's to set.
_OWN = ("messages", "add_generation_prompt")


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
        self._write = Limited(self._inner.apply_chat_template)
        if template is not None:
            try:
                self._inner.chat_template = read_text(template, failure=FineTuneError, most=_LARGEST)
            except OSError as error:
                raise FineTuneError(f"The chat template {template} cannot be read: {error}") from error
        found = self._inner.chat_template
        named = found if isinstance(found, dict) else {"default": found or ""}
        self._has_template, self._marks_answers = found is not None, bool(_MARKS.search(named.get("default", "")))
        with raised_as(lambda error: FineTuneError(f"The chat template of {self.name} cannot be read: {error}")):
            # jinja2 computes constants of a template when it looks for its variables
            self._variables, self._fields = limited(_read_by, list(named.values()))
        self._variables -= {*_OWN, *self._inner.special_tokens_map}

    def __call__(self, conversation: Conversation) -> ChatTokens:
        """Return the tokens of a conversation."""
        if conversation.completion is not None:
            return self._text(conversation.prompt, conversation.completion)
        if not self._has_template:
            raise FineTuneError(
                f"{self.name} has no chat template, which {conversation.place} needs. Give one: --chat-template "
                'template.jinja; or write text: {"prompt": "...", "completion": "..."}'
            )
        if unread := [name for name in conversation.variables if name not in self._variables]:
            raise self._refused(conversation.place, unread)
        whole = self._rendered(conversation, len(conversation.messages))
        if self._marks_answers and not conversation.first_counted:
            found = self._applied(conversation, len(conversation.messages), return_assistant_tokens_mask=True)
            made = ChatTokens(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])
        else:
            made = self._by_prefix(conversation, whole)
        for number in range(len(conversation.messages)):
            self._check_read(conversation, number, whole)
        return made

    def _check_read(self, conversation: Conversation, number: int, whole: str) -> None:
        """Check that the template writes a message, or reads each field of it."""
        message = conversation.messages[number]
        place = f"{conversation.place}, message {number + 1} ({message['role']})"
        text = message["content"].strip()
        times = sum(one["content"].count(text) for one in conversation.messages) if text else 0
        is_there = len(text) > _SHORT and whole.count(text) >= times  # as it stands, so it need not be tried
        if text and not is_there and self._is_alike(conversation, number, {**message, "content": f"{text}?"}, whole):
            raise FineTuneError(
                f"{place}: the chat template of {self.name} leaves it out. Take another template: --chat-template "
                "template.jinja; or leave the message out"
            )
        unread = [
            name
            for name in message
            if name not in ("role", "content", *self._fields)
            and self._is_alike(conversation, number, {k: value for k, value in message.items() if k != name}, whole)
        ]
        if unread:
            raise self._refused(place, unread)

    def _is_alike(self, conversation: Conversation, number: int, message: Message, whole: str) -> bool:
        """Whether the template writes the same with another message instead of one."""
        messages = [*conversation.messages[:number], message, *conversation.messages[number + 1 :]]
        other = dataclasses.replace(conversation, messages=messages)
        return result_or(lambda: self._rendered(other, len(messages)), lambda error: None) == whole

    def _refused(self, place: str, unread: Sequence[str]) -> FineTuneError:
        return FineTuneError(
            f"{place} has {', '.join(map(repr, unread))}, which the chat template of {self.name} does not read, so "
            f"nothing would learn it. Leave it out: --ignore-fields {','.join(unread)}"
        )

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

    def _by_prefix(self, conversation: Conversation, whole: str) -> ChatTokens:
        ids = self._ids(conversation, len(conversation.messages))
        counts = [False] * len(ids)
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or number < conversation.first_counted:
                continue
            after = self._rendered(conversation, number + 1)
            if number:
                before = self._rendered(conversation, number, add_generation_prompt=True)
                ids_before = self._ids(conversation, number, add_generation_prompt=True)
            else:  # no template writes the beginning of an answer to nothing: it is what two answers have in common
                other = "y" if message["content"].strip().startswith("x") else "x"
                another = dataclasses.replace(conversation, messages=[{**message, "content": other}])
                before = after[: _common(after, self._rendered(another, 1))]
                ids_before = self._ids(another, 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise FineTuneError(
                    f"{conversation.place}: the chat template of {self.name} writes earlier messages in another way "
                    "when more follow, so its answers cannot be found. Mark them in your own template with "
                    "{% generation %} and {% endgeneration %}: --chat-template template.jinja"
                )
            start = _common(ids_before, ids)
            stop = len(ids) if after == whole else _common(self._ids(conversation, number + 1), ids)
            counts[start:stop] = [True] * (stop - start)
        return ChatTokens(ids, counts)

    def _ids(self, conversation: Conversation, count: int, **options: Any) -> list[int]:
        return list(self._applied(conversation, count, **options)["input_ids"])

    def _rendered(self, conversation: Conversation, count: int, **options: Any) -> str:
        return str(self._applied(conversation, count, tokenize=False, **options))

    def _applied(self, conversation: Conversation, count: int, *, tokenize: bool = True, **options: Any) -> Any:
        options = {**conversation.variables, "tokenize": tokenize, **options}
        if tokenize:
            options["return_dict"] = True
        messages = list(conversation.messages[:count])
        refused = f"{conversation.place}: the chat template of {self.name} does not take it"
        first = next((message["role"] for message in messages if message["role"] != "system"), None)
        advice = ""
        if first == "assistant":
            advice = ". It begins with the assistant: put a message of the user before it, or leave the row out"
        # a template raises what it likes, and jinja2 errors of its own
        with raised_as(lambda error: FineTuneError(f"{refused}: {' '.join(str(error).split())[:200]}{advice}")):
            found = self._write(messages, **options)
            return dict(found) if tokenize else found


def _read_by(templates: Iterable[str]) -> tuple[set[str], set[object]]:
    """The variables that templates read, and the fields of messages: those of what they also read the role of."""
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    variables: set[str] = set()
    fields: set[object] = set()
    for text in templates:
        try:
            tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
        except TemplateError:
            continue  # an error when it is used
        variables |= meta.find_undeclared_variables(tree)
        read = list(_reads(tree))
        messages = {owner for owner, name in read if name == "role"}
        fields |= {name for owner, name in read if owner in messages}
    return variables, fields


def _reads(tree: nodes.Template) -> Iterator[tuple[str, object]]:
    """Each name that a template reads of a variable, or of an item of one: ``a.b``, ``a[0]["b"]``, ``"b" in a``."""
    from jinja2 import nodes

    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Compare, nodes.Call)):
        owner: nodes.Node | None = None
        name: object = None
        if isinstance(node, nodes.Getattr):
            owner, name = node.node, node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            owner, name = node.node, node.arg.value
        elif isinstance(node, nodes.Compare) and isinstance(node.expr, nodes.Const):
            owner, name = node.ops[0].expr, node.expr.value
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            owner, name = node.node.node, next((arg.value for arg in node.args if isinstance(arg, nodes.Const)), None)
        if isinstance(owner, nodes.Getitem):
            owner = owner.node
        if isinstance(owner, nodes.Name):
            yield owner.name, name


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of first tokens that both have; the last token of a text may change when text follows."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
