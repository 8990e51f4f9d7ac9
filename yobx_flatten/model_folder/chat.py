"""Chat with an exported folder through the chat template of its tokenizer."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import DamagedFileError, InvalidArgumentError, ModelSourceError, describe_class
from ..errors.failures import first_line, raised_as, result_or
from ..files.limited import Limited, limited
from ..recipe.aliases import TransformersModel
from .source.tokenizer_files import open_tokenizer

_ROLES = ("system", "user", "assistant", "tool", "developer")
_INCOMPLETE = "�"  # a tokenizer returns this character for the first bytes of an incomplete character


def chat_tokenizer(folder: pathlib.Path) -> Any:
    """Return the tokenizer of a folder; raise InvalidArgumentError if the tokenizer has no chat template."""
    tokenizer = open_tokenizer(folder, failure=DamagedFileError, padding_side="left")
    _check_template(tokenizer, folder)
    return tokenizer


def message_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, torch.Tensor]:
    """Return the tokens of a conversation up to the reply, and their mask, int64 of shape (1, length)."""
    # options: further arguments of `apply_chat_template`, such as `tools`
    text = _written(tokenizer, messages, **options)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chat_text(tokenizer: Any, folder: pathlib.Path, message: str) -> str:
    """Return the prompt text for a reply to one message."""
    _check_template(tokenizer, folder)
    return _written(tokenizer, [{"role": "user", "content": message}])


def reply(model: Any, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return the reply of a model to a conversation."""
    # options: keywords of `generate`; `tools` and `documents` are for the template
    of_template = {name: options.pop(name) for name in ("tools", "documents") if name in options}
    prompt = message_tokens(tokenizer, messages, **of_template)
    found = model.generate(**prompt, **options)
    text: str = tokenizer.decode(found[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def text_pieces(tokenizer: Any, tokens: Iterable[torch.Tensor], made: list[torch.Tensor]) -> Iterator[str]:
    """Yield the generated text piece by piece, each with complete characters only."""
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
    given: Any = messages
    if isinstance(given, (str, Mapping)) or not given:
        raise InvalidArgumentError(
            f"messages must be a list of messages, found {describe_class(messages)}. Write\n"
            '    chat([{"role": "user", "content": "Hello"}])'
        )
    for number, message in enumerate(given):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f"messages[{number}] is {describe_class(message)} without a role. Write a role ({', '.join(_ROLES)}) "
                'and a content: {"role": "user", "content": "Hello"}'
            )

    def refused(error: BaseException) -> InvalidArgumentError:
        return InvalidArgumentError(f"The chat template refuses these messages: {first_line(error)}")

    with raised_as(refused):  # a template is untrusted code that runs in jinja's sandbox
        how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **options}
        text = limited(tokenizer.apply_chat_template, list(messages), **how)
    assert isinstance(text, str)
    return text


CHATS = "cases/generate-chats.case"
"""Name of the file of an exported folder that contains the original model's answers to chat questions."""

CHAT_TOKENS = 50
"""Largest number of new tokens in an answer to a chat question."""

_QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is 12 times 7?",
    "Explain what a computer program is to a child.",
    "Name three animals that live in Africa.",
    "Give me some advice for a job interview.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that adds two numbers.",
)


def chat_prompts(
    model: TransformersModel, source: pathlib.Path | None, rows: int, questions: Sequence[str] = ()
) -> dict[str, torch.Tensor] | None:
    """Return tokenized questions and their mask, int64 of shape (rows, length), padded on the left."""
    # questions: the caller's prompts, which need no chat template; by default `_QUESTIONS`, which need one
    # returns: `None` if there is no fitting tokenizer, or if the model has no room for an answer
    prompts = [] if source is None else _tokens(source, (questions or _QUESTIONS)[:rows], plain=bool(questions))
    if not prompts or not all(prompts):
        return None
    config: Any = model.config.get_text_config(decoder=True)
    longest = max(map(len, prompts))
    room = getattr(config, "max_position_embeddings", None) or longest + CHAT_TOKENS
    if longest + CHAT_TOKENS > room or max(map(max, prompts)) >= config.vocab_size:
        return None
    found = [torch.tensor(prompt) for prompt in prompts]
    sides = {"input_ids": found, "attention_mask": [torch.ones_like(prompt) for prompt in found]}
    return {name: pad_sequence(rows, batch_first=True, padding_side="left") for name, rows in sides.items()}


def _tokens(source: pathlib.Path, questions: Sequence[str], *, plain: bool) -> list[list[int]]:
    def read() -> list[list[int]]:
        tokenizer: Any = open_tokenizer(source, failure=ModelSourceError)
        if getattr(tokenizer, "chat_template", None):
            messages = [[{"role": "user", "content": question}] for question in questions]
            written = Limited(tokenizer.apply_chat_template)
            texts = [written(one, add_generation_prompt=True, tokenize=False) for one in messages]
        elif plain:
            texts = list(questions)
        else:
            return []
        found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    # each template and each tokenizer has its own errors; the export continues without chats
    return result_or(read, lambda error: [])
