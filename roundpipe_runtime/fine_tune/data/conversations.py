r"""Read conversations in four common forms, tokenize them with a chat template, and mark the tokens of the answers.

::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    ...................................................^^^^^^^^^^^^^^^^^ count

A template with ``{% generation %}`` blocks marks the answers. TRL contains templates with such blocks for many models.
If there is no template with such blocks, or if some answers do not count, messages are rendered twice: without an
answer, and with it. The added text is the answer. A conversation is refused if the template omits a message or a field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from yobx_flatten.core.files.document import read_text
from yobx_flatten.core.files.limited import Limited, limited
from yobx_flatten.errors import require
from yobx_flatten.errors.failures import raised_as, result_or
from yobx_flatten.model_folder.source.find import readable

from ...errors import FineTuneError
from ..models import FolderTokenizer, Tokenizer
from .text_files import ROW_FILES, is_saved, read_rows, whole_characters

_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_SHORT = 30  # longest text that a template adds to messages
_LARGEST = 2**24  # bytes of a template
_OWN = ("messages", "add_generation_prompt")  # variables of a template that a row cannot set


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
    # template: file with a chat template, which is saved with the tokenizer. Default: the tokenizer's own.

    def __init__(self, tokenizer: Tokenizer, template: pathlib.Path | None = None) -> None:
        if not isinstance(tokenizer, FolderTokenizer):
            raise FineTuneError(
                "Conversations need a tokenizer with special tokens, and the byte tokenizer has none for roles. Name a "
                "model with a tokenizer, or its folder: --tokenizer DIR"
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
        if self._has_template and not self._marks_answers:
            require("trl", purpose="A chat template without {% generation %}", extra="data")
            import trl.chat_template_utils  # noqa: F401 # here, so that the limit is on the template alone
        # limited: jinja2 evaluates constant expressions when it searches a template for variables
        with raised_as(lambda error: FineTuneError(f"The chat template of {self.name} cannot be read: {error}")):
            variables, self._marked = limited(lambda: (_variables(named.values()), self._training_template()))
        self._variables = variables - {*_OWN, *self._inner.special_tokens_map}

    def _training_template(self) -> str | None:
        """Return TRL's version of the tokenizer's chat template, in which answers are marked, or ``None``."""
        if not self._has_template or self._marks_answers:
            return None
        from trl.chat_template_utils import get_training_chat_template

        # a template that TRL does not know, or that fails with TRL's examples, may still render the rows
        found: str | None = result_or(lambda: get_training_chat_template(self._inner), lambda error: None)
        return found

    def __call__(self, conversation: Conversation) -> ChatTokens:
        if conversation.completion is not None:  # only the completion and the end token count for the loss
            with readable(self.name, FineTuneError):
                before = self._inner(conversation.prompt)["input_ids"]
                ids = self._inner(conversation.prompt + conversation.completion)["input_ids"]
            end = self._inner.eos_token_id
            ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
            start = _common(before, ids)
            return ChatTokens(ids, [place >= start for place in range(len(ids))])
        if not self._has_template:
            raise FineTuneError(
                f"{self.name} has no chat template, which {conversation.place} needs. Give a template: --chat-template "
                'template.jinja; or write text: {"prompt": "...", "completion": "..."}'
            )
        self._check_unread(conversation, [name for name in conversation.variables if name not in self._variables])
        answers = {number for number, one in enumerate(conversation.messages) if one["role"] == "assistant"}
        is_marked = conversation.counted == answers and bool(self._marks_answers or self._marked)
        if is_marked and self._marked:  # the checks below render the text that is trained
            variables = {**conversation.variables, "chat_template": self._marked}
            conversation = dataclasses.replace(conversation, variables=variables)
        whole = self._rendered(conversation.messages, conversation)
        if is_marked:
            marked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            found = self._applied(conversation.messages, conversation, **marked)
            made = ChatTokens(found["input_ids"], [bool(mark) for mark in found["assistant_masks"]])
        else:
            made = self._by_prefix(conversation, whole)
        self._check_read(conversation, whole)
        return made

    def _check_read(self, conversation: Conversation, whole: str) -> None:
        """Raise an error if the chat template omits a message of a conversation, or a field of a message."""
        messages = conversation.messages

        def is_alike(changed: Sequence[Message]) -> bool:
            return result_or(lambda: self._rendered(changed, conversation), lambda error: None) == whole

        for number, message in enumerate(messages):
            text = message["content"].strip()
            other = [*messages[:number], {**message, "content": f"{text}?"}, *messages[number + 1 :]]
            # a text that several messages contain is there as often as in them; then no second rendering is needed
            is_there = len(text) > _SHORT and whole.count(text) >= sum(one["content"].count(text) for one in messages)
            if text and not is_there and is_alike(other):
                raise FineTuneError(
                    f"{conversation.place}, message {number + 1} ({message['role']}): the chat template of {self.name} "
                    "omits this message. Use another template: --chat-template template.jinja; or remove this message"
                )
        names = dict.fromkeys(name for one in messages for name in one if name not in ("role", "content"))
        without = {name: [{k: value for k, value in one.items() if k != name} for one in messages] for name in names}
        self._check_unread(conversation, [name for name in names if is_alike(without[name])])

    def _check_unread(self, conversation: Conversation, names: Sequence[str]) -> None:
        if names:
            raise FineTuneError(
                f"{conversation.place} has fields that the chat template of {self.name} does not use, so the model "
                f"would not see them: {', '.join(map(repr, names))}. Ignore them: --ignore-fields {','.join(names)}"
            )

    def _by_prefix(self, conversation: Conversation, whole: str) -> ChatTokens:
        messages, ids = conversation.messages, self._ids(whole)
        counts = [False] * len(ids)
        for number in conversation.counted:
            after = self._rendered(messages[: number + 1], conversation)
            if number:
                before = self._rendered(messages[:number], conversation, add_generation_prompt=True)
                ids_before = self._ids(before)
            else:  # templates cannot render an empty answer, so two different answers are compared
                other = "y" if messages[0]["content"].strip().startswith("x") else "x"
                another = self._rendered([{**messages[0], "content": other}], conversation)
                before, ids_before = after[: _common(after, another)], self._ids(another)
            if not (after.startswith(before) and whole.startswith(after)):
                raise FineTuneError(
                    f"{conversation.place}: the chat template of {self.name} formats earlier messages differently when "
                    "later messages follow, so the tokens of answers cannot be found. Mark answers in your own "
                    "template with {% generation %} and {% endgeneration %}: --chat-template template.jinja"
                )
            start = _common(ids_before, ids)
            stop = len(ids) if after == whole else _common(self._ids(after), ids)
            counts[start:stop] = [True] * (stop - start)
        return ChatTokens(ids, counts)

    def _ids(self, text: str) -> list[int]:
        with readable(self.name, FineTuneError):
            return list(self._inner(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _rendered(self, messages: Sequence[Message], conversation: Conversation, **options: Any) -> str:
        return str(self._applied(messages, conversation, tokenize=False, **options))

    def _applied(self, messages: Sequence[Message], conversation: Conversation, **options: Any) -> Any:
        def refused(error: Exception) -> FineTuneError:
            reason = " ".join(str(error).split())[:200]
            if next((message["role"] for message in messages if message["role"] != "system"), None) == "assistant":
                reason += ". The assistant speaks first: put a user message first, or remove the conversation"
            return FineTuneError(f"{conversation.place}: the chat template of {self.name} rejects it: {reason}")

        with raised_as(refused):  # a template can raise any exception
            found = self._write(list(messages), **conversation.variables, **options)
            return dict(found) if options["tokenize"] else found


def _variables(templates: Iterable[str]) -> set[str]:
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    found: set[str] = set()
    for text in templates:
        with contextlib.suppress(TemplateError):  # rendering reports the error
            tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
            found |= meta.find_undeclared_variables(tree)
    return found


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


Message = dict[str, Any]

# Fields that only identify rows or tool calls, and are ignored.
_IDENTIFIERS = ("id", "tool_call_id")
_LISTS = ("messages", "conversations", "conversation")
_PAIR = ("prompt", "completion")
_ALPACA = ("instruction", "input", "output", "history")
_ROLES = ("system", "user", "assistant", "tool")
_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
_FORMS = (
    'Each row must be one of\n    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
    '"..."}]}\n    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}\n'
    '    {"instruction": "...", "input": "...", "output": "..."}\n    {"prompt": "...", "completion": "..."}\n'
)


# A prompt and a completion are text without a template, or two lists of messages. A row may also have `system`, `tools`
# (a list, or a list as JSON text) and `chat_template_kwargs`. Any other field is a variable of the chat template; a
# field that the template does not read is an error.


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation of a data file: a list of messages, or a prompt with its completion."""

    place: str  # file and line, for messages
    messages: Sequence[Message] = ()  # messages as chat templates take them; empty for plain text
    counted: Collection[int] = ()  # indices of the messages whose tokens count
    prompt: str = ""  # text before the completion, which does not count
    completion: str | None = None  # text that counts; `None` for messages
    # other variables of the template, by name: tools, the entries of `chat_template_kwargs`, other fields of the row
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_conversations(paths: Sequence[pathlib.Path], ignored: Collection[str] = ()) -> Iterator[Conversation]:
    # paths: JSON, tables and folders of `datasets`, from `find_texts`
    # ignored: fields of rows and messages that are left out
    for path in paths:
        if not is_saved(path) and path.suffix.lower() not in ROW_FILES:
            known = ", ".join(ROW_FILES)
            raise FineTuneError(f"{path} is not read as conversations: its name does not end in {known}. {_FORMS}")
        for place, row in read_rows(path, _FORMS):
            yield conversation_of(row, place, ignored)


def conversation_of(row: Any, place: str, ignored: Collection[str] = ()) -> Conversation:
    """Return the conversation that one row of a data file describes, in any of the supported forms.

    >>> conversation_of({"instruction": "Greet", "input": "", "output": "Hello"}, "a.jsonl:1").messages[1]
    {'role': 'assistant', 'content': 'Hello'}
    """
    if not isinstance(row, Mapping):
        raise FineTuneError(f"{place} is a {type(row).__name__}. {_FORMS}")
    row = {key: value for key, value in row.items() if key not in ignored}
    form, prompt, answers = _form_of(row, place)
    others = {k: v for k, v in row.items() if k not in (*form, *_IDENTIFIERS) and not _is_empty(v)}
    if isinstance(answers, str):
        if others:
            raise FineTuneError(
                f"{place} has {', '.join(map(repr, others))}, which the model would not see: text uses no chat "
                f"template. Add it to the prompt, use message lists, or ignore it: --ignore-fields {','.join(others)}"
            )
        return Conversation(place, prompt=str(prompt), completion=answers)
    system, tools = others.pop("system", None), others.pop("tools", None)
    first = len(prompt)  # answers in a prompt do not count
    made = [_message(one, f"{place}, message {n}", ignored) for n, one in enumerate([*prompt, *answers], 1)]
    if system is not None:
        if made and made[0]["role"] == "system":
            raise FineTuneError(f"{place} has a field 'system' and a message of the role 'system'. Leave one out")
        made, first = [_message({"role": "system", "content": system}, f"{place}, 'system',", ()), *made], first + 1
    if tools is not None:
        if isinstance(tools, str):
            tools = result_or(lambda: json.loads(tools), lambda error: None)
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise FineTuneError(f"{place}: 'tools' must be a list of objects, or such a list as JSON text")
        others["tools"] = tools
    stated = others.pop("chat_template_kwargs", {})
    if not isinstance(stated, dict):
        raise FineTuneError(f"{place}: 'chat_template_kwargs' must be an object, found a {type(stated).__name__}")
    weights = [one.pop("weight", 1) for one in made]
    counted = {n for n, one in enumerate(made) if n >= first and one["role"] == "assistant" and weights[n]}
    if not counted:
        roles = ", ".join(message["role"] for message in made) or "none"
        raise FineTuneError(
            f'{place} has no answer to learn (roles of its messages: {roles}). Add {{"role": "assistant", "content": '
            '"..."}, or remove the conversation'
        )
    return Conversation(place, made, counted, variables={**others, **stated})


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, dict)) and not value)  # how `datasets` stores missing fields


def _form_of(row: Mapping[str, Any], place: str) -> tuple[Sequence[str], Any, Any]:
    """Return the names of the fields that contain the conversation, and the prompt and the answers in these fields."""
    for name in _LISTS:
        if isinstance(row.get(name), list):
            return [name], [], row[name]
    prompt, answers = row.get("prompt"), row.get("completion")
    if isinstance(prompt, (str, list)) and type(prompt) is type(answers):
        return _PAIR, prompt, answers
    if "instruction" in row and isinstance(row.get("output"), str):
        history, more = row.get("history") or [], row.get("input")
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise FineTuneError(f"{place}: 'history' must be a list of pairs of a question and its answer")
        pairs = [*history, (f"{row['instruction']}\n\n{more}" if more else row["instruction"], row["output"])]
        roles = ("user", "assistant")
        made = [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
        return _ALPACA, [], made
    found = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in row.items()) or "no field"
    text = next((key for key, value in row.items() if isinstance(value, str)), None)
    plain = "" if text is None else f"If {text!r} is plain text to learn: --text {place.split(':')[0]} --field {text}"
    raise FineTuneError(f"{place} is not a conversation: it has {found}. {_FORMS}{plain}")


def _message(row: Any, place: str, ignored: Collection[str]) -> Message:
    if not isinstance(row, Mapping):
        raise FineTuneError(f'{place} is a {type(row).__name__}. Write {{"role": "user", "content": "..."}}')
    used = ("role" if "role" in row else "from", "content" if "content" in row else "value")
    name, content = row.get(used[0]), row.get(used[1])
    role = _NAMES.get(name, name) if isinstance(name, str) else name
    if role not in _ROLES:
        raise FineTuneError(f"{place} has the role {name!r}. Write one of {', '.join(_ROLES)}")

    def is_text(part: Any) -> bool:
        is_typed = isinstance(part, Mapping) and part.get("type") == "text"
        return is_typed and all(_is_empty(part[key]) for key in part if key not in ("type", "text"))

    if isinstance(content, list) and all(map(is_text, content)):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and row.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise FineTuneError(f"{place} must have text in 'content', found a {type(content).__name__}")
    if row.get("weight") not in (0, 1, None):
        raise FineTuneError(f"{place}: weight must be 1, or 0 to skip the answer in training, found {row['weight']!r}")
    others = {k: v for k, v in row.items() if k not in (*used, *_IDENTIFIERS, *ignored) and not _is_empty(v)}
    return {**others, "role": role, "content": whole_characters(content)}
