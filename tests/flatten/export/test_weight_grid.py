"""Integers and scales are found where weights were computed from them, and nowhere else."""

import gguf
import numpy
import pytest
import torch

from yobx_flatten.export.onnx.weights import find_grid

ROWS, COLUMNS = 40, 512


def _random(seed=0):
    return numpy.random.default_rng(seed)


def _made(levels, block, *, first, lowest=False, scales=numpy.float16, seed=0):
    """Weights of so many levels, computed in float32 as readers of such files do."""
    draw = _random(seed)
    numbers = draw.integers(0, levels, (ROWS, COLUMNS // block, block)) + first
    numbers[..., 0], numbers[..., 1] = first, levels - 1 + first  # as quantisers choose scales
    scale = draw.uniform(0.001, 0.02, (ROWS, COLUMNS // block, 1)).astype(scales).astype(numpy.float32)
    weights = numbers.astype(numpy.float32) * scale
    if lowest:
        weights = weights + draw.uniform(-0.2, 0.1, scale.shape).astype(scales).astype(numpy.float32)
    return weights.reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    ("levels", "first", "lowest", "bits"),
    [
        (16, -8, False, 4),  # Q4_0 and GPTQ with symmetric integers
        (16, -3, False, 4),  # GPTQ and AWQ: each block has a whole zero point
        (16, 0, True, 4),  # Q4_1 and Q4_K: each block has a lowest weight
        (4, 0, True, 4),  # Q2_K
        (64, -32, False, 8),  # Q6_K
        (32, 0, True, 8),  # Q5_1 and Q5_K
        (255, -127, False, 8),  # Q8_0
        (256, 0, True, 8),
    ],
)
def test_the_weights_are_given_back_in_their_own_bits_and_blocks(levels, first, lowest, bits, block):
    """Of scales in float16 each weight is the same, bit for bit; in float32 to the last places of the largest."""
    for scales in (numpy.float16, numpy.float32):
        weights = _made(levels, block, first=first, lowest=lowest, scales=scales)
        grid = find_grid(weights)
        assert (grid.bits, grid.block_size) == (bits, block)
        assert grid.numbers.max() < 2**bits
        assert (grid.lowest is not None) == lowest
        apart = numpy.abs(grid.weights() - weights).reshape(-1, block).max(1)
        largest = numpy.abs(weights).reshape(-1, block).max(1)
        assert bool((apart <= largest * 2.0**-21).all())
        if scales == numpy.float16 and grid.scales.dtype == numpy.float16:
            assert apart.max() == 0


def test_scales_of_float16_stay_in_16_bits():
    assert find_grid(_made(16, 32, first=0, lowest=True)).scales.dtype == numpy.float16
    assert find_grid(_made(16, 32, first=0, lowest=True, scales=numpy.float32)).scales.dtype == numpy.float32


def test_weights_of_a_model_have_none():
    weights = _random().standard_normal((ROWS, COLUMNS)).astype(numpy.float32)
    brain = torch.from_numpy(weights).bfloat16().float().numpy()
    for found in (weights, weights.astype(numpy.float16), weights.astype(numpy.float16).astype("f4"), brain):
        assert find_grid(found) is None


@pytest.mark.parametrize("place", [(0, 0), (11, 300), (ROWS - 1, COLUMNS - 1)])
def test_one_weight_off_the_grid_is_enough(place):
    weights = _made(16, 32, first=-8)
    assert find_grid(weights) is not None
    weights[place] += 0.001 * 0.001
    assert find_grid(weights) is None


def test_weights_computed_in_half_precision_are_found_to_its_rounding():
    """GPTQ in float16, also after a conversion to float32."""
    draw = _random()
    numbers = draw.integers(0, 16, (ROWS, 4, 128)) - draw.integers(0, 16, (ROWS, 4, 1))
    scales = draw.uniform(0.001, 0.02, (ROWS, 4, 1)).astype(numpy.float16)
    weights = (numbers.astype(numpy.float16) * scales).reshape(ROWS, COLUMNS)
    for given in (weights, weights.astype(numpy.float32)):
        grid = find_grid(given)
        assert (grid.bits, grid.block_size) == (4, 128)
        exact = (numbers * scales.astype(numpy.float64)).reshape(ROWS, COLUMNS)
        largest = numpy.abs(exact).reshape(-1, 128).max(1)
        assert bool((numpy.abs(grid.weights() - exact).reshape(-1, 128).max(1) <= largest * 2.0**-10).all())


def test_blocks_of_one_weight_are_on_any_grid():
    """Rows of padding are zeros; a block may also be the same number throughout."""
    weights = _made(16, 32, first=0, lowest=True)
    weights[3], weights[5, :32] = 0, 0.3
    assert bool((find_grid(weights).weights() == weights).all())
    assert bool((find_grid(numpy.zeros((4, 64), numpy.float32)).weights() == 0).all())


def test_fewer_bits_can_be_asked_for():
    assert find_grid(_made(255, 32, first=-127), most_bits=4) is None
    assert find_grid(_made(16, 32, first=-8), most_bits=4).bits == 4
    assert find_grid(numpy.zeros((4, 20), numpy.float32)) is None  # blocks of 16 do not divide it


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_library_gguf_computes_is_given_back(name):
    kind = gguf.GGMLQuantizationType[name]
    weights = _random().standard_normal((ROWS, COLUMNS)).astype(numpy.float32) * numpy.float32(0.03)
    read = gguf.dequantize(gguf.quantize(weights, kind), kind)
    grid = find_grid(numpy.ascontiguousarray(read))
    assert grid.bits == (4 if name.startswith("Q4") else 8)
    assert float(numpy.abs(grid.weights() - read).max()) <= float(numpy.abs(read).max()) * 2.0**-21


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_super_blocks_of_the_library_gguf_are_given_back(name):
    kind, draw = gguf.GGMLQuantizationType[name], _random(1)
    size, length = gguf.GGML_QUANT_SIZES[kind]
    stored = draw.integers(0, 256, (ROWS, 1024 // size, length)).astype(numpy.uint8)
    places = {"Q2_K": (-4, -2), "Q4_K": (0, 2), "Q5_K": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,)}.get(name, (-2,))
    for place in places:
        scale = draw.uniform(0.001, 0.01, (*stored.shape[:2], 1)).astype(numpy.float16).view(numpy.uint8)
        stored[..., place : place + 2 or None] = scale
    read = numpy.ascontiguousarray(gguf.dequantize(stored.reshape(ROWS, -1), kind))
    grid = find_grid(read)
    assert (grid.bits, grid.block_size) == {
        "Q2_K": (4, 16),
        "Q3_K": (4, 16),
        "Q4_K": (4, 32),
        "Q5_K": (8, 32),
        "Q6_K": (8, 16),
        "IQ4_NL": (8, 32),
        "IQ4_XS": (8, 32),
    }[name]
    apart = numpy.abs(grid.weights() - read).reshape(-1, grid.block_size).max(1)
    assert bool((apart <= numpy.abs(read).reshape(-1, grid.block_size).max(1) * 2.0**-21).all())
