"""Tests of roundpipe_runtime.huggingface.cutting.capture: versions that capture outputs by replacing methods.

What is captured is compared in ``test_huggingface_capture``, which `make compat` runs with these versions.
"""

import importlib.util

import pytest
import torch

from roundpipe_runtime.huggingface.cutting.capture import COLLECTOR, collect_on_copy, is_old
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, wrapped


def test_the_version_is_known_by_what_it_has():
    """With a collector of its own, nothing of ours is used."""
    hf_model("llama")
    assert is_old() == (importlib.util.find_spec("transformers.utils.output_capturing") is None)


def test_a_newer_version_is_left_alone():
    """No forward is replaced."""
    model = hf_model("llama")
    if is_old():
        pytest.skip("this version is an old one")
    collect_on_copy(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_model_is_as_it_was_and_captures_by_itself():
    """Beside its pipeline, and after it: no list is in force, and outputs are the same."""
    model = hf_model("mixtral")
    batch = hf_batch()
    with torch.no_grad():
        expected = model(**batch, output_router_logits=True, use_cache=False)
        pipeline = wrapped(model)
        found = pipeline(**batch, output_router_logits=True)
        again = model(**batch, output_router_logits=True, use_cache=False)
    assert COLLECTOR.get() is None
    for one, two, three in zip(expected.router_logits, found.router_logits, again.router_logits, strict=True):
        assert torch.equal(three, one)
        assert torch.allclose(two, one, rtol=1e-9)
