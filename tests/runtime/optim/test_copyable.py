"""Tests of roundpipe_runtime.optim.copyable: parameters of which a device cannot get a copy."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from roundpipe_runtime import ConfigError, RoundPipe
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from roundpipe_runtime.optim.copyable import check_copyable
from tests import fresh_process
from tests.runtime.huggingface.hf_small import Toy


class State:
    """What belongs to the numbers of a quantized weight."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Quantized(nn.Parameter):
    """A parameter with a state next to its numbers, as those of bitsandbytes are."""


class Sealed(TwoTensor):
    """A tensor made of two, which no operator copies, as those of torchao are."""

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
def test_tensors_next_to_the_numbers_are_refused(name):
    """In an object and bare: the error names the parameter, its class, the attribute and the line to type."""
    held = {"quant_state": State(absmax=torch.ones(2)), "scale": torch.ones(2)}[name]
    with pytest.raises(ConfigError) as caught:
        RoundPipe(model_with(quantized(**{name: held})), devices="virtual:1")
    text = str(caught.value)
    assert text.startswith("1.weight is a tests.runtime.optim.test_copyable.Quantized, which keeps tensors in its")
    assert f"attribute {name!r}" in text
    assert "    AutoModelForCausalLM.from_pretrained(" in text


def test_a_class_without_copies_is_refused():
    """The error of the class is part of the message, in one line."""
    with pytest.raises(ConfigError, match=r"does not copy it \(NotImplementedError: unimplemented operator\)"):
        check_copyable(model_with(nn.Parameter(Sealed(torch.ones(2, 2), torch.ones(2, 2)), requires_grad=False)))


def test_other_classes_are_taken():
    """Plain parameters with attributes, classes of the user's with numbers, and tensors that are copied."""
    plain = nn.Parameter(torch.ones(2, 2))
    plain.mask = torch.ones(2)
    check_copyable(model_with(plain))
    check_copyable(model_with(quantized(blocksize=64, kind="nf4", none=None, empty=State(bits=4))))
    check_copyable(model_with(nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))))


def test_a_model_of_transformers_is_refused_before_it_runs():
    """A check of the cut would run it, and bitsandbytes repacks weights when they are read in evaluation mode."""
    model = Toy()
    model.head.weight = Quantized(model.head.weight.detach(), requires_grad=False)
    model.head.weight.quant_state = State(absmax=torch.ones(2))
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model runs"))
    with pytest.raises(ConfigError, match=r"^head\.weight is a"):
        wrap_model_to_roundpipe(model, devices="virtual:1", lower_threshold=0)


_OF_BITSANDBYTES = """
import bitsandbytes, torch
from torch import nn
from roundpipe_runtime import ConfigError, RoundPipe
for layer in (
    bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4"), bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
):
    try:
        RoundPipe(nn.Sequential(nn.Linear(64, 64), layer.to("cpu")), devices="virtual:1")
    except ConfigError as error:
        print(str(error).partition(" keeps")[0])
"""

_OF_TORCHAO = """
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from roundpipe_runtime import ConfigError, RoundPipe
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
quantize_(model, Int8WeightOnlyConfig())
try:
    RoundPipe(model, devices="virtual:1")
except ConfigError as error:
    print(str(error).partition(", whose class does not copy it")[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "program", "said"),
    [
        ("bitsandbytes", _OF_BITSANDBYTES, ["Params4bit, which", "Int8Params, which"]),
        ("torchao", _OF_TORCHAO, ["0.weight is a torchao.quantization.Int8Tensor"]),
    ],
)
def test_weights_of_libraries_are_refused(library, program, said):
    """Weights in 4 and 8 bits, in a process of their own: these libraries register classes when they are imported."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = fresh_process.run("-c", program, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ".weight is a" in line]
    assert len(lines) == len(said)
    assert all(line.endswith(end) for line, end in zip(lines, said, strict=True)), lines
