"""Make texts and chat prompts that calibrate and check exported files, and tokenize conversations."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..core.effects import undisturbed
from ..core.files.limited import Limited, limited
from ..errors import DamagedFileError, InvalidArgumentError, ModelSourceError, describe_class
from ..errors.failures import STEP, first_line, raised_as, result_or
from ..export.proof.eager_runs import Case
from ..generate.sampling import plain_loop_entries
from ..registry.recipe.aliases import TransformersModel
from .source.find import open_tokenizer

LENGTH = 128  # number of tokens in each row of the text on which a quantized file is measured
_MODULES = ("textwrap", "heapq", "statistics")  # half of each module is English text


def python_text(
    model: TransformersModel, source: pathlib.Path | None, rows: int, text: str = ""
) -> torch.Tensor | None:
    """Return tokens of a text (by default, Python's source code), as int64 of shape (rows, length)."""
    # source: the folder of the tokenizer; `None` for a model that reads bytes
    # returns: `None` if there is no fitting tokenizer, or if there is no text or no room of 16 tokens
    config = model.config.get_text_config(decoder=True)
    room = getattr(config, "max_position_embeddings", None) or LENGTH
    found = tokens_of(source, [text or python_source()], add_special_tokens=False)
    tokens = found[0] if found else []
    length = min(LENGTH, room, len(tokens)) if text else min(LENGTH, room)
    rows = min(rows, len(tokens) // length)
    if length < 16 or not rows or max(tokens[: rows * length]) >= config.vocab_size:
        return None
    return torch.tensor(tokens[: rows * length]).reshape(rows, length)


def tokens_of(source: pathlib.Path | None, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Return the tokens of texts; an empty list if the folder has no tokenizer that can be read."""

    def read() -> list[list[int]]:
        from transformers import ByT5Tokenizer

        tokenizer = ByT5Tokenizer(extra_ids=0) if source is None else open_tokenizer(source, failure=ModelSourceError)
        found: list[list[int]] = tokenizer(list(texts), verbose=False, **options)["input_ids"]
        return found

    return result_or(read, lambda error: [])  # each tokenizer has its own errors; the export continues without


def python_source() -> str:
    texts = []
    for name in _MODULES:
        found = importlib.util.find_spec(name)
        loader: Any = None if found is None else found.loader
        texts.append((loader.get_source(name) or "") if hasattr(loader, "get_source") else "")
    return "".join(texts)


_ROWS, _LENGTH = 128, 64  # rows, and tokens per row, of the text by which weights are rounded
_LETTERS = 12  # letters of a text for each token of a row: enough to fill the row, which is then truncated

_SENTENCES = (
    "The ferry leaves the island every morning at seven, unless there is fog.",
    "How much does it cost to send a parcel to Norway?",
    "They studied the history of trade between China and Venice.",
    "Add the flour slowly, and stir until there are no lumps left.",
    "The patient was given antibiotics and recovered within a week.",
    "Interest rates rose by a quarter of a percentage point.",
    "A hash table finds a value by its key in constant time.",
    "My bicycle was stolen in front of the library yesterday.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "The orchestra played the second symphony without a conductor.",
    "Is there a train to the airport after midnight?",
    "The court decided that the contract was not valid.",
    "Penguins keep their eggs warm on their feet.",
    "The striker scored twice in the last ten minutes of the match.",
    "The update fixes a bug that closed the application when a file was empty.",
    "The phone rang twice, and then the line was dead.",
)


def encoder_rows(model: TransformersModel, source: pathlib.Path | None, multiple: int) -> torch.Tensor | None:
    """Return the tokens of Python source code for a text encoder, as int64 of shape (rows, length)."""
    # returns: a multiple of `multiple` rows; `None` without a fitting tokenizer, or without room for 16 tokens
    room = getattr(model.config, "max_position_embeddings", None) or _LENGTH
    length, text = min(_LENGTH, room - 2), python_source()  # positions of some models start at 2
    size = _LETTERS * length
    pieces = [text[start : start + size] for start in range(0, len(text) - size, size)][:_ROWS]
    if source is None or length < 16:
        return None
    read = tokens_of(source, pieces, truncation=True, max_length=length)
    rows = [row for row in read if len(row) == length]
    rows = rows[: len(rows) // multiple * multiple]
    return torch.tensor(rows) if rows and _are_known(model, rows) else None


def sentence_case(
    model: TransformersModel, source: pathlib.Path | None, like: Mapping[str, torch.Tensor], rows: int | None
) -> Case | None:
    """Return a test case with sentences, padded on the right; ``None`` if the folder has no tokenizer of the model."""
    # like: an example with the input names of the model
    room = getattr(model.config, "max_position_embeddings", None) or _LENGTH
    texts = itertools.islice(itertools.cycle(_SENTENCES), rows or len(_SENTENCES))
    if source is None:
        return None
    read = tokens_of(source, list(texts), truncation=True, max_length=min(_LENGTH, room - 2))
    if not read or not _are_known(model, read):
        return None
    found = [torch.tensor(row) for row in read]
    ids = pad_sequence(found, batch_first=True, padding_value=model.config.pad_token_id or 0)
    mask = pad_sequence([torch.ones_like(row) for row in found], batch_first=True)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return Case(f"{len(ids)} sentences", (), {name: inputs[name] for name in like})


def _are_known(model: TransformersModel, rows: Sequence[Sequence[int]]) -> bool:
    return all(rows) and max(map(max, rows)) < model.config.vocab_size


logger = logging.getLogger("yobx_flatten")

_ANSWERS = 2  # number of answers that are sampled for each prompt
_NEW = 64  # largest number of tokens of a sampled answer


# Build the calibration text for rounding to 4 bits: chats with the model's own answers, and a text.
#
#     prompts ──> sampled answers ──────────────────┐
#     text that is not used for the measurement ────┴──> rows of equal length


def answered(model: TransformersModel, prompts: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tokens of each prompt followed by a sampled answer of the model, int64 of shape (length,)."""
    # prompts: tokens and their mask, of shape (rows, length), padded on the left
    ids, mask = (prompts[name].repeat(_ANSWERS, 1) for name in ("input_ids", "attention_mask"))
    logger.info("drawing answers of %s", type(model).__qualname__, extra=STEP)
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    with undisturbed(seed=0, model=model):
        asked = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "return_dict_in_generate": False}
        found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=_NEW, **asked, **plain_loop(model))
    stops = torch.tensor([] if ends is None else ends, dtype=torch.int64).reshape(-1)
    length, rows = ids.shape[1], []
    for row, read in zip(found, mask, strict=True):
        ended = torch.isin(row[length:], stops).nonzero()
        end = int(ended[0]) + 1 if len(ended) else len(row) - length
        rows.append(torch.cat([row[:length][read == 1], row[length : length + end]]))
    return rows


def plain_loop(model: TransformersModel) -> dict[str, Any]:
    """Return ``generate`` arguments for one text per prompt, without beam search, and with a dynamic cache."""
    stated: dict[str, Any] = {} if model.generation_config is None else model.generation_config.to_dict()
    own = {} if stated.get("cache_implementation") is None else {"cache_implementation": "dynamic"}
    return {"max_length": None, "num_beams": 1, "num_return_sequences": 1, **own, **plain_loop_entries(stated)}


_ROLES = ("system", "user", "assistant", "tool", "developer")
_INCOMPLETE = "�"  # a tokenizer returns this character for the first bytes of an incomplete character


def chat_tokenizer(folder: pathlib.Path) -> Any:
    tokenizer = open_tokenizer(folder, failure=DamagedFileError, padding_side="left")
    _check_template(tokenizer, folder)
    return tokenizer


def message_tokens(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, torch.Tensor]:
    """Return tokens and attention mask of a conversation up to the reply, int64 of shape (1, length)."""
    # options: further arguments of `apply_chat_template`, such as `tools`
    text = _written(tokenizer, messages, **options)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chat_text(tokenizer: Any, folder: pathlib.Path, message: str) -> str:
    _check_template(tokenizer, folder)
    return _written(tokenizer, [{"role": "user", "content": message}])


def text_pieces(tokenizer: Any, tokens: Iterable[torch.Tensor], made: list[torch.Tensor]) -> Iterator[str]:
    """Yield the text of generated tokens piece by piece, as soon as the characters are complete."""
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

    refused = "The chat template refuses these messages"
    # a template is untrusted code that runs in jinja's sandbox
    with raised_as(lambda error: InvalidArgumentError(f"{refused}: {first_line(error)}")):
        how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **options}
        text = limited(tokenizer.apply_chat_template, list(messages), **how)
    assert isinstance(text, str)
    return text


CHATS = "cases/generate-chats.case"  # the original model's answers to chat questions
CHAT_TOKENS = 50  # largest number of new tokens in an answer

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
    """Return tokens and attention mask of chat prompts, int64 of shape (rows, length), padded on the left."""
    # questions: the caller's prompts, which need no chat template; by default `_QUESTIONS`, which need one
    # returns: `None` if there is no fitting tokenizer, or if the model has no room for an answer
    if source is None:
        return None

    def read() -> list[list[int]]:
        tokenizer: Any = open_tokenizer(source, failure=ModelSourceError)
        texts = list(questions or _QUESTIONS)[:rows]
        if getattr(tokenizer, "chat_template", None):
            written = Limited(tokenizer.apply_chat_template)
            messages = [[{"role": "user", "content": question}] for question in texts]
            texts = [written(one, add_generation_prompt=True, tokenize=False) for one in messages]
        elif not questions:
            return []
        found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    # each template and each tokenizer has its own errors; the export continues without chats
    prompts: list[list[int]] = result_or(read, lambda error: [])
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
