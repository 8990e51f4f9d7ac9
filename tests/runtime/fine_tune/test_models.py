"""Where a model comes from: folders, configurations, and what is neither."""

import json
import re

import pytest
import torch

from roundpipe_runtime.fine_tune import FineTuneError, model_source
from tests.runtime import tiny_training as tiny

pytest.importorskip("transformers")


def test_a_folder_with_weights_is_loaded_as_it_is_stored(tmp_path):
    """Nothing is read before; the dtype is that of the file unless another one is asked for.

    float16 becomes bfloat16, as gradients would vanish in float16.
    """
    folder = tiny.weights_folder(tmp_path / "model", dtype=torch.bfloat16)
    source = model_source(folder)
    assert (source.has_weights, source.folder, source.vocab_size, source.longest) == (True, folder, 40, 64)
    expected = tiny.source(vocab_size=40).load(seed=5).bfloat16().state_dict()
    found = source.load()
    assert found.training
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert source.load(dtype=torch.float32).dtype == torch.float32
    half = model_source(tiny.weights_folder(tmp_path / "half", dtype=torch.float16))
    assert half.load().dtype == torch.bfloat16


def test_a_configuration_alone_has_random_weights(tmp_path):
    """As a folder or as a file; the seed makes them, and nothing else is drawn."""
    folder = tiny.config_folder(tmp_path / "model")
    state = torch.get_rng_state()
    for name in (folder, folder / "config.json"):
        source = model_source(name)
        assert not source.has_weights
        one, same, other = (source.load(seed=seed).lm_head.weight for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert one.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "contains no config.json. Name a folder that save_pretrained wrote"),
        ("{", "is damaged: it is not JSON"),
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "num_hidden_layers = 1,000,000,000, but the limit is 10,",
        ),
        (
            '{"model_type": "llama", "text_config": {"n_layer": [30000]}}',
            "states n_layer = 30,000, but the limit is 10,000",
        ),
        ('{"hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"hidden_size": 3}', "is not a configuration of transformers"),
        ('{"model_type": "t5"}', "a model of type 't5', for which transformers has no causal language model"),
    ],
)
def test_folders_that_hold_no_language_model_are_refused(tmp_path, content, words):
    """With their name."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(FineTuneError) as caught:
        model_source(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("size", [2**40, 10**8, 10**30, -3])
def test_weights_that_no_memory_holds_are_refused(tmp_path, size):
    """Random ones, and those of a folder whose configuration is of another model."""
    alone, folder = tiny.config_folder(tmp_path / "config"), tiny.weights_folder(tmp_path / "weights")
    for place in (alone, folder):
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "hidden_size": size, "head_dim": 8}))
        with pytest.raises(FineTuneError, match=re.escape(str(place))):
            model_source(place).load()


def test_adapters_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FineTuneError, match=r"contains adapters but no model\. Merge the adapters"):
        model_source(tmp_path)


def test_damaged_weights_are_refused(tmp_path):
    folder = tiny.weights_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(FineTuneError, match="cannot be loaded"):
        model_source(folder).load()
