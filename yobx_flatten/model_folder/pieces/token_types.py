"""Add ``token_type_ids`` to a model's file: which of two texts a token belongs to.

A tokenizer returns them for a pair of texts, and BERT, ELECTRA or DeBERTa add an embedding for each. Whether a model
does is found by calling it: a configuration may state types that no layer reads, and the types of GPT-2 are words.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...private_names.of_torch import pytree
from ...recipe.aliases import TransformersModel

TYPES = "token_type_ids"


def pair_types(model: TransformersModel, batch: int, length: int) -> torch.Tensor:
    """Make the types of pairs of texts, of which the second begins later in each row: int64 of (batch, length)."""
    # model: a model that `has_types` holds for; one whose types have several columns (TAPAS) gets as many
    begins = 1 + torch.arange(batch)[:, None] % (length - 1)
    types = (torch.arange(length) >= begins).long()
    columns = getattr(model.config, "type_vocab_sizes", None)
    return types if columns is None else types[..., None] * (torch.tensor(columns) > 1).long()


@torch.no_grad()
def has_types(model: TransformersModel, tokens: torch.Tensor) -> bool:
    """Return whether the scores of a model depend on types of tokens that its tokenizer may return."""
    # tokens: tokens to call it with, int64 of shape (batch, length)
    if TYPES not in inspect.signature(model.forward).parameters:
        return False
    pairs = pair_types(model, *tokens.shape)
    without, alike = _leaves(model, tokens, None), _leaves(model, tokens, torch.zeros_like(pairs))
    try:
        differing = _leaves(model, tokens, pairs)
    except IndexError:  # it has one type: the embedding has one row
        return False
    # without types, some read the tokens as of one text; others have no types then, and their tokenizers decide
    return not _equal(alike, differing) and (_equal(without, alike) or _tokenizer_has_types(model))


def _leaves(model: TransformersModel, tokens: torch.Tensor, types: torch.Tensor | None) -> list[Any]:
    given = {} if types is None else {TYPES: types}
    found = model(input_ids=tokens, **given)
    return pytree.tree_leaves(found.to_tuple() if hasattr(found, "to_tuple") else found)


def _equal(some: list[Any], others: list[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for one, other in pairs if isinstance(one, torch.Tensor))


def _tokenizer_has_types(model: TransformersModel) -> bool:
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    try:
        kinds = TOKENIZER_MAPPING[type(model.config)]
    except KeyError:
        return False
    found = kinds if isinstance(kinds, tuple) else (kinds,)  # slow and fast ones before transformers 5
    return any(TYPES in getattr(kind, "model_input_names", ()) for kind in found if kind is not None)
