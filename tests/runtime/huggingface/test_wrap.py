"""Tests of roundpipe_runtime.huggingface.wrap: trained like the plain model, and the model itself in all else."""

import copy
import pickle
import sys
import warnings

import pytest
import torch
import transformers
from torch import nn

from matrix.models import make_config, make_model
from roundpipe_runtime import Replicate, RoundPipe, RoundPipeRunConfig, Timeline
from roundpipe_runtime.errors import ConfigError, LossError
from roundpipe_runtime.huggingface import CutError, CutRefusedWarning, wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.cutting.capture import is_old
from tests import fresh_process
from tests.runtime.huggingface.hf_small import Toy, hf_batch, hf_model, tokens, worst_gradient, wrapped
from tests.runtime.small import assert_same_gradients, gradients

NAMES = ["llama", "gpt2", "gemma3_text", "gemma3n_text", "gemma4_text", "mixtral", "mamba", "xlm", "seq2seq:t5"]


def arguments(name: str, **options) -> dict[str, torch.Tensor]:
    batch = hf_batch(**options)
    if name.startswith("seq2seq"):
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)
    return batch


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_are_those_of_the_plain_model(name):
    model = hf_model(name)
    plain = copy.deepcopy(model)
    pipeline = wrapped(model, example=arguments(name, rows=2))
    ours = torch.optim.SGD(pipeline.optim_parameters(), lr=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        batch = arguments(name, seed=step)
        expected = plain(**batch, use_cache=False)
        expected.loss.backward()
        loss, found = pipeline.forward_backward(input_kwargs=batch, return_outputs=True)
        # parts of some models are in float32 whatever their dtype, and roundings grow with the steps
        assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert (found.logits - expected.logits).norm() <= 1e-5 * expected.logits.norm()
        assert worst_gradient(model, plain) < (1e-5 if step == 0 else 1e-3)
        pipeline.step(lambda: (ours.step(), ours.zero_grad()))
        theirs.step()
        theirs.zero_grad()


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt2", dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)),
     ("opt", {"num_hidden_layers": 6, "layerdrop": 0.5})], ids=["dropout", "layers left out"],
)  # fmt: skip
def test_no_bit_depends_on_the_devices(name, changes):
    """A microbatch calls the layers that were drawn for it, in all phases."""
    torch.manual_seed(0)
    config = make_config(name)
    vars(config).update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    found = []
    for devices in (1, 3):
        torch.manual_seed(3)
        part = copy.deepcopy(model)
        pipeline = wrapped(part, devices=f"virtual:{devices}", microbatches=5)
        found.append((pipeline.forward_backward(input_kwargs=hf_batch()).item(), gradients(part)))
        assert part.get_input_embeddings().weight.grad.any()
    assert found[0][0] == found[1][0]
    assert_same_gradients(found[0][1], found[1][1])


def test_the_loss_function_of_a_script():
    """A script that computes the loss itself, and divides by the number of microbatches, does what it did before."""
    model = hf_model("llama")
    plain = copy.deepcopy(model)
    batch = hf_batch(6, padding=False)
    labels = batch.pop("labels")
    pipeline = wrapped(model)

    def loss_fn(outputs, labels):
        return pipeline.loss_function(logits=outputs.logits, labels=labels, vocab_size=pipeline.vocab_size) / 3

    config = RoundPipeRunConfig(loss_reduction="sum")
    found = pipeline.forward_backward(input_kwargs=batch, label=labels, loss_fn=loss_fn, run_config=config)
    parts = zip(*(value.split(2) for value in (*batch.values(), labels)), strict=True)
    expected = sum(plain(input_ids=i, attention_mask=m, labels=t).loss / 3 for i, m, t in parts)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert worst_gradient(model, plain) < 1e-6


@pytest.mark.parametrize(
    "merge", [False, lambda outputs: [o.logits for o in outputs], {"outputs['logits']": Replicate}]
)
def test_outputs_are_joined_as_the_user_wants(merge):
    model = hf_model("llama")
    batch = hf_batch(4, padding=False)
    batch = {key: value[:1].expand(4, -1).clone() for key, value in batch.items()}
    pipeline = wrapped(model, microbatches=2)
    if isinstance(merge, dict):
        with torch.no_grad():
            model.lm_head.weight.zero_()  # the same to the last bit, wherever in memory a product is computed
        if is_old():
            merge = {"outputs[1]": Replicate}  # where nobody else registers them, outputs come apart without names
    config = RoundPipeRunConfig(merge_output=merge)
    loss, outputs = pipeline.forward_backward(input_kwargs=batch, return_outputs=True, run_config=config)
    expected = model(**batch)
    found = outputs if isinstance(outputs, list) else list(outputs.logits)
    if isinstance(merge, dict):
        found = [outputs.logits, outputs.logits]
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert torch.allclose(torch.cat(found), expected.logits)


def test_without_labels_and_loss_function_there_is_no_loss():
    pipeline = wrapped(hf_model("llama"))
    batch = hf_batch()
    del batch["labels"]
    with pytest.raises(LossError, match="Give the model labels, or give forward_backward a loss_fn"):
        pipeline.forward_backward(input_kwargs=batch)


def test_it_is_the_model_in_all_else():
    model = make_model("llama")
    expected = model.generate(tokens(2) + 5, max_new_tokens=4, do_sample=False)
    pipeline = wrapped(model)
    assert isinstance(pipeline, RoundPipe)
    assert pipeline.config is model.config
    assert list(pipeline.state_dict()) == list(model.state_dict())
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert pipeline.model is model.model
    assert pipeline.get_input_embeddings() is model.get_input_embeddings()
    assert torch.equal(pipeline.generate(tokens(2) + 5, max_new_tokens=4, do_sample=False), expected)
    pipeline.note = 3
    assert model.note == 3
    assert pipeline.train().training
    assert model.model.layers[0].training
    assert not pipeline.eval().training
    assert not model.training


def test_pickle_and_deepcopy_keep_the_cut():
    pipeline = wrapped(hf_model("mixtral"))
    batch = hf_batch()
    with torch.no_grad():
        expected = pipeline(**batch).logits
        for other in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
            assert other.cut.report == pipeline.cut.report
            assert torch.equal(other(**batch).logits, expected)


def test_a_model_that_cannot_be_cut_warns_and_runs_whole():
    options = {"lower_threshold": 0, "example": {"input": torch.ones(2, 64)}, "devices": "virtual:1"}
    with pytest.warns(CutRefusedWarning, match="Linear runs as one module, as it cannot be split"):
        pipeline = wrap_model_to_roundpipe(nn.Linear(64, 64), **options)
    assert pipeline(torch.ones(3, 64)).shape == (3, 64)
    with pytest.raises(CutError, match="Linear cannot be split: The model has no list"):
        wrap_model_to_roundpipe(nn.Linear(64, 64), True, **options)


def microbatches(pipeline):
    with Timeline() as timeline, torch.no_grad():
        pipeline(tokens(8))
    return len({record.microbatch for record in timeline.records if record.kind == "forward"})


def test_thresholds_keep_small_models_whole():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = wrap_model_to_roundpipe(Toy(), devices="virtual:2")
        medium = wrap_model_to_roundpipe(Toy(), lower_threshold=0, upper_threshold=10**6, devices="virtual:2")
        refused = wrap_model_to_roundpipe(Toy(), False, lower_threshold=0, devices="virtual:2")
    assert [len(p.cut.pieces) for p in (small, medium, refused)] == [1, 1, 1]
    assert [microbatches(small), microbatches(medium)] == [1, len(medium.devices) + 1]
    assert torch.allclose(medium(tokens()), medium.cut.model(tokens()))


def test_configurations_of_parts_are_refused():
    model = Toy()
    with pytest.raises(ConfigError, match="override_config: Linear cannot have its own configuration"):
        wrap_model_to_roundpipe(model, override_config={model.head: RoundPipeRunConfig()})
    own = {model: RoundPipeRunConfig(num_microbatch=7)}
    pipeline = wrap_model_to_roundpipe(model, False, override_config=own, lower_threshold=0, devices="virtual:1")
    assert microbatches(pipeline) == 7


def test_a_name_is_no_model_and_the_name_of_a_pipeline_is_given_or_the_line():
    with pytest.raises(ConfigError, match=r"found str 'llama'.*\n.*from_pretrained"):
        wrap_model_to_roundpipe("llama")
    named = wrap_model_to_roundpipe(Toy(), False, name="toy", devices="virtual:1")
    unnamed = wrap_model_to_roundpipe(Toy(), False, devices="virtual:1")
    assert named.name == "toy"
    assert unnamed.name.startswith("test_wrap.py:")


# a Llama of 222 MB, and how far memory grew: a process of its own
LARGE = """
import resource, sys, torch, transformers
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, vocab_size=2000)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
weights, before = sum(p.nbytes for p in model.parameters()), peak()
pipeline = wrap_model_to_roundpipe(model, devices="virtual:1", use_sequential_preset=True)
print(weights, peak() - before, pipeline.cut.report.equivalence.parameters)
pipeline.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell a process how much memory it held at most")
def test_the_check_takes_no_copies_of_a_large_model():
    """Copies of weights and gradients would take twice the weights; buffers of libraries took 177 to 224 MB."""
    done = fresh_process.run("-c", LARGE, imported=fresh_process.TRAINER)
    weights, growth, compared = map(int, done.stdout.split())
    assert compared == 4 * 9 + 3
    assert growth < 1.5 * weights
