"""Tests of roundpipe_runtime.checkpoint.training_state: a checkpoint is a folder that `from_pretrained` reads."""

import pytest
import torch

from matrix.models import make_model
from roundpipe_runtime import RoundPipe, list_checkpoints, save_checkpoint, wrap_model_to_roundpipe
from roundpipe_runtime.checkpoint.training_state import config_files
from tests.runtime.huggingface.hf_small import hf_batch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "gemma3_text", "seq2seq:t5"])
def test_from_pretrained_reads_it(tmp_path, name):
    model = make_model(name)
    pipe = wrap_model_to_roundpipe(model, check=False, devices="virtual:2")
    saved = save_checkpoint(tmp_path, pipe)
    found, report = type(model).from_pretrained(saved, output_loading_info=True)
    assert same_state(found, model)
    assert not any(report.values())


def test_the_auto_class_knows_what_it_is(tmp_path):
    """`architectures` and the dtype are in the configuration."""
    model = make_model("llama").bfloat16()
    saved = save_checkpoint(tmp_path, model)
    found = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
    assert type(found) is type(model)
    assert found.dtype == torch.bfloat16
    assert same_state(found, model)
    assert model.config.architectures is None


def test_shards_are_read_too(tmp_path):
    """With the index that transformers looks for."""
    model = make_model("llama")
    saved = save_checkpoint(tmp_path, model, max_shard_bytes=20_000)
    assert len(list(saved.path.glob("model-*-of-*.safetensors"))) > 1
    assert same_state(type(model).from_pretrained(saved), model)


def test_training_goes_on_in_a_new_wrapper(tmp_path):
    from roundpipe_runtime import RoundPipeRunConfig, load_checkpoint

    def make(devices):
        config = RoundPipeRunConfig(num_microbatch=3)
        pipe = wrap_model_to_roundpipe(make_model("llama"), devices=f"virtual:{devices}", model_run_config=config)
        return pipe, torch.optim.AdamW(pipe.optim_parameters(), lr=1e-2)

    def train(pipe, optimizer, seeds):
        losses = []
        for seed in seeds:
            losses.append(pipe.forward_backward(input_kwargs=hf_batch(seed=seed)).item())
            pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        pipe.close()
        return losses

    expected = train(*make(2), range(4))
    pipe, optimizer = make(2)
    for seed in range(2):
        pipe.forward_backward(input_kwargs=hf_batch(seed=seed))
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    save_checkpoint(tmp_path, pipe, optimizer=optimizer)
    again, other = make(3)
    load_checkpoint(tmp_path, again, optimizer=other)
    assert train(again, other, range(2, 4)) == expected[2:]


def test_generation_goes_with_it(tmp_path):
    """`generate` of the loaded model has the settings of the trained one."""
    model = make_model("llama")
    model.generation_config.max_new_tokens = 7
    saved = save_checkpoint(tmp_path, model)
    assert type(model).from_pretrained(saved).generation_config.max_new_tokens == 7


def test_other_models_have_no_configuration(tmp_path):
    """A `config` attribute alone makes no model of transformers."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.config = make_model("llama").config
    assert config_files(module) == {}
    assert config_files(RoundPipe(module, devices="virtual:1")) == {}
    save_checkpoint(tmp_path, module)
    assert not (list_checkpoints(tmp_path)[0].path / "config.json").exists()
