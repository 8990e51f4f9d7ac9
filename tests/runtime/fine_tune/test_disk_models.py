"""Weights that are read into a file one after the other."""

import pytest
import torch

pytest.importorskip("transformers")

from roundpipe_runtime.device.disk import disk_of
from roundpipe_runtime.fine_tune import FineTuneError, model_source
from tests.runtime import tiny_training as tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_a_model_on_a_disk_has_the_weights_of_one_in_memory(tmp_path, folder_on_disk, dtype):
    """Cast where another type is asked for, in training mode, with tied weights tied; all of it on the disk."""
    source = model_source(tiny.weights_folder(tmp_path / "model", dtype=torch.bfloat16))
    expected, found = source.load(dtype=dtype), source.load(dtype=dtype, host=f"disk:{folder_on_disk}")
    assert found.training
    assert list(found.state_dict()) == list(expected.state_dict())
    for (name, one), (_, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
        assert one.requires_grad == other.requires_grad, name
        assert disk_of(other) is not None, name
    assert all(torch.equal(a, b) for a, b in zip(expected.buffers(), found.buffers(), strict=True))
    tokens = torch.arange(8).reshape(2, 4)
    assert torch.equal(expected(tokens).logits, found(tokens).logits)


def test_random_weights_are_those_of_memory(folder_on_disk):
    """They are drawn in memory."""
    expected, found = tiny.source().load(seed=3), tiny.source().load(seed=3, host=f"disk:{folder_on_disk}")
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))


def test_weights_of_another_model_are_refused(tmp_path, folder_on_disk):
    """As they are where the model is loaded into memory."""
    folder = tiny.weights_folder(tmp_path / "model")
    wide = tiny.config(num_hidden_layers=9)
    wide.save_pretrained(folder)
    source = model_source(folder)
    with pytest.raises(FineTuneError, match="lacks"):
        source.load(host=f"disk:{folder_on_disk}")
