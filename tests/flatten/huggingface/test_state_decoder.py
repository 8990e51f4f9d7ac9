"""Models that go on from states: a mask of all tokens, and zeros as the states before the first token."""

import pytest
import torch
import torch.utils._pytree as pytree
from transformers.cache_utils import Cache

from tests.cache_words import WORD, cache_of
from yobx_flatten import DecodeSizes, decode_inputs, register_flattening_functions
from yobx_flatten.huggingface.cache_names import argument_of
from yobx_flatten.huggingface.decoders import StateDecoder
from yobx_flatten.model_folder.pieces.text import decoder_pieces
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.trees.walk import leaf_names

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_recurrent_state"), reason="before 5.23 several tokens after a state leave the mask out"
)


def zeros_before_the_first_token(cache, rows):
    """A cache in which nothing was read, made as a generation loop makes it: zeros, and keys of length 0."""
    names = leaf_names({WORD: cache})
    leaves, spec = pytree.tree_flatten(cache)
    parts = ["states" if "_states" in name else name.rpartition(".")[2] for name in names]
    sizes = [
        leaf.shape if part == "states" else (rows, leaf.shape[1], 0, leaf.shape[3])
        for leaf, part in zip(leaves, parts, strict=True)
    ]
    empty = [leaf.new_zeros(rows, *size[1:]) for leaf, size in zip(leaves, sizes, strict=True)]
    return pytree.tree_unflatten(empty, spec)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "lfm2", "qwen3_next"])
def test_zeros_are_the_state_before_the_first_token(name):
    """A padded prompt after them has the scores that the model has for it without any cache."""
    model = small_model(name)
    decoder = StateDecoder(model) if StateDecoder.fits(model) else model
    ids = torch.randint(3, 259, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    word = argument_of(decoder.forward)  # before 5.24 not that of models with attention
    like = dict.fromkeys(("input_ids", "attention_mask", word))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        cache = zeros_before_the_first_token(decode_inputs(decoder, DecodeSizes(), like)[word], 3)
        found = decoder(input_ids=ids, attention_mask=mask, **{word: cache}, use_cache=True)
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=True)
    torch.testing.assert_close(found["logits"][:, -1], wanted.logits[:, -1], atol=1e-4, rtol=1e-4)


def test_a_model_without_attention_takes_what_other_decoders_take():
    """The mask of all tokens, of which it needs the last ones; its scores are those of the text in one call."""
    model = small_model("mamba")
    (piece,) = decoder_pieces(model)
    assert list(piece.kwargs) == ["input_ids", "attention_mask", "cache"]
    ids = torch.randint(3, 259, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits[:, -1]
        read = piece.module(ids[:, :7], mask[:, :7])
        found = piece.module(ids[:, 7:], mask, cache_of(read))
    torch.testing.assert_close(found["logits"][:, -1], wanted, atol=1e-4, rtol=1e-4)
