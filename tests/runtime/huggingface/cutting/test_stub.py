"""Tests of roundpipe_runtime.huggingface.cutting.stub."""

import threading

import pytest
import torch
from torch import nn

from roundpipe_runtime.huggingface import CutError
from roundpipe_runtime.huggingface.cutting.stub import copy_with_stubs, running, sync
from tests.runtime.huggingface.hf_small import Block, Toy, tokens


def made():
    model = Toy()
    layers = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    return model, copy_with_stubs(model, layers)


def test_a_copy_shares_parameters_and_has_no_layers():
    model, copied = made()
    assert copied is not model
    assert copied.embed is not model.embed
    assert copied.embed.weight is model.embed.weight
    assert {name for name, _ in copied.named_parameters()} == {"embed.weight", "head.weight", "head.bias"}


def test_a_stub_passes_for_its_layer():
    model, copied = made()
    model.layers[1].kind = "sliding"
    assert isinstance(copied.layers[1], Block)
    assert copied.layers[1].kind == "sliding"
    assert copied.layers[1].linear is model.layers[1].linear


def test_stubs_answer_to_the_session_of_their_thread():
    _, copied = made()

    class Twice:
        def call(self, layer, args, kwargs):
            return args[0] * 2

    with running(Twice()):
        found = copied(tokens())
        errors = []

        def other():
            try:
                copied(tokens())
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert torch.equal(found, copied.head(copied.embed(tokens()) * 8))
    assert errors == ["The placeholder of layers.0 was called outside of a run."]


def test_sync_follows_the_model():
    model, copied = made()
    model.eval()
    model.embed.weight = nn.Parameter(torch.zeros(20, 8))
    model.note = 7
    sync(copied, model, {"embed.weight"})
    assert not copied.embed.training
    assert copied.note == 7
    assert copied.embed.weight is model.embed.weight
    assert [name for name, _ in copied.named_parameters()] == ["embed.weight"]
    with pytest.raises(AttributeError, match="weight"):
        copied.head(torch.zeros(1, 8))


def test_what_cannot_be_copied_is_refused():
    model = Toy()
    model.lock = threading.Lock()
    with pytest.raises(CutError, match=r"Toy cannot be copied: cannot pickle") as caught:
        copy_with_stubs(model, {})
    assert caught.value.reason == "copy"


def test_plain_data_that_changed_is_brought_up_to_date():
    model, copied = made()
    model.active, model.scales = ["two"], {"two": 0.5}
    sync(copied, model, None)
    copied.scales["two"] = 1.0
    assert copied.active == ["two"]
    assert model.scales == {"two": 0.5}
