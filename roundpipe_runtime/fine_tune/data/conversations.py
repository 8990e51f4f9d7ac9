"""Read conversations from JSON, in any of four common forms.

::

    messages            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    ShareGPT            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    Alpaca              {"instruction": "Greet", "input": "", "output": "Hello"}
    prompt, completion  {"prompt": "Hi", "completion": " Hello"}: text without a template; or two lists of messages

Each may have ``system``, ``tools`` (a list, or one as JSON text) and ``chat_template_kwargs`` next to it. Any other
field is given to the chat template, and refused where that does not read it: `chat_tokens` knows the template.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from yobx_flatten.files.document import open_regular, read_bytes

from ..errors import FineTuneError
from .text_files import check_encoding, is_saved, json_lines, saved_rows

Message = dict[str, Any]
T = TypeVar("T")

_LARGEST = 2**34  # bytes of one list of JSON, which is read whole
# Fields that only distinguish rows, or calls of tools.
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


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One row of conversations."""

    place: str  # file and line, for messages
    messages: Sequence[Message] = ()  # messages as chat templates take them; empty for plain text
    first_counted: int = 0  # index of the first message whose answer counts; earlier answers are part of a prompt
    prompt: str = ""  # text before the completion, which does not count
    completion: str | None = None  # text that counts; `None` for messages
    # what else the template is given, by name: tools, the entries of `chat_template_kwargs`, other fields of the row
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_conversations(paths: Sequence[pathlib.Path], ignored: Collection[str] = ()) -> Iterator[Conversation]:
    """Yield the conversations of files and folders."""
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
        raise FineTuneError(f"{path} holds no conversations, as it does not end in .jsonl or .json. {_FORMS}")
    check_encoding(path)
    if path.suffix.lower() == ".json" and _begins_a_list(path):
        try:
            rows = json.loads(read_bytes(path, failure=FineTuneError, most=_LARGEST))
        except (ValueError, RecursionError) as error:
            raise FineTuneError(f"{path} is not JSON: {error}") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
        return
    yield from json_lines(path, _FORMS)


def _begins_a_list(path: pathlib.Path) -> bool:
    with open_regular(path, failure=FineTuneError) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def conversation_of(row: Any, place: str, ignored: Collection[str] = ()) -> Conversation:
    """Return the conversation of a row.

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
                f"{place} has {', '.join(map(repr, others))} next to text, which no template adds to it. Write it into "
                f"the prompt, write lists of messages, or leave it out: --ignore-fields {','.join(others)}"
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
            raise FineTuneError(f"{place} has 'system', and begins with a message of that role. Leave one of them out")
        made.insert(0, {"role": "system", "content": _text_of(system, place, may_be_missing=False)})
    if (tools := others.pop("tools", None)) is not None:
        others["tools"] = _tools(tools, place)
    stated = _taken(others, "chat_template_kwargs", dict, place) or {}
    first_counted = len(made) - len(messages) if prompt else 0
    return Conversation(place, made, first_counted, variables={**others, **stated})


def _is_empty(value: Any) -> bool:
    """Whether a field holds nothing: folders of ``datasets`` fill in those that a row does not have."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def _form_of(
    row: Mapping[str, Any], place: str, ignored: Collection[str]
) -> tuple[Sequence[str], list[Message], list[Message] | None]:
    """The fields of a form, the messages that are a prompt, and those after it; ``None`` for text without messages."""
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
    """Take a field of one type from the others."""
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
            f"{place} has the weight {row['weight']!r}, but all answers have the same weight. Leave it out, or end "
            'the \'prompt\' after it: {"prompt": [...], "completion": [...]}'
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
    return content.encode("utf-8", "replace").decode("utf-8")  # JSON can spell halves of characters


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and all(_is_empty(part[key]) for key in part if key not in ("type", "text"))
