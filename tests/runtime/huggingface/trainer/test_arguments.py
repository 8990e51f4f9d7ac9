"""Tests of the arguments of the Trainer: what a pipeline cannot do is refused before anything runs."""

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

from transformers import Trainer
from transformers.trainer_pt_utils import AcceleratorConfig

from roundpipe_runtime import ConfigError
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from roundpipe_runtime.huggingface.trainer.pipeline_trainer import check_arguments, check_kernels
from tests.runtime.huggingface.trainer.trainer_runs import TOLERANCE, arguments, history, make_model, make_trainer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True is not supported"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not supported"),
        (
            {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "reduce-overhead"},
            "compile: mode='reduce-overhead' records the addresses of parameters",
        ),
        ({"optim": "lomo"}, "optim='lomo' updates weights inside the backward pass"),
        ({"fp16": True}, "mixed precision 'fp16' is not supported"),
        ({"accelerator_config": AcceleratorConfig(dispatch_batches=True)}, "dispatch_batches=True is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_a_pipeline_cannot_follow(tmp_path, monkeypatch, changes, message):
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


class Layerwise:
    def create_optimizer(self, model=None):
        groups = [{"params": [p], "lr": 0.1 / (1 + n)} for n, p in enumerate(self.model.parameters())]
        self.optimizer = torch.optim.SGD(groups)
        return self.optimizer


@pytest.mark.parametrize("how", ["optimizers=", "before", "behind", "derived"])
def test_optimizer_of_parameters_without_gradients(tmp_path, how):
    model = make_model("gpt2").to(torch.bfloat16)
    options, kind = {"optim_dtype": torch.float32}, RoundPipeTrainer
    if how == "optimizers=":
        options["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    elif how == "before":
        kind = type("Own", (Layerwise, RoundPipeTrainer), {})
    elif how == "derived":
        kind = type("Own", (RoundPipeTrainer,), dict(vars(Layerwise)))
    else:  # `self.model` is the pipeline there, whose parameters are those to train
        kind = type("Own", (RoundPipeTrainer, type("Mine", (Layerwise, Trainer), {})), {})
    before = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    args = arguments(tmp_path, 1, warmup_steps=0)  # the first rate of a warm-up is zero
    ours = make_trainer("gpt2", args, kind, model=model, **options)
    if how == "behind":
        ours.train()
        assert not torch.equal(model.transformer.h[0].mlp.c_fc.weight, before)
    else:
        with pytest.raises(ConfigError, match=r"SGD has \d+ parameters .*\n.*SGD\(model.optim_parameters\(\)"):
            ours.train()


@pytest.mark.parametrize("name", ["_prepare_input", "_wrap_model", "autocast_smart_context_manager"])
def test_methods_that_would_never_be_called_are_refused(tmp_path, name):
    """A class that is combined with the Trainer of the pipeline, and overrides what that does in another way."""
    mine = type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: getattr(Trainer, name)(self, *args, **kwargs)})
    own = type("Own", (RoundPipeTrainer, mine), {})
    with pytest.raises(ConfigError, match=rf"Own: Mine\.{name} would never be called.*\n    class Mine\(RoundPipeTr"):
        make_trainer("gpt2", arguments(tmp_path, 1), own)
    derived = type("Own", (type("Mine", (RoundPipeTrainer,), dict(vars(mine))),), {})
    make_trainer("gpt2", arguments(tmp_path, 1), derived)


class HostOptimizer(torch.optim.SGD):
    def __init__(self, params, lr, optim_bits=32):
        super().__init__(params, lr=lr)


class DeviceOptimizer(HostOptimizer):
    def step(self, closure=None):
        raise NotImplementedError("no kernel for cpu")


def test_optimizers_with_a_kernel_for_the_host_are_taken():
    check_kernels(HostOptimizer, {"lr": 0.1, "optim_bits": 8}, has_copies=False)
    with pytest.raises(ConfigError, match=r"cannot update parameters in CPU memory.*NotImplementedError: no kernel"):
        check_kernels(DeviceOptimizer, {"lr": 0.1}, has_copies=False)
    with pytest.raises(ConfigError, match="8-bit optimizers cannot be combined with optim_dtype"):
        check_kernels(HostOptimizer, {"lr": 0.1, "optim_bits": 8}, has_copies=True)


# what paged ones say on every host
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "lion_8bit", "ademamix_8bit"])
def test_optimizers_of_bitsandbytes_train_as_without_a_pipeline(tmp_path, optim):
    pytest.importorskip("bitsandbytes", reason="these are its optimizers")
    pair = []
    for kind in (Trainer, RoundPipeTrainer):
        trainer = make_trainer("llama", arguments(tmp_path, 3, eval_strategy="no", optim=optim), kind)
        trainer.train()
        pair.append(trainer)
    plain, ours = pair
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), abs=TOLERANCE)
    weight = ours.model.model.embed_tokens.weight
    kinds = {v.dtype for v in ours.optimizer.state[weight].values() if isinstance(v, torch.Tensor) and v.dim() == 2}
    assert kinds == {torch.float32}
