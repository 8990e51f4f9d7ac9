r"""Read conversations in four common forms, tokenize them with a chat template, and mark the tokens of the answers.

::

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    ...................................................^^^^^^^^^^^^^^^^^ count

A template with ``{% generation %}`` blocks marks the answers itself. Without ``{% generation %}`` blocks, an answer is
the text that its message adds to the rendered earlier messages with a generation prompt.

Each text and each field of a conversation must change the output of the template or be read by the template; otherwise
the conversation is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from yobx_flatten.errors.failures import raised_as, result_or
from yobx_flatten.files.document import open_regular, read_bytes, read_text
from yobx_flatten.files.limited import Limited, limited
from yobx_flatten.model_folder.source.find import readable

from ..errors import FineTuneError
from .models import FolderTokenizer, Tokenizer
from .text_files import check_encoding, is_saved, json_lines, saved_rows

if TYPE_CHECKING:
    from jinja2 import nodes


_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")

_SHORT = 30  # longest text that a template adds to messages

_LARGEST = 2**24  # bytes of a template

# Variables of a template that a row cannot set.
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
        with raised_as(lambda error: FineTuneError(f"The chat template of {self.name} cannot be read: {error}")):
            # limited: jinja2 evaluates constant expressions when it searches a template for variables
            self._variables, self._fields = limited(_read_by, list(named.values()))
        self._variables -= {*_OWN, *self._inner.special_tokens_map}

    def __call__(self, conversation: Conversation) -> ChatTokens:
        if conversation.completion is not None:
            return self._text(conversation.prompt, conversation.completion)
        if not self._has_template:
            raise FineTuneError(
                f"{self.name} has no chat template, which {conversation.place} needs. Give a template: --chat-template "
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
        message = conversation.messages[number]
        place = f"{conversation.place}, message {number + 1} ({message['role']})"
        text = message["content"].strip()
        times = sum(one["content"].count(text) for one in conversation.messages) if text else 0
        is_there = len(text) > _SHORT and whole.count(text) >= times  # then no second rendering is needed
        if text and not is_there and self._is_alike(conversation, number, {**message, "content": f"{text}?"}, whole):
            raise FineTuneError(
                f"{place}: the chat template of {self.name} leaves this message out. Use another template: "
                "--chat-template template.jinja; or leave the message out"
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
        """Return whether the rendered text stays the same if ``message`` replaces message ``number``."""
        messages = [*conversation.messages[:number], message, *conversation.messages[number + 1 :]]
        other = dataclasses.replace(conversation, messages=messages)
        return result_or(lambda: self._rendered(other, len(messages)), lambda error: None) == whole

    def _refused(self, place: str, unread: Sequence[str]) -> FineTuneError:
        return FineTuneError(
            f"{place} has {', '.join(map(repr, unread))}, which the chat template of {self.name} does not use, so the "
            f"model would not learn from it. Ignore it: --ignore-fields {','.join(unread)}"
        )

    def _text(self, prompt: str, completion: str) -> ChatTokens:
        """Tokenize a prompt with its completion; only the completion and the end token count for the loss."""
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
            else:  # templates cannot render an empty answer, so two different answers are compared
                other = "y" if message["content"].strip().startswith("x") else "x"
                another = dataclasses.replace(conversation, messages=[{**message, "content": other}])
                before = after[: _common(after, self._rendered(another, 1))]
                ids_before = self._ids(another, 1)
            if not (after.startswith(before) and whole.startswith(after)):
                raise FineTuneError(
                    f"{conversation.place}: the chat template of {self.name} formats earlier messages differently when "
                    "more follow, so answers cannot be found. Mark answers in your own template with "
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
        refused = f"{conversation.place}: the chat template of {self.name} rejects it"
        first = next((message["role"] for message in messages if message["role"] != "system"), None)
        advice = ""
        if first == "assistant":
            advice = ". The row begins with the assistant: put a message of the user first, or leave the row out"
        # a template can raise any exception
        with raised_as(lambda error: FineTuneError(f"{refused}: {' '.join(str(error).split())[:200]}{advice}")):
            found = self._write(messages, **options)
            return dict(found) if tokenize else found


def _read_by(templates: Iterable[str]) -> tuple[set[str], set[object]]:
    """Return the variables that templates read, and the fields that templates read of messages."""
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    variables: set[str] = set()
    fields: set[object] = set()
    for text in templates:
        try:
            tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKS.sub("", text))
        except TemplateError:
            continue  # rendering reports the error
        variables |= meta.find_undeclared_variables(tree)
        read = list(_reads(tree))
        messages = {owner for owner, name in read if name == "role"}
        fields |= {name for owner, name in read if owner in messages}
    return variables, fields


def _reads(tree: nodes.Template) -> Iterator[tuple[str, object]]:
    """Yield each variable of a template with the field that the template reads; ``a.b`` reads field b of a."""
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
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


Message = dict[str, Any]
T = TypeVar("T")

_LARGEST_LIST = 2**34  # bytes of a JSON list, which is loaded as a whole
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


# Read conversations from JSON, in any of four common forms.
#
#     messages            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
#     ShareGPT            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
#     Alpaca              {"instruction": "Greet", "input": "", "output": "Hello"}
#     prompt, completion  {"prompt": "Hi", "completion": " Hello"}: text without a template; or two lists of messages
#
# A row may also have `system`, `tools` (a list, or a list as JSON text) and `chat_template_kwargs`. Any other field is
# a variable of the chat template; a field that the template does not read is an error.


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation of a data file: a list of messages, or a prompt with its completion."""

    place: str  # file and line, for messages
    messages: Sequence[Message] = ()  # messages as chat templates take them; empty for plain text
    first_counted: int = 0  # index of the first message whose answer counts; earlier answers are part of a prompt
    prompt: str = ""  # text before the completion, which does not count
    completion: str | None = None  # text that counts; `None` for messages
    # other variables of the template, by name: tools, the entries of `chat_template_kwargs`, other fields of the row
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_conversations(paths: Sequence[pathlib.Path], ignored: Collection[str] = ()) -> Iterator[Conversation]:
    # paths: JSON lines, JSON files with a list, and folders of `datasets`, from `find_texts`
    # ignored: fields of rows and messages that are left out
    for path in paths:
        for place, row in _rows_of(path):
            yield conversation_of(row, place, ignored)


def _rows_of(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir() and is_saved(path):
        yield from saved_rows(path)
        return
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        raise FineTuneError(f"{path} is not read as conversations: its name does not end in .jsonl or .json. {_FORMS}")
    check_encoding(path)
    if path.suffix.lower() == ".json":
        with open_regular(path, failure=FineTuneError) as file:
            is_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if is_list:
            try:
                rows = json.loads(read_bytes(path, failure=FineTuneError, most=_LARGEST_LIST))
            except (ValueError, RecursionError) as error:
                raise FineTuneError(f"{path} is not JSON: {error}") from error
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
            return
    yield from json_lines(path, _FORMS)


def conversation_of(row: Any, place: str, ignored: Collection[str] = ()) -> Conversation:
    """Return the conversation that one row of a data file describes, in any of the supported forms.

    >>> conversation_of({"instruction": "Greet", "input": "", "output": "Hello"}, "a.jsonl:1").messages[1]
    {'role': 'assistant', 'content': 'Hello'}
    """
    if not isinstance(row, Mapping):
        raise FineTuneError(f"{place} is a {type(row).__name__}. {_FORMS}")
    row = {key: value for key, value in row.items() if key not in ignored}
    form, prompt, messages = _form_of(row, place, ignored)
    others = {k: value for k, value in row.items() if k not in (*form, *_IDENTIFIERS) and not _is_empty(value)}
    if messages is None:
        if others:
            raise FineTuneError(
                f"{place} has {', '.join(map(repr, others))} besides text, and no template adds it to the text. Write "
                f"it into the prompt, write lists of messages, or leave it out: --ignore-fields {','.join(others)}"
            )
        return Conversation(place, prompt=row["prompt"], completion=row["completion"])
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in (*prompt, *messages)) or "no message"
        raise FineTuneError(
            f'{place} has no answer to learn: it has {roles}. Add {{"role": "assistant", "content": "..."}}, or leave '
            "the row out"
        )
    made = [*prompt, *messages]
    if (system := _taken(others, "system", str, place)) is not None:
        if made[0]["role"] == "system":
            raise FineTuneError(f"{place} has a field 'system' and a first message of this role. Leave one of them out")
        made.insert(0, {"role": "system", "content": _text_of(system, place, may_be_missing=False)})
    if (tools := others.pop("tools", None)) is not None:
        others["tools"] = _tools(tools, place)
    stated = _taken(others, "chat_template_kwargs", dict, place) or {}
    first_counted = len(made) - len(messages) if prompt else 0
    return Conversation(place, made, first_counted, variables={**others, **stated})


def _is_empty(value: Any) -> bool:
    """Return whether a field counts as missing, because the library ``datasets`` stores missing fields as empty."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _form_of(
    row: Mapping[str, Any], place: str, ignored: Collection[str]
) -> tuple[Sequence[str], list[Message], list[Message] | None]:
    """Return a row's conversation fields, the messages of its prompt, and the later messages or ``None`` for text."""
    for name in _LISTS:
        if isinstance(row.get(name), list):
            return [name], [], _messages(row[name], place, ignored)
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return _PAIR, [], None
        if isinstance(prompt, list) and isinstance(completion, list):
            return _PAIR, _messages(prompt, place, ignored), _messages(completion, place, ignored)
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise FineTuneError(
            f"{place}: 'prompt' and 'completion' are {kinds}. Write two texts, or two lists of messages"
        )
    if "instruction" in row and isinstance(row.get("output"), str):
        return _ALPACA, [], _messages(_alpaca(row, place), place, ignored)
    found = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in row.items()) or "no field"
    text = next((key for key, value in row.items() if isinstance(value, str)), None)
    plain = "" if text is None else f"If {text!r} is plain text to learn: --text {place.split(':')[0]} --field {text}"
    raise FineTuneError(f"{place} is not a conversation: it has {found}. {_FORMS}{plain}")


def _taken(fields: dict[str, Any], name: str, kind: type[T], place: str) -> T | None:
    """Remove a field from ``fields``, check its type, and return its value."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, kind):
        wanted = "text" if kind is str else "an object"
        raise FineTuneError(f"{place}: {name!r} is a {type(value).__name__}. Write {wanted}, or leave it out")
    return value


def _tools(tools: Any, place: str) -> list[Any]:
    if isinstance(tools, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools):
        return tools
    raise FineTuneError(f"{place}: 'tools' must be a list of objects, or such a list as JSON text")


def _alpaca(row: Mapping[str, Any], place: str) -> list[Message]:
    found: list[Message] = []
    history = row.get("history") or ()
    for pair in history if isinstance(history, (list, tuple)) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise FineTuneError(f"{place}: 'history' must be a list of pairs of texts")
        found += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    more = row.get("input")
    asked = f"{row['instruction']}\n\n{more}" if more else row["instruction"]
    return [*found, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


def _messages(rows: list[Any], place: str, ignored: Collection[str]) -> list[Message]:
    return [_message(row, f"{place}, message {number}", ignored) for number, row in enumerate(rows, 1)]


def _message(row: Any, place: str, ignored: Collection[str]) -> Message:
    if not isinstance(row, Mapping):
        raise FineTuneError(f'{place} is a {type(row).__name__}. Write {{"role": "user", "content": "..."}}')
    name = row.get("role", row.get("from"))
    role = _NAMES.get(name, name) if isinstance(name, str) else None
    if role not in _ROLES:
        fields = ", ".join(map(repr, row)) or "nothing"
        found = f"has the role {name!r}" if name is not None else f"has {fields} and no 'role'"
        raise FineTuneError(f"{place} {found}. Write one of {', '.join(_ROLES)}")
    if row.get("weight", 1) not in (1, None):
        raise FineTuneError(
            f"{place} has the weight {row['weight']!r}, but all answers have the same weight. Leave the weight out, or "
            'end the \'prompt\' after this message: {"prompt": [...], "completion": [...]}'
        )
    used = ("role" if "role" in row else "from", "content" if "content" in row else "value", "weight")
    others = {
        key: value for key, value in row.items() if key not in (*used, *_IDENTIFIERS, *ignored) and not _is_empty(value)
    }
    content = _text_of(row.get(used[1]), place, may_be_missing=bool(others.get("tool_calls")))
    return {**others, "role": role, "content": content}


def _text_of(content: Any, place: str, *, may_be_missing: bool) -> str:
    if isinstance(content, list) and all(isinstance(part, Mapping) and _is_text(part) for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, str):
        raise FineTuneError(f"{place} has no text in 'content': it is a {type(content).__name__}. Write text")
    return content.encode("utf-8", "replace").decode("utf-8")  # JSON can contain half of a surrogate pair


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and all(_is_empty(part[key]) for key in part if key not in ("type", "text"))
