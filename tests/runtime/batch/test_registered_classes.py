"""Registered classes and block masks are split and joined."""

import functools
import operator
import re

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention
from torch.utils import _pytree as pytree

from roundpipe_runtime import Replicate, RoundPipe, RoundPipeRunConfig, SplitError, TensorChunkSpec
from roundpipe_runtime.batch.joining import join
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.device.transfer import cut_mask, parts_of_mask
from roundpipe_runtime.errors import UnregisteredObjectError
from tests.flatten.nodes import Dense, TrainState
from tests.modules import Answers
from tests.runtime.documents import BatchResult, FlexibleOutput, ModelOutput, TransformerOutput
from tests.runtime.small import rows
from yobx_flatten import functions_from_fields, make_dynamic_cache
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening

# what is not compiled is slow, torch says; here it is the reference
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def test_registered_classes_are_cut():
    batch = (
        TransformerOutput(rows(5, 3), rows(5, 2, 2), loss=0.5),
        FlexibleOutput(rows(5)),
        FlexibleOutput(rows(5), rows(5, 4)),
        BatchResult([rows(5), rows(5, 2)], {"x": rows(5), "name": "first"}),
        TrainState({"w": rows(5, 2)}, {"m": [rows(5)]}, step=7),
        Dense(rows(5, 2), rows(5), activation="tanh"),
    )
    first, second = (part.args for part in split(batch, {}, None, 2))
    assert type(first[0]) is TransformerOutput
    assert first[0].logits.shape == (3, 3)
    assert (second[0].hidden_states[:, 0, 0].tolist(), second[0].loss) == ([3, 4], 0.5)
    assert first[1].attentions is None
    assert second[2].attentions.shape == (2, 4)
    assert [t.shape[0] for t in second[3].outputs] == [2, 2]
    assert (second[3].metadata["x"].tolist(), second[3].metadata["name"]) == ([3, 4], "first")
    assert first[4].params["w"][:, 0].tolist() == [0, 1, 2]
    assert (second[4].opt_state["m"][0].tolist(), second[4].step) == ([3, 4], 7)
    assert (second[5].bias.tolist(), second[5].activation) == ([3, 4], "tanh")


def test_an_unregistered_object_with_tensors_is_refused_with_the_line_to_type():
    """The document's first example: handed on whole, its tensors would be neither cut nor moved; a rule may say so."""
    state = ModelOutput(rows(4), rows(4))
    with pytest.raises(UnregisteredObjectError) as caught:
        split((rows(4),), {"state": [state]}, None, 2)
    message = str(caught.value)
    assert message.startswith("kwargs['state'][0] is a tests.runtime.documents.ModelOutput, which torch does not know")
    assert "It holds 2 tensors, 64 bytes. Register it first:\n" in message
    parts = split((rows(4), state), {}, None, 2, split_input={"args[1]": Replicate})
    assert all(part.args[1] is state for part in parts)


def test_a_cache_is_cut_along_the_axis_that_its_registration_declares():
    """An empty one is made anew for each microbatch."""
    transformers = pytest.importorskip("transformers")
    cache = make_dynamic_cache([(torch.randn(4, 2, 3, 5), torch.randn(4, 2, 3, 5)) for _ in range(2)])
    with register_flattening_functions(patch_transformers=True):
        parts = split((), {"input_ids": rows(4, 1), "held": cache}, None, 3)
        alone = split((), {"held": cache, "table": torch.zeros(9)}, None, 3)
        first, second = split((rows(4),), {"held": transformers.DynamicCache()}, None, 2)
    assert [part.rows for part in alone] == [2, 1, 1]
    for layer in range(2):
        keys = [part.kwargs["held"].layers[layer].keys for part in parts]
        assert torch.equal(torch.cat(keys), cache.layers[layer].keys)
    assert [part.kwargs["held"].get_seq_length() for part in parts] == [3, 3, 3]
    assert first.kwargs["held"] is not second.kwargs["held"]


@pytest.mark.parametrize("filled", [True, False])
def test_an_unregistered_cache_is_refused(filled):
    """An empty one, too: every microbatch would write into the same."""
    cache = pytest.importorskip("transformers").DynamicCache()
    if filled:
        cache.update(torch.zeros(4, 2, 3, 5), torch.zeros(4, 2, 3, 5), 0)
    with pytest.raises(
        UnregisteredObjectError, match=re.escape("register_flattening_functions(patch_transformers=True)")
    ):
        split((rows(4),), {"held": cache}, None, 2)


class TimeMajor:
    def __init__(self, steps, mask):
        self.steps, self.mask = steps, mask


def test_a_class_declares_its_batch_axis_with_its_registration():
    register_class_flattening(
        TimeMajor, lambda obj: ([obj.steps, obj.mask], None), lambda children, _: TimeMajor(*children), None,
        axes={"0": {1: "batch"}},
    )  # fmt: skip
    try:
        batch = TimeMajor(torch.arange(28).reshape(7, 4), rows(4))
        parts = split((batch,), {}, None, 3)
        joined = join([part.args[0] for part in parts], [part.rows for part in parts])
    finally:
        unregister_class_flattening(TimeMajor)
    assert [tuple(part.args[0].steps.shape) for part in parts] == [(7, 2), (7, 1), (7, 1)]
    assert torch.equal(joined.steps, batch.steps)
    assert torch.equal(joined.mask, batch.mask)


LENGTH = 128


def by_row(b, h, q_idx, kv_idx):
    """Reads the batch index, and no tensor: nothing in the mask would change if it were not shifted."""
    return (q_idx == kv_idx) | ((q_idx >= kv_idx) & ((kv_idx + 3 * b) % 5 < b + 1))


DOCUMENTS = torch.arange(4 * LENGTH).reshape(4, LENGTH) // torch.tensor([[16], [32], [48], [64]])


def by_document(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def closed_over(documents):
    def same(b, h, q_idx, kv_idx):
        return documents[b, q_idx] == documents[b, kv_idx]

    return and_masks(same, by_row)


def partially(documents, b, h, q_idx, kv_idx):
    return documents[b, q_idx] == documents[b, kv_idx]


MASKS = {
    "of the module": by_row,
    "a table of the module": by_document,
    "a closure": closed_over(DOCUMENTS),
    "a partial": functools.partial(partially, DOCUMENTS),
}


def mask_of(mask_mod, batch=4):
    return create_block_mask(mask_mod, batch, None, LENGTH, LENGTH, device="cpu")


class Attention(nn.Linear):
    """Hands the mask on, so that it travels between stages, too."""

    def forward(self, given):
        x, mask = given["x"], given["mask"]
        y = super().forward(x).unsqueeze(1)
        return {"x": flex_attention(y, y, y, block_mask=mask).squeeze(1), "mask": mask}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    # torch has no backward of flex attention on the CPU
    return nn.Sequential(Attention(8, 8), Attention(8, 8), Answers(operator.itemgetter("x"))).requires_grad_(False)


@pytest.fixture(scope="module")
def pipe(model):
    wrapped = RoundPipe(model, devices="virtual:2:check")
    yield wrapped
    wrapped.close()


@pytest.fixture
def registered():
    """As the diagnosis of a class that is not registered advises; the function is a static part then."""
    fields = [name for name, value in vars(mask_of(by_row)).items() if value is None or isinstance(value, torch.Tensor)]
    flatten, keyed, unflatten = functions_from_fields(BlockMask, fields, ["seq_lengths", "BLOCK_SIZE", "mask_mod"])
    register_class_flattening(BlockMask, flatten, unflatten, keyed)
    yield
    unregister_class_flattening(BlockMask)


def check(pipe, model, mask, count):
    given = {"x": torch.randn(4, LENGTH, 8, generator=torch.Generator().manual_seed(1)), "mask": mask}
    with torch.no_grad():
        expected = model(given)
        found = pipe(given, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=count))
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_reads_the_row_gives_the_outputs_of_the_whole_batch(pipe, model, name, count):
    check(pipe, model, mask_of(MASKS[name]), count)


@pytest.mark.parametrize("count", [2, 4])
def test_a_mask_whose_class_is_registered_is_cut_the_same(pipe, model, registered, count):
    """Its tensors alone could be cut, and its function would count from row 0 in every microbatch."""
    assert pytree.treespec_leaf() != pytree.tree_structure(mask_of(by_row))
    check(pipe, model, mask_of(by_row), count)


def test_a_mask_for_all_rows_goes_whole(pipe, model):
    mask = mask_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, batch=None)
    check(pipe, model, mask, 2)
    assert [part.args[0] is mask for part in split((mask,), {"x": torch.zeros(4)}, None, 2)] == [True, True]


def test_a_mask_tells_how_many_rows_there_are():
    """(4, ...) of the mask: a table of three beside it is no batch. A rule cuts it along the batch or not at all."""
    mask = mask_of(by_row)
    parts = split((mask,), {"table": torch.zeros(3)}, torch.arange(4), 2)
    assert [part.label.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [part.args[0].shape for part in parts] == [(2, 1, LENGTH, LENGTH)] * 2
    whole = split((mask, torch.zeros(6)), {}, None, 2, split_input={"args[0]": Replicate})
    assert [part.args[0] is mask for part in whole] == [True, True]
    cut = split((mask,), {}, None, 2, split_input={"args[0]": TensorChunkSpec(0)})
    assert [part.args[0].shape[0] for part in cut] == [2, 2]
    with pytest.raises(SplitError, match="a BlockMask is split along its batch, axis 0"):
        split((mask,), {}, None, 2, split_input={"args[0]": TensorChunkSpec(2)})
    with pytest.raises(SplitError, match=r"4 in args\[0\]; 6 in args\[1\]"):
        split((mask, torch.zeros(6)), {}, torch.zeros(6), 2, split_input={"args[1]": TensorChunkSpec(0)})


@pytest.mark.parametrize("name", ["a closure", "a partial"])
def test_tensors_of_a_closure_travel_with_the_mask(name):
    """On another device the function needs them there; the user's function keeps its own."""
    mask = cut_mask(mask_of(MASKS[name]), 2, 4)
    tensors, together = parts_of_mask(mask)
    assert any(tensor is DOCUMENTS for tensor in tensors)
    moved = together([torch.zeros_like(t) if t is DOCUMENTS else t for t in tensors])
    at = torch.tensor(0), torch.tensor(0), torch.tensor(100), torch.tensor(0)
    assert not mask.mask_mod(*at)
    if name == "a partial":
        assert moved.mask_mod(*at)  # every place is of document 0 now
    assert moved is not mask
