"""What code allocates and computes, on devices and on meta, and what each layer takes."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_runtime.estimate.footprint import Footprint, device_kernels, measure_layers, storage_bytes
from tests.modules import module_of


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_counts_until_the_last_tensor_is_gone(device):
    """A storage counts once, whatever views it has, and no longer than they are there."""
    with Footprint() as found:
        big = torch.empty(1000, device=device)
        view = big[:10]
        del big
        assert found.alive == 4000
        del view
        small = torch.empty(10, device=device)
    assert (found.alive, found.peak) == (40, 4000)
    del small
    assert found.alive == 0


def test_what_was_there_before_does_not_count():
    """Inputs and parameters are told apart from what is computed from them; a copy can be counted."""
    before = torch.ones(100)
    with Footprint() as found:
        found.ignore([before])
        view = before.view(10, 10)
        other = view + 1
    assert found.alive == storage_bytes([other]) == 400
    copy = torch.ones(100)
    found.count(copy)
    assert found.alive == 800
    del copy
    assert found.alive == 400


def test_a_new_peak_begins_at_what_is_alive():
    """The highest point of a second part is its own."""
    with Footprint() as found:
        kept = torch.empty(25)
        torch.empty(1000)
        assert found.restart() == 100
        torch.empty(50)
    assert found.peak == 300
    del kept


def test_operations_are_those_of_torchs_counter():
    """Of convolutions, forward and backward."""
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Conv1d(8, 4, 3))
    x = torch.ones(2, 4, 16, requires_grad=True)
    with FlopCounterMode(display=False) as expected:
        model(x).sum().backward()
    with Footprint() as found:
        model(x).sum().backward()
    assert found.flops == expected.get_total_flops()


@pytest.mark.parametrize("shared", [1, 2])
def test_heads_that_share_keys_count_as_if_each_had_its_own(shared):
    """Scores and weighted values: 4 x heads x length^2 x width, however many keys there are."""
    q, k = torch.ones(1, 4, 32, 16), torch.ones(1, 4 // shared, 32, 16)
    with Footprint() as found:
        functional.scaled_dot_product_attention(q, k, k, enable_gqa=shared > 1)
    assert found.flops == 4 * 4 * 32 * 32 * 16


# -- operations on meta, which take what they take on a device ---------------------------------------------------------


def attention(device, *, mask=False, causal=False, dropout=0.0, heads=4):
    q = torch.ones(2, 4, 64, 16, device=device, requires_grad=True)
    k = torch.ones(2, heads, 64, 16, device=device, requires_grad=True)
    bias = torch.zeros(2, 1, 64, 64, device=device) if mask else None
    with Footprint() as found:
        found.ignore([q, k, *([bias] if mask else [])])
        out = functional.scaled_dot_product_attention(
            q, k, k, bias, dropout_p=dropout, is_causal=causal, enable_gqa=heads < 4
        )
        held = found.alive
        out.sum().backward()
    return held, found.peak, found.flops


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": True}, {"heads": 2}, {"heads": 2, "causal": True}, {"dropout": 0.5}]
)
def test_attention_takes_what_it_takes_on_the_cpu(options):
    """Bytes held, bytes at most and operations are equal on meta and in a real run."""
    real = attention("cpu", **options)
    with device_kernels("cpu"):
        assert attention("meta", **options) == real


def test_attention_with_dropout_needs_no_scores_on_an_accelerator():
    """Kernels of accelerators drop inside; on the CPU torch writes all scores."""
    with device_kernels("cpu"):
        on_cpu, *_ = attention("meta", dropout=0.5)
    with device_kernels("cuda"):
        on_card, *_ = attention("meta", dropout=0.5)
    scores = 2 * 4 * 64 * 64 * 4
    assert on_card < scores < on_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_groups_have_the_shapes_of_the_cpu(dtype):
    """Forward and both backward products, in any dtype: 2 x rows x width x width each, with 3 experts as with one."""

    def run(device):
        rows = torch.ones(8, 16, device=device, dtype=dtype, requires_grad=True)
        experts = torch.ones(3, 16, 32, device=device, dtype=dtype, requires_grad=True)
        ends = torch.tensor([2, 5, 8], dtype=torch.int32, device=device)
        with Footprint() as found:
            found.ignore([rows, experts])
            out = functional.grouped_mm(rows, experts, offs=ends)
            out.square().sum().backward()
        return found.flops, out.shape, rows.grad.shape, experts.grad.shape, found.peak

    real = run("cpu")
    assert real[0] == 3 * 2 * 8 * 16 * 32
    with device_kernels():
        assert run("meta") == real


def test_a_mask_that_learns_has_a_gradient_and_masks_on_meta_hide_nothing():
    """As biases of positions do; models ask whether all of a mask is true, and nothing else is answered."""
    q, bias = (torch.empty(shape, device="meta") for shape in ((1, 2, 8, 4), (1, 2, 8, 8)))
    bias.requires_grad_()
    with device_kernels():
        functional.scaled_dot_product_attention(q, q, q, bias).sum().backward()
    assert bias.grad.shape == bias.shape
    mask = torch.ones(2, 8, dtype=torch.bool, device="meta")
    with device_kernels():
        assert bool(mask.all())
        with pytest.raises(RuntimeError, match="meta"):
            mask.sum().item()
    with pytest.raises(RuntimeError, match="meta"):
        bool(mask.all())


def test_outside_of_the_block_nothing_is_changed():
    """Real tensors, and meta tensors afterwards, go through torch's own code."""
    with device_kernels():
        assert functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3).sum() == 8
    q = torch.empty(1, 1, 64, 4, device="meta", requires_grad=True)
    with Footprint() as found:
        out = functional.scaled_dot_product_attention(q, q, q)
    assert found.peak > 64 * 64 * 4  # the scores
    assert out.shape == q.shape


# -- results on meta, computed once ------------------------------------------------------------------------------------


ROWS = torch.empty(6, 4, device="meta")
HALVES = ROWS.bfloat16()
NUMBERS = torch.empty(6, 4, device="meta", dtype=torch.long)
CALLS = {
    "an integer": lambda: NUMBERS + 1,
    "a float that equals it": lambda: NUMBERS + 1.0,
    "an integer, in place": lambda: NUMBERS.clone().add_(1),
    "True": lambda: NUMBERS + True,
    "two dtypes": lambda: ROWS + HALVES,
    "a product": lambda: HALVES @ HALVES.T,
    "its transpose": lambda: HALVES.T @ HALVES,
    "columns first": lambda: ROWS.T.neg(),
    "rows first": lambda: ROWS.neg(),
    "a part": lambda: ROWS[:, 1:3] * 2,
    "dtype by name": lambda: ROWS.sum(0, dtype=torch.float64),
    "dtype by default": lambda: ROWS.sum(0),
    "a list": lambda: torch.cat([ROWS, HALVES]),
    "the list the other way": lambda: torch.cat([HALVES[:1], ROWS]),
    "a copy": lambda: ROWS.to(torch.bfloat16),
    "complex": lambda: torch.view_as_complex(ROWS.view(6, 2, 2)).conj() * 2,
    "not on meta": lambda: torch.ones(2) + 1,
    "a number without a tensor on meta": lambda: torch.arange(3, device="meta"),
}


def form(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.is_conj()


@pytest.mark.parametrize("turns", [CALLS, reversed(CALLS)], ids=["in order", "reversed"])
def test_results_are_those_of_torch(turns):
    """Sizes, strides, dtypes and devices, the first time and again, whatever was asked for before."""
    names = list(turns)
    expected = {name: form(call()) for name, call in CALLS.items()}
    with device_kernels(), torch.inference_mode():
        for name in names * 2:
            assert form(CALLS[name]()) == expected[name], name


def test_results_share_no_memory_unless_those_of_torch_do():
    """A result that is known is another tensor each time; numbers on the host are not taken for sizes."""
    weight = torch.empty(4, 4, device="meta", requires_grad=True)
    with device_kernels():
        first, second = ROWS + 1, ROWS + 1
        view = ROWS.view(4, 6)
        written = first.mul_(2)
        assert [(torch.tensor([n]) + 1).item() for n in (1, 2, 1)] == [2, 3, 2]
        for _ in range(2):
            (ROWS @ weight).sum().backward()
    assert weight.grad.shape == (4, 4)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert view.untyped_storage()._cdata == ROWS.untyped_storage()._cdata
    assert written is first
    with Footprint() as computed, device_kernels():
        ROWS @ ROWS.T
        torch.empty_like(ROWS) @ ROWS.clone().T  # is known, and does no operations
    assert computed.flops == 2 * 6 * 4 * 6


# -- layers, called on meta --------------------------------------------------------------------------------------------


def layers_of(*widths, device="meta", dtype=torch.float32):
    return [nn.Linear(a, b, device=device, dtype=dtype) for a, b in itertools.pairwise(widths)]


def test_sizes_of_linear_layers_are_those_of_arithmetic():
    first, second = measure_layers(layers_of(10, 20, 5), (torch.empty(4, 10, device="meta"),))
    assert (first.param_bytes, first.grad_bytes) == (4 * (10 * 20 + 20), 4 * (10 * 20 + 20))
    assert (first.inputs, first.outputs, second.inputs, second.outputs) == (160, 320, 320, 80)
    assert (first.forward_flops, second.forward_flops) == (2 * 4 * 10 * 20, 2 * 4 * 20 * 5)
    # the first input needs no gradient
    assert (first.backward_flops, second.backward_flops) == (2 * 4 * 10 * 20, 2 * 2 * 4 * 20 * 5)
    assert (first.grads_in, first.grads_out, second.grads_in) == (0, 320, 320)


def test_meta_and_real_layers_measure_the_same():
    real = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    planned = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device="meta") for _ in range(2)]
    on_cpu = measure_layers(real, (torch.ones(3, 8, 16),), kind="cpu")
    on_meta = measure_layers(planned, (torch.empty(3, 8, 16, device="meta"),), kind="cpu")
    assert on_cpu == on_meta


def test_parameters_that_learn_and_are_reached_have_sums_of_gradients():
    """In the dtype of the optimizer. The layer before the one that learns gets none; what is unused is copied only."""
    frozen, learning = layers_of(8, 8, 8)
    frozen.requires_grad_(False)
    first, second = measure_layers([frozen, learning], (torch.empty(2, 8, device="meta"),))
    assert (first.grad_bytes, first.backward_flops, second.grads_in) == (0, 0, 0)
    assert second.grad_bytes == 4 * 72
    model = layers_of(8, 8, dtype=torch.bfloat16)
    x = torch.empty(2, 8, device="meta", dtype=torch.bfloat16)
    (found,) = measure_layers(model, (x,), gradient_dtype=lambda parameter: torch.float32)
    assert (found.param_bytes, found.grad_bytes) == (144, 288)
    assert all(parameter.grad is None for parameter in model[0].parameters())

    used, unused = nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")
    half = module_of(lambda self, x: self.used(x), used=used, unused=unused)
    (found,) = measure_layers([half], (torch.empty(2, 4, device="meta"),))
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
