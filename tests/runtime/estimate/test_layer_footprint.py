"""What each layer takes, by calling it on meta."""

import itertools

import torch
from torch import nn

from roundpipe_runtime.estimate.footprint import measure_layers


def layers_of(*widths, device="meta", dtype=torch.float32):
    return [nn.Linear(a, b, device=device, dtype=dtype) for a, b in itertools.pairwise(widths)]


def test_sizes_of_linear_layers_are_those_of_arithmetic():
    """Parameters, boundary tensors, operations: written out."""
    first, second = measure_layers(layers_of(10, 20, 5), (torch.empty(4, 10, device="meta"),))
    assert (first.param_bytes, first.grad_bytes) == (4 * (10 * 20 + 20), 4 * (10 * 20 + 20))
    assert (first.inputs, first.outputs, second.inputs, second.outputs) == (160, 320, 320, 80)
    assert (first.forward_flops, second.forward_flops) == (2 * 4 * 10 * 20, 2 * 4 * 20 * 5)
    # the first input needs no gradient
    assert (first.backward_flops, second.backward_flops) == (2 * 4 * 10 * 20, 2 * 2 * 4 * 20 * 5)
    assert (first.grads_in, first.grads_out, second.grads_in) == (0, 320, 320)


def test_meta_and_real_layers_measure_the_same():
    """A layer without memory takes what the real one takes."""
    real = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    planned = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device="meta") for _ in range(2)]
    on_cpu = measure_layers(real, (torch.ones(3, 8, 16),), kind="cpu")
    on_meta = measure_layers(planned, (torch.empty(3, 8, 16, device="meta"),), kind="cpu")
    assert on_cpu == on_meta


def test_frozen_parameters_have_no_gradients():
    """Only the layer that learns has sums; the one before it gets no gradient at all."""
    frozen, learning = layers_of(8, 8, 8)
    frozen.requires_grad_(False)
    first, second = measure_layers([frozen, learning], (torch.empty(2, 8, device="meta"),))
    assert (first.grad_bytes, first.backward_flops, second.grads_in) == (0, 0, 0)
    assert second.grad_bytes == 4 * 72


def test_gradients_are_summed_in_the_dtype_of_the_optimizer():
    """Weights of two bytes, sums of four; and the model is left without gradients."""
    model = layers_of(8, 8, dtype=torch.bfloat16)
    x = torch.empty(2, 8, device="meta", dtype=torch.bfloat16)
    (found,) = measure_layers(model, (x,), gradient_dtype=lambda parameter: torch.float32)
    assert (found.param_bytes, found.grad_bytes) == (144, 288)
    assert all(parameter.grad is None for parameter in model[0].parameters())


def test_a_parameter_that_is_not_reached_has_no_sum():
    """What a layer holds and does not use is copied there, and nothing comes back."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")

        def forward(self, x):
            return self.used(x)

    (found,) = measure_layers([Half()], (torch.empty(2, 4, device="meta"),))
    assert (found.param_bytes, found.grad_bytes) == (160, 80)


def test_names_and_the_last_call_are_the_callers():
    """Layers are called what they are called elsewhere, and the last one as a training calls it."""
    calls = []

    def last(layer, value):
        calls.append(layer)
        return layer(value).sum()

    layers = layers_of(4, 4, 4)
    found = measure_layers(layers, (torch.empty(2, 4, device="meta"),), names=["a", "b"], last_call=last)
    assert [layer.name for layer in found] == ["a", "b"]
    assert calls == [layers[1]]
    assert found[1].outputs == 4


def test_layers_before_the_first_that_is_measured_are_only_called():
    """What is measured of the others does not depend on it: they are given the same tensors."""
    frozen, *others = layers_of(10, 20, 5, 7)
    frozen.requires_grad_(False)
    layers, given = [frozen, *others], (torch.empty(4, 10, device="meta"),)
    everything = measure_layers(layers, given)
    for start in range(len(layers)):
        assert measure_layers(layers, given, start=start) == everything[start:]
    assert measure_layers(layers, given, names=["a", "b", "c"], start=2)[0].name == "c"
