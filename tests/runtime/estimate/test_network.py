"""Bytes, seconds and memory of several nodes, against values that were computed by hand."""

import dataclasses

import pytest

from roundpipe_runtime import ConfigError
from roundpipe_runtime.estimate.memory_estimate import HostMemory
from roundpipe_runtime.estimate.network import estimate_nodes, host_of_node

# devices, operations per second of each, bytes per second of the host's memory
RTX4090, RTX4090_8, H200, H200_8 = (1, 110e12, 100e9), (8, 110e12, 250e9), (1, 500e12, 250e9), (8, 500e12, 500e9)


def step(parameters, node, tokens, network, nodes):
    """Forward, forward again and backward are 2, 2 and 4 operations per number and token; gradients are bfloat16."""
    devices, flops, host = node
    compute = 8 * parameters * tokens / (devices * flops)
    return estimate_nodes(
        nodes,
        network,
        gradients=2 * parameters,
        weights=2 * parameters,
        forward=compute / 4,
        backward=3 * compute / 4,
        optimizer=30 * parameters / host,
        tokens=tokens,
    )


@pytest.mark.parametrize(
    ("node", "weights", "gradients"),
    [
        # G F / B and G F / (3 B) with 80 % of 25, 100 and 400 Gbit/s: 2.5, 10 and 40 GB/s
        (RTX4090, (44_000, 11_000, 2_750), (14_667, 3_667, 917)),
        (RTX4090_8, (352_000, 88_000, 22_000), (117_333, 29_333, 7_333)),
        (H200, (200_000, 50_000, 12_500), (66_667, 16_667, 4_167)),
        (H200_8, (1_600_000, 400_000, 100_000), (533_333, 133_333, 33_333)),
    ],
)
def test_tokens_that_hide_the_network(node, weights, gradients):
    """With many nodes; two send half of everything, so half of the tokens hide it. No size of the model is in it."""
    for network, of_weights, of_gradients in zip((25e9, 100e9, 400e9), weights, gradients, strict=True):
        for parameters in (8e9, 70e9):
            many = step(parameters, node, 65536, network, 1_000_000)
            assert many.weight_tokens == pytest.approx(of_weights, rel=1e-4)
            assert many.gradient_tokens == pytest.approx(of_gradients, abs=1)
            assert many.hidden_tokens == many.weight_tokens
            assert step(parameters, node, 65536, network, 2).weight_tokens == pytest.approx(of_weights / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("parameters", "node", "tokens", "network", "seconds"),
    [
        (8e9, RTX4090, 65536, 25e9, (40, 39, 39, 38)),
        (8e9, RTX4090_8, 65536, 25e9, (5.7, 7.3, 9.8, 11.3)),
        (8e9, RTX4090_8, 65536, 100e9, (5.7, 5.2, 5.0, 5.1)),
        (8e9, H200_8, 262144, 25e9, (4.7, 6.6, 9.7, 11.3)),
        (8e9, H200_8, 262144, 100e9, (4.7, 4.4, 4.5, 4.6)),
        (70e9, RTX4090_8, 262144, 25e9, (175, 171, 169, 175)),
        (70e9, H200, 65536, 25e9, (82, 87, 99, 105)),
        (70e9, H200_8, 262144, 25e9, (41, 58, 85, 98)),
        (70e9, H200_8, 262144, 100e9, (41, 39, 39, 40)),
    ],
)
def test_seconds_of_a_step(parameters, node, tokens, network, seconds):
    """Of 1, 2, 4 and 8 nodes, as on paper, where they are rounded."""
    for nodes, wanted in zip((1, 2, 4, 8), seconds, strict=True):
        rounded = 0.06 if isinstance(wanted, float) else 0.6
        assert step(parameters, node, tokens, network, nodes).step_seconds == pytest.approx(wanted, abs=rounded)


def test_bytes_of_a_node():
    """Two nodes send half of all gradients and weights, four send three quarters: 4 bytes per number at most."""
    two, four = step(8e9, RTX4090, 65536, 25e9, 2), step(8e9, RTX4090, 65536, 25e9, 4)
    assert (two.gradient_bytes, two.weight_bytes) == (8e9, 8e9)
    assert (four.gradient_bytes, four.weight_bytes) == (12e9, 12e9)
    assert four.gradient_seconds == pytest.approx(12e9 / 2.5e9)


def test_what_is_exposed():
    """1.6 s of weights next to 1 s of forward, and 1.6 s of gradients next to 3 s of the rest."""
    found = estimate_nodes(
        2, 1e9, gradients=0.32e9, weights=0.32e9, forward=1.0, backward=3.0, optimizer=0.5, tokens=1000
    )
    assert (found.gradient_seconds, found.weight_seconds) == (1.6, 1.6)
    assert (found.exposed_gradients, found.exposed_weights) == (0, pytest.approx(0.6))
    assert found.step_seconds == pytest.approx(1 + 3 + 0.6 + 0.25)
    assert found.weight_tokens == pytest.approx(1600)
    assert found.gradient_tokens == pytest.approx(1600 / 3)


def test_one_node_sends_nothing():
    """Its step is computing and the optimizer."""
    found = step(8e9, RTX4090, 65536, 25e9, 1)
    assert (found.gradient_bytes, found.weight_bytes, found.hidden_tokens) == (0, 0, 0)
    assert found.step_seconds == pytest.approx(8 * 8e9 * 65536 / 110e12 + 2.4)


@pytest.mark.parametrize(("billions", "gigabytes"), [(8, (144, 80, 48, 32)), (70, (1260, 700, 420, 280))])
def test_memory_of_a_host(billions, gigabytes):
    """2 + 16 / n bytes per number: bfloat16 weights on each, and shards of gradients, masters and moments."""
    count = billions * 10**9
    one = HostMemory(parameters=2 * count, gradients=4 * count, masters=4 * count, optimizer=8 * count, activations=0)
    assert tuple(host_of_node(one, nodes).total / 1e9 for nodes in (1, 2, 4, 8)) == gigabytes
    busy = dataclasses.replace(one, activations=10**9)
    assert host_of_node(busy, 4).total == host_of_node(one, 4).total + 10**9


@pytest.mark.parametrize(("nodes", "network"), [(0, 25e9), (2, 0.0), (2, float("inf"))])
def test_nodes_and_a_line_are_needed(nodes, network):
    """The error shows both."""
    with pytest.raises(ConfigError, match=f"nodes={nodes}, network={network}"):
        step(8e9, RTX4090, 65536, network, nodes)
