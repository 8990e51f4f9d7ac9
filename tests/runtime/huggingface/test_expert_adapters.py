"""Adapters on stacked experts (PEFT's `target_parameters`): trained, saved, loaded and merged as on the plain model."""

import copy

import pytest
import torch
import transformers
from torch.nn.utils import parametrize
from transformers import Trainer, TrainingArguments

from roundpipe_runtime import RoundPipeTrainer
from roundpipe_runtime.engine.parameters import partial_table
from tests.cases import cases
from tests.runtime.huggingface.hf_small import known_model
from tests.runtime.huggingface.test_experts import NAMES, pipe_of, tokens
from tests.transformers_versions import is_older_than

peft = pytest.importorskip("peft", reason="LoRA is PEFT's")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        is_older_than("5.0"), reason="experts are modules in transformers 4, which PEFT adapts one by one"
    ),
]


def adapted(name, way="grouped_mm"):
    """A model whose experts, and one projection beside them, have adapters that matter from the start."""
    torch.manual_seed(0)
    model = known_model(name).float()
    model.set_experts_implementation(way)
    stacked = {path.partition("mlp.")[2] for path, p in model.named_parameters() if p.dim() == 3 and "experts" in path}
    assert len(stacked) == 2
    config = peft.LoraConfig(
        r=2,
        target_modules=["kv_a_proj_with_mqa"] if name == "deepseek_v3" else ["q_proj"],
        target_parameters=[f"mlp.{path}" for path in sorted(stacked)],
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def assert_near(found, expected, rel):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= rel * expected[name].norm() + 1e-9, name


def plain_steps(plain, count, lr=0.05, *, late=0):
    """Losses and gradients of some steps of the plain model; late ones take the gradients of the run before."""
    losses, gradients = [], []
    for step in range(count):
        loss = plain(**tokens(3, 5, step), use_cache=False).loss
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, list(trained(plain).values())))
        with torch.no_grad():
            for parameter, gradient in zip(trained(plain).values(), gradients[step - late], strict=True):
                parameter -= lr * gradient * (step >= late)
    return losses, [dict(zip(trained(plain), some, strict=True)) for some in gradients]


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("experts", ["all", "routed"])
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", cases(NAMES, quick=["qwen3_moe", "gpt_oss"]))
def test_losses_and_gradients_are_those_of_the_plain_model(name, way, experts, is_cached, monkeypatch):
    monkeypatch.setattr(partial_table, "LEAST_BYTES", 0)
    model = adapted(name, way)
    losses, gradients = plain_steps(copy.deepcopy(model), 3)
    pipe = pipe_of(model, experts, num_microbatch=3)
    optimizer = torch.optim.SGD([p for p in pipe.optim_parameters() if p.requires_grad], lr=0.05)
    frozen = {name: p.detach().clone() for name, p in pipe.cut.model.named_parameters() if not p.requires_grad}
    for step in range(3):
        if is_cached:
            with parametrize.cached():
                loss = pipe.forward_backward(input_kwargs=tokens(3, 5, step))
        else:
            loss = pipe.forward_backward(input_kwargs=tokens(3, 5, step))
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
        assert_near({name: p.grad for name, p in trained(pipe.cut.model).items()}, gradients[step], rel=1e-4)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    assert all(torch.equal(p, frozen[name]) for name, p in pipe.cut.model.named_parameters() if name in frozen)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("is_async", [False, "exact", True])
def test_steps_and_recomputation(is_async, grain):
    model = adapted("qwen3_moe")
    plain = copy.deepcopy(model)
    losses, _ = plain_steps(plain, 4, late=int(is_async is True))
    pipe = pipe_of(model, "all", num_microbatch=3, recompute_grain=grain)
    optimizer = torch.optim.SGD([p for p in pipe.optim_parameters() if p.requires_grad], lr=0.05)
    found = []
    for step in range(4):
        loss = pipe(**tokens(3, 5, step), use_cache=False).loss
        loss.backward()
        found.append(loss.item())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    pipe.synchronize()
    assert found == pytest.approx(losses, rel=1e-5)
    if is_async is not True:
        assert_near(trained(model), trained(plain), rel=1e-4)


def train(kind, folder, rows, steps=3, resume=None, **more):
    torch.manual_seed(0)
    model = adapted("qwen3_moe")
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, seed=0,
        save_steps=2, disable_tqdm=True, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = kind(model=model, args=arguments, train_dataset=rows, **more)
    trainer.train(resume_from_checkpoint=resume)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer


def test_the_trainer_learns_checkpoints_and_merges(tmp_path):
    rows = [
        {"input_ids": ids, "labels": ids} for ids in torch.randint(5, 90, (8, 6), generator=torch.Generator()).tolist()
    ]
    before = {name: p.detach().clone() for name, p in trained(adapted("qwen3_moe")).items()}
    expected, plain = train(Trainer, tmp_path / "plain", rows)
    found, ours = train(RoundPipeTrainer, tmp_path / "ours", rows, devices="virtual:2", microbatches=2)
    after, theirs = trained(ours.model), trained(plain.model)
    assert found == pytest.approx(expected, rel=1e-5)
    assert after.keys() == theirs.keys() == before.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert_near(after, theirs, rel=1e-3)

    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    again, resumed = train(
        RoundPipeTrainer, tmp_path / "again", rows, resume=checkpoint, devices="virtual:2", microbatches=2
    )
    assert again == found
    assert all(torch.equal(p, after[name]) for name, p in trained(resumed.model).items())

    ours.save_model(tmp_path / "adapters")
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(known_model("qwen3_moe").float(), tmp_path / "adapters").eval()
    batch = tokens(3, 5, 9)
    want = loaded(**batch).logits
    assert torch.allclose(ours.model.eval()(**batch).logits, want, rtol=1e-5, atol=1e-6)
    ours.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not any("lora" in name for name in read.state_dict())
    assert torch.allclose(read(**batch).logits, want, rtol=1e-4, atol=1e-5)
