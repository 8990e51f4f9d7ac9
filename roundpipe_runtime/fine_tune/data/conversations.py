"""Read conversations from JSON, in any of four common forms.

::

    messages            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    ShareGPT            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    Alpaca              {"instruction": "Greet", "input": "", "output": "Hello"}
    prompt, completion  {"prompt": "Hi", "completion": " Hello"}: text without a template; or two lists of messages
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import FineTuneError
from .text_files import is_saved, json_lines, saved_rows

__all__ = ["Conversation", "conversation_of", "read_conversations"]

Message = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
_FORMS = (
    'Each row is to be one of\n    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": '
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
    tools: list[Any] | None = None  # descriptions of tools for the template


def read_conversations(paths: Sequence[pathlib.Path]) -> Iterator[Conversation]:
    """Yield the conversations of files and folders."""
    # paths: JSON lines, JSON files with a list, and folders of `datasets`, from `find_texts`
    for path in paths:
        for place, row in _rows_of(path):
            yield conversation_of(row, place)


def _rows_of(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir() and is_saved(path):
        yield from saved_rows(path)
        return
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        raise FineTuneError(f"{path} holds no conversations, as it does not end in .jsonl or .json. {_FORMS}")
    if path.suffix.lower() == ".json" and _begins_a_list(path):
        try:
            rows = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise FineTuneError(f"{path} is not JSON: {error}") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))
        return
    yield from json_lines(path, _FORMS)


def _begins_a_list(path: pathlib.Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def conversation_of(row: Any, place: str) -> Conversation:
    """Return the conversation of a row.

    >>> conversation_of({"instruction": "Greet", "input": "", "output": "Hello"}, "a.jsonl:1").messages[1]
    {'role': 'assistant', 'content': 'Hello'}
    """
    if not isinstance(row, Mapping):
        raise FineTuneError(f"{place} is a {type(row).__name__}. {_FORMS}")
    tools = row.get("tools") or None
    for name in ("messages", "conversations", "conversation"):
        if isinstance(row.get(name), list):
            return _counted(Conversation(place, _messages(row[name], place), tools=tools))
    if "prompt" in row and "completion" in row:
        return _prompted(row["prompt"], row["completion"], place, tools)
    if "instruction" in row and isinstance(row.get("output"), str):
        return Conversation(place, _messages(_alpaca(row, place), place))
    found = ", ".join(f"{key!r} ({type(value).__name__})" for key, value in row.items()) or "no field"
    text = next((key for key, value in row.items() if isinstance(value, str)), None)
    plain = (
        "" if text is None else f"If {text!r} is text to learn as it is: --text {place.split(':')[0]} --field {text}"
    )
    raise FineTuneError(f"{place} is not a conversation: it has {found}. {_FORMS}{plain}")


def _prompted(prompt: Any, completion: Any, place: str, tools: list[Any] | None) -> Conversation:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(place, prompt=prompt, completion=completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, place)
        made = Conversation(place, [*before, *_messages(completion, place)], len(before), tools=tools)
        return _counted(made)
    kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
    raise FineTuneError(f"{place}: 'prompt' and 'completion' are {kinds}. Write two texts, or two lists of messages")


def _alpaca(row: Mapping[str, Any], place: str) -> list[Message]:
    if row.get("system") and not isinstance(row["system"], str):
        raise FineTuneError(f"{place}: 'system' is a {type(row['system']).__name__}. Write text")
    found = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for pair in row.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise FineTuneError(f"{place}: 'history' is to be a list of pairs of texts")
        found += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    more = row.get("input")
    asked = f"{row['instruction']}\n\n{more}" if more else row["instruction"]
    return [*found, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


def _messages(rows: list[Any], place: str) -> list[Message]:
    return [_message(row, f"{place}, message {number}") for number, row in enumerate(rows, 1)]


def _message(row: Any, place: str) -> Message:
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
            f"{place} has the weight {row['weight']!r}, and all answers count alike. Leave it out, or end the 'prompt' "
            'after it: {"prompt": [...], "completion": [...]}'
        )
    others = {key: value for key, value in row.items() if key not in ("role", "from", "content", "value", "weight")}
    content = _text_of(row.get("content", row.get("value")), place, may_be_missing=bool(row.get("tool_calls")))
    return {**{key: value for key, value in others.items() if value is not None}, "role": role, "content": content}


def _text_of(content: Any, place: str, *, may_be_missing: bool) -> str:
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, str):
        raise FineTuneError(f"{place} has no text in 'content': it is a {type(content).__name__}. Write text")
    return content.encode("utf-8", "replace").decode("utf-8")  # JSON can spell halves of characters


def _counted(made: Conversation) -> Conversation:
    if not any(message["role"] == "assistant" for message in made.messages[made.first_counted :]):
        roles = ", ".join(message["role"] for message in made.messages) or "no message"
        raise FineTuneError(
            f'{made.place} has no answer to learn: it has {roles}. Add {{"role": "assistant", "content": "..."}}, or '
            "leave the row out"
        )
    return made
