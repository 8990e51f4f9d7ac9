"""Chat with an exported folder: messages in, text out, by its tokenizer's chat template."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import DamagedFileError, InvalidArgumentError, describe_class
from ..errors.failures import raised_as
from ..errors.messages import first_line
from ..files.limited import limited
from .source.tokenizer_files import open_tokenizer

_ROLES = ("system", "user", "assistant", "tool", "developer")
_INCOMPLETE = "�"  # what a tokenizer returns while the bytes of a character are on their way


def chat_tokenizer(folder: pathlib.Path) -> Any:
    """Return the tokenizer of a folder."""
    tokenizer = open_tokenizer(folder, failure=DamagedFileError, padding_side="left")
    _check_template(tokenizer, folder)
    return tokenizer


def message_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, torch.Tensor]:
    """Return the tokens of a conversation up to the reply, and their mask, int64 of shape (1, length)."""
    # messages: `{"role": "user", "content": "..."}` and others, in order
    # options: further arguments of `apply_chat_template`, such as `tools`
    text = _written(tokenizer, messages, **options)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chat_text(tokenizer: Any, folder: pathlib.Path, message: str) -> str:
    """Return the text that a reply to one message continues."""
    _check_template(tokenizer, folder)
    return _written(tokenizer, [{"role": "user", "content": message}])


def reply(model: Any, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return what a model replies."""
    # options: keywords of `generate`; `tools` and `documents` are for the template
    of_template = {name: options.pop(name) for name in ("tools", "documents") if name in options}
    prompt = message_tokens(tokenizer, messages, **of_template)
    found = model.generate(**prompt, **options)
    text: str = tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def text_pieces(tokenizer: Any, tokens: Iterable[torch.Tensor], made: list[torch.Tensor]) -> Iterator[str]:
    """Yield text as it grows, whole characters only."""
    shown = ""
    for new in tokens:
        made.append(new)
        grown = tokenizer.decode(torch.stack(made, 1)[0], skip_special_tokens=True)
        if not grown.endswith(_INCOMPLETE):
            yield grown[len(shown) :]
            shown = grown
    if made:
        yield tokenizer.decode(torch.stack(made, 1)[0], skip_special_tokens=True)[len(shown) :]


def _check_template(tokenizer: Any, folder: pathlib.Path) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidArgumentError(
            f"The tokenizer in {folder} has no chat template: the model was not trained on conversations, or its "
            "chat_template.jinja is missing. Continue a text instead:\n"
            f"    yobx-flatten generate {folder} --prompt TEXT"
        )


def _written(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text of a conversation up to the reply."""
    given: Any = messages
    if isinstance(given, (str, Mapping)) or not given:
        raise InvalidArgumentError(
            f"messages must be a list of messages, found {describe_class(messages)}. Write\n"
            '    chat([{"role": "user", "content": "Hello"}])'
        )
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f"messages[{number}] is {describe_class(message)} without a role. It has a role ({', '.join(_ROLES)}) "
                'and a content: {"role": "user", "content": "Hello"}'
            )

    def refused(error: BaseException) -> InvalidArgumentError:
        return InvalidArgumentError(f"The chat template refuses these messages: {first_line(error)}")

    with raised_as(refused):  # a template is a program of others, in jinja's sandbox
        how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **options}
        text = limited(tokenizer.apply_chat_template, list(messages), **how)
    assert isinstance(text, str)
    return text
