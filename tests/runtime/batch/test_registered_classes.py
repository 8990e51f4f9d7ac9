"""Objects of registered classes are split, caches along their declared axis; others are refused."""

import re

import pytest
import torch

from roundpipe_runtime.batch.joining import join
from roundpipe_runtime.batch.spec import Replicate
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import UnregisteredObjectError
from tests.flatten.nodes import Dense, TrainState
from tests.runtime.batch.rows import rows
from tests.runtime.documents import BatchResult, FlexibleOutput, ModelOutput, TransformerOutput
from yobx_flatten import (
    make_dynamic_cache,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)


def test_registered_classes_of_the_document_are_cut():
    batch = (
        TransformerOutput(rows(5, 3), rows(5, 2, 2), loss=0.5),
        FlexibleOutput(rows(5)),
        FlexibleOutput(rows(5), rows(5, 4)),
        BatchResult([rows(5), rows(5, 2)], {"x": rows(5), "name": "first"}),
    )
    first, second = split(batch, {}, None, 2)
    assert type(first.args[0]) is TransformerOutput
    assert first.args[0].logits.shape == (3, 3)
    assert second.args[0].hidden_states[:, 0, 0].tolist() == [3, 4]
    assert second.args[0].loss == 0.5
    assert first.args[1].attentions is None
    assert second.args[2].attentions.shape == (2, 4)
    assert [t.shape[0] for t in second.args[3].outputs] == [2, 2]
    assert second.args[3].metadata["x"].tolist() == [3, 4]
    assert second.args[3].metadata["name"] == "first"


def test_classes_written_as_for_jax_are_cut():
    state = TrainState({"w": rows(4, 2)}, {"m": [rows(4)]}, step=7)
    first, second = split((state, Dense(rows(4, 2), rows(4), activation="tanh")), {}, None, 2)
    assert first.args[0].params["w"][:, 0].tolist() == [0, 1]
    assert second.args[0].opt_state["m"][0].tolist() == [2, 3]
    assert second.args[0].step == 7
    assert second.args[1].bias.tolist() == [2, 3]
    assert second.args[1].activation == "tanh"


def test_an_unregistered_object_with_tensors_is_refused_with_the_line_to_type():
    """The document's first example: handed on whole, its tensors would be neither cut nor moved."""
    with pytest.raises(UnregisteredObjectError) as caught:
        split((rows(4),), {"state": [ModelOutput(rows(4), rows(4))]}, None, 2)
    message = str(caught.value)
    assert message.startswith("kwargs['state'][0] is a tests.runtime.documents.ModelOutput, which torch does not know")
    assert "It holds 2 tensors, 64 bytes. Register it first:\n" in message


def test_an_unregistered_object_goes_whole_if_a_rule_says_so():
    state = ModelOutput(rows(4), rows(4))
    parts = split((rows(4), state), {}, None, 2, split_input={"args[1]": Replicate})
    assert all(part.args[1] is state for part in parts)


def test_a_cache_is_cut_along_the_axis_that_its_registration_declares():
    pytest.importorskip("transformers")
    cache = make_dynamic_cache([(torch.randn(4, 2, 3, 5), torch.randn(4, 2, 3, 5)) for _ in range(2)])
    with register_flattening_functions(patch_transformers=True):
        parts = split((), {"input_ids": rows(4, 1), "held": cache}, None, 3)
        alone = split((), {"held": cache, "table": torch.zeros(9)}, None, 3)
    assert [part.rows for part in alone] == [2, 1, 1]
    for layer in range(2):
        keys = [part.kwargs["held"].layers[layer].keys for part in parts]
        assert torch.equal(torch.cat(keys), cache.layers[layer].keys)
    assert [part.kwargs["held"].get_seq_length() for part in parts] == [3, 3, 3]


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


def test_an_empty_registered_cache_is_one_per_microbatch():
    transformers = pytest.importorskip("transformers")
    with register_flattening_functions(patch_transformers=True):
        first, second = split((rows(4),), {"held": transformers.DynamicCache()}, None, 2)
    assert first.kwargs["held"] is not second.kwargs["held"]


class TimeMajor:
    def __init__(self, steps, mask):
        self.steps, self.mask = steps, mask


def test_a_class_declares_its_batch_axis_with_its_registration():
    register_class_flattening(
        TimeMajor,
        lambda obj: ([obj.steps, obj.mask], None),
        lambda children, _: TimeMajor(*children),
        None,
        axes={"0": {1: "batch"}},
    )
    try:
        batch = TimeMajor(torch.arange(28).reshape(7, 4), rows(4))
        parts = split((batch,), {}, None, 3)
        joined = join([part.args[0] for part in parts], [part.rows for part in parts])
    finally:
        unregister_class_flattening(TimeMajor)
    assert [tuple(part.args[0].steps.shape) for part in parts] == [(7, 2), (7, 1), (7, 1)]
    assert torch.equal(joined.steps, batch.steps)
    assert torch.equal(joined.mask, batch.mask)
