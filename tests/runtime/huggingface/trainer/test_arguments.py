"""Tests of roundpipe_runtime.huggingface.trainer.arguments: what a pipeline cannot do is said before anything runs."""

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

from transformers.trainer_pt_utils import AcceleratorConfig

from roundpipe_runtime import ConfigError
from roundpipe_runtime.huggingface.trainer.arguments import check_arguments
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from tests.runtime.huggingface.trainer.trainer_runs import arguments, make_model, make_trainer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not supported"),
        ({"torch_compile": True}, "torch_compile=True is not supported"),
        ({"optim": "lomo"}, "optim='lomo' steps within the backward"),
        ({"fp16": True}, "mixed precision 'fp16' is not supported"),
        ({"optim": "paged_adamw_8bit"}, "optim='paged_adamw_8bit' is one of bitsandbytes"),
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' is one of bitsandbytes"),
        ({"accelerator_config": AcceleratorConfig(dispatch_batches=True)}, "dispatch_batches=True is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_a_pipeline_cannot_follow(tmp_path, monkeypatch, changes, message):
    """The trainer is not made, and the error names the argument and what to write."""
    args = arguments(tmp_path, 1)
    for name, value in changes.items():
        monkeypatch.setattr(args, name, value)
    with pytest.raises(ConfigError, match=message):
        make_trainer("gpt2", args, RoundPipeTrainer)


def test_processes_without_a_backend_of_the_host_are_refused(tmp_path, monkeypatch):
    """Gradients are on the host, and nccl does not take them from there."""
    args = arguments(tmp_path, 1)
    monkeypatch.setattr(type(args), "world_size", 2)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "nccl")
    with pytest.raises(ConfigError, match=r'ddp_backend="cpu:gloo,cuda:nccl"'):
        check_arguments(args)


def test_optimizer_of_parameters_without_gradients_is_refused(tmp_path):
    """With ``optim_dtype`` an optimizer of ``model.parameters()`` would never change anything."""
    model = make_model("gpt2").to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = make_trainer(
        "gpt2",
        arguments(tmp_path, 1),
        RoundPipeTrainer,
        model=model,
        optim_dtype=torch.float32,
        optimizers=(optimizer, None),
    )
    with pytest.raises(ConfigError, match=r"AdamW\(model.optim_parameters\(\)\)"):
        ours.train()
    ours.pipeline.close()
