"""Tests of roundpipe_runtime.huggingface.cutting.stub: models with a forward of the user."""

import functools
import types

import pytest
import torch

from roundpipe_runtime.huggingface import cut
from roundpipe_runtime.huggingface.cutting.stub import rebind_functions
from tests.runtime.huggingface.hf_small import Toy, hf_batch, hf_model, tokens, worst_gradient, wrapped


def in_a_closure(model):
    """A function whose closure holds the former forward, a method of the model."""
    original = model.forward

    def forward(*args, scale=1.0, **kwargs):
        return original(*args, **kwargs) * scale

    model.forward = forward


def as_a_method(model):
    """A method of the model that calls the former forward, as the heads of TRL are."""
    original = model.forward

    def forward(self, *args, scale=1.0, **kwargs):
        return original(*args, **kwargs) * scale

    model.forward = types.MethodType(forward, model)


def twice(model):
    """A function around a function."""
    in_a_closure(model)
    as_a_method(model)


def of_the_module(model):
    """A function whose closure holds the model itself, and calls its class."""

    @functools.wraps(model.forward)
    def forward(*args, scale=1.0, **kwargs):
        return type(model).forward(model, *args, **kwargs) * scale

    model.forward = forward


@pytest.mark.parametrize("replace", [in_a_closure, as_a_method, twice, of_the_module])
def test_a_model_with_a_replaced_forward_is_cut(replace):
    model, plain = Toy(), Toy()
    replace(model)
    replace(plain)
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    assert len(pipeline.cut.layers) == 3
    batch = {"input_ids": tokens(), "scale": 0.5}
    expected = plain(**batch)
    expected.square().sum().backward()
    found = pipeline(**batch)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    assert worst_gradient(model, plain) < 1e-6


def test_a_forward_that_is_replaced_later_counts():
    model, plain = hf_model("llama"), hf_model("llama")
    plain.load_state_dict(model.state_dict())
    pipeline, batch = wrapped(model), hf_batch()
    before = pipeline(**batch).logits
    for one in (model, plain):

        def forward(self, *args, halves=False, **kwargs):
            output = type(self).forward(self, *args, **kwargs)
            output.logits = output.logits / 2 if halves else output.logits
            return output

        one.forward = types.MethodType(forward, one)
    torch.testing.assert_close(pipeline(**batch, halves=True).logits, plain(**batch, halves=True).logits)
    torch.testing.assert_close(pipeline(**batch).logits, before)
    prompt = {"input_ids": batch["input_ids"][:, :4], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(pipeline.generate(**prompt), plain.generate(**prompt))


def test_a_forward_that_calls_another_model_stays():
    """A function that holds no module of the model is kept as it is, and so is what it counts."""
    model = Toy()
    calls = 0

    def forward(input_ids):
        nonlocal calls
        calls += 1
        return input_ids

    model.head.forward = forward
    rebind_functions(model, {})
    assert model.head.forward is forward
    made = cut(Toy(), {"input_ids": tokens(2)})
    assert not made.report.is_whole
    assert calls == 0
