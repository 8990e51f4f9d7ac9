"""Tests of roundpipe_runtime.checkpoint.tensor_files: safetensors files as transformers names them."""

import importlib.util
import json

import pytest
import torch

from roundpipe_runtime.checkpoint.tensor_files import need_safetensors, open_tensors, write_tensors
from yobx_flatten import MissingDependencyError

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

TENSORS = {"a": torch.arange(4.0), "b": torch.ones(4), "c": torch.zeros(8), "d": torch.tensor(3)}


def test_one_file_if_it_fits(tmp_path):
    write_tensors(tmp_path, "model", TENSORS, 10**9)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_shards_with_an_index(tmp_path):
    """32 bytes a file: two of 16, one of 32, one of 8; the index says which tensor is where."""
    write_tensors(tmp_path, "model", TENSORS, 32)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}
    assert index["metadata"]["total_size"] == 16 + 16 + 32 + 8


@pytest.mark.parametrize("limit", [1, 32, 10**9])
def test_all_of_it_is_read_again(tmp_path, limit):
    write_tensors(tmp_path, "training", TENSORS, limit)
    with open_tensors(tmp_path, "training") as found:
        assert list(found) == list(TENSORS)
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_no_tensors_at_all(tmp_path):
    """A model may have no parameters."""
    write_tensors(tmp_path, "model", {}, 10)
    with open_tensors(tmp_path, "model") as found:
        assert dict(found) == {}


def test_without_safetensors_the_error_says_what_to_install(monkeypatch):
    """It is an extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[train\]'"):
        need_safetensors()
