"""Tests of roundpipe_runtime.device.composite: parameters of which a device cannot get a copy."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from roundpipe_runtime import ConfigError, RoundPipe
from roundpipe_runtime.device.composite import check_copyable, weights_kept
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from tests.runtime.few_bits import layer_of
from tests.runtime.huggingface.hf_small import Toy


class Quantized(nn.Parameter):
    """A parameter with a state next to its numbers, as those of bitsandbytes are."""


class Sealed(TwoTensor):
    """A tensor made of two, which no operator copies, as those of torchao are."""

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Sealed(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.empty_like.default:
            raise NotImplementedError("unimplemented operator\nmore of it")
        return super().__torch_dispatch__(func, types, args, kwargs)


def model_with(parameter):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = parameter
    return model


def quantized(**values):
    parameter = Quantized(torch.ones(2, 2), requires_grad=False)
    parameter.__dict__.update(values)
    return parameter


@pytest.mark.parametrize("name", ["quant_state", "scale"])
def test_tensors_next_to_numbers_that_train_are_refused(name):
    held = {"quant_state": SimpleNamespace(absmax=torch.ones(2)), "scale": torch.ones(2)}[name]
    with pytest.raises(ConfigError) as caught:
        RoundPipe(model_with(quantized(**{name: held}).requires_grad_()), devices="virtual:1")
    text = str(caught.value)
    assert text.startswith("1.weight is a tests.runtime.device.test_copyable.Quantized, which stores tensors in its")
    assert f"attribute {name!r}, and it is trainable. Quantized weights must be frozen" in text
    assert "    AutoModelForCausalLM.from_pretrained(" in text


class Forgetful(TwoTensor):
    """A tensor that is made of others than those which it is taken apart into."""

    @staticmethod
    def __tensor_unflatten__(inner, *rest):
        return Forgetful(inner["a"] + 1, inner["b"])


class Remembering(nn.Linear):
    def forward(self, x):
        return x if self.weight is self.first() else -x


class Refusing(TwoTensor):
    """A tensor that cannot be put together again."""

    @staticmethod
    def __tensor_unflatten__(inner, *rest):
        raise ValueError("not here\nnor there")


class Slotted:
    """An object whose tensor is not in its `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self):
        self.scale = torch.ones(2)


def two(kind, trains=False):
    return nn.Parameter(kind(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=trains)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: quantized(scale=Slotted()), "stores tensors in its attribute 'scale', and a copy would lack these"),
        (lambda: quantized(scale=torch.ones(2), more=Slotted()), "tensors where the pipeline does not find them"),
        (lambda: two(Forgetful), "which has different values when it is rebuilt"),
        (lambda: two(Refusing), r"be rebuilt from copies of its tensors \(ValueError: not here\)"),
        (lambda: two(Sealed, trains=True), r"copied \(NotImplementedError: unimplemented operator\), and it is tr"),
    ],
    ids=["slots", "more slots", "others", "error", "no copies"],
)
def test_weights_that_are_not_proved_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        check_copyable(model_with(make()))


def test_a_layer_that_computes_otherwise_with_the_copy_is_refused_and_other_classes_are_taken():
    model = model_with(nn.Parameter(torch.ones(2, 2)))
    model[1] = Remembering(2, 2)
    model[1].weight = quantized(scale=torch.ones(2))
    first = model[1].weight
    model[1].first = lambda: first
    with pytest.raises(ConfigError, match="with whose copy Remembering computes different values"):
        check_copyable(model)
    plain = nn.Parameter(torch.ones(2, 2))
    plain.mask = torch.ones(2)
    stated = quantized(blocksize=64, kind="nf4", none=None, empty=SimpleNamespace(bits=4))
    for weight in (plain, stated, two(TwoTensor, trains=True), two(Sealed)):
        check_copyable(model_with(weight))


def test_a_model_of_transformers_is_refused_before_it_runs():
    """A check of the cut would run it."""
    model = Toy()
    model.head.weight = quantized(scale=Slotted())
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    with pytest.raises(ConfigError, match=r"^head\.weight is a"):
        wrap_model_to_roundpipe(model, devices="virtual:1", lower_threshold=0)


def test_an_evaluation_leaves_weights_as_they_are():
    """A layer that packs its weight anew when it is evaluated: after the block, all is as it was, and trains."""
    torch.manual_seed(0)
    layer = layer_of("stated", torch.randn(64, 64))
    numbers, state = layer.weight.data.clone(), layer.weight.state
    before = dict(vars(state))
    with weights_kept(layer):
        layer.eval()(torch.ones(2, 64))
        assert layer.weight.state.is_turned
    assert layer.weight.state is state is layer.state
    assert dict(vars(state)) == before
    assert torch.equal(layer.weight.data, numbers)
    x = torch.ones(2, 64, requires_grad=True)
    layer.train()(x).sum().backward()
    assert x.grad is not None
