"""Operations on meta that take what they take on a device."""

import pytest
import torch
from torch.nn import functional

from roundpipe_runtime.estimate.footprint import Footprint, device_kernels


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
    """Forward and both backward products, in any dtype."""

    def run(device):
        rows = torch.ones(8, 16, device=device, dtype=dtype, requires_grad=True)
        experts = torch.ones(3, 16, 32, device=device, dtype=dtype, requires_grad=True)
        ends = torch.tensor([2, 5, 8], dtype=torch.int32, device=device)
        with Footprint() as found:
            found.ignore([rows, experts])
            out = functional.grouped_mm(rows, experts, offs=ends)
            out.square().sum().backward()
        return out.shape, rows.grad.shape, experts.grad.shape, found.flops, found.peak

    real = run("cpu")
    with device_kernels():
        assert run("meta") == real


def test_a_mask_that_learns_has_a_gradient():
    """As biases of positions do: the kernel that takes no scores gives none."""
    q, bias = (torch.empty(shape, device="meta") for shape in ((1, 2, 8, 4), (1, 2, 8, 8)))
    bias.requires_grad_()
    with device_kernels():
        functional.scaled_dot_product_attention(q, q, q, bias).sum().backward()
    assert bias.grad.shape == bias.shape


def test_masks_on_meta_hide_nothing():
    """Models ask whether all of a mask is true; and nothing else is answered."""
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
