"""A wrapped model is used as the model itself: saved, resized, copied, with a head of values."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from matrix.models import make_model
from roundpipe_runtime import ConfigError, RoundPipeRunConfig, RoundPipeWarning
from roundpipe_runtime.huggingface import CutRefusedWarning
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, worst_gradient, wrapped

pytestmark = pytest.mark.slow


def test_parameters_stay_on_the_host():
    pipeline = wrapped(make_model("llama"))
    with pytest.raises(
        ConfigError, match=r"stay on the host.*\n    wrap_model_to_roundpipe\(model, devices=\['meta'\]"
    ):
        pipeline.to("meta")
    assert {p.device.type for p in pipeline.parameters()} == {"cpu"}
    assert pipeline.to("cpu") is pipeline
    batch = hf_batch()
    for change, dtype in ((pipeline.bfloat16, torch.bfloat16), (pipeline.double, torch.float64)):
        assert change() is pipeline
        plain = copy.deepcopy(pipeline.cut.model)
        with torch.no_grad():
            assert torch.equal(pipeline(**batch).logits, plain(**batch).logits)
        assert {p.dtype for p in pipeline.parameters()} == {dtype}


def test_a_pipeline_is_not_wrapped_again_and_a_model_may_be():
    model = make_model("llama")
    pair = [wrapped(model), wrapped(model, devices="virtual:1")]
    batch = hf_batch()
    assert torch.equal(*[pipeline.forward_backward(input_kwargs=batch) for pipeline in pair])
    with pytest.raises(ConfigError, match="is a RoundPipe already: use it as it is"):
        wrapped(pair[0])


def test_state_dict_is_that_of_the_model():
    pipeline = wrapped(make_model("llama").bfloat16(), optim_dtype=torch.float32)
    optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=0.1)
    pipeline.forward_backward(input_kwargs=hf_batch())
    pipeline.step(optimizer.step, is_async=True)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    plain = make_model("llama").bfloat16()
    plain.load_state_dict(state)
    finer = [copy for copy in pipeline.optim_parameters() if not torch.equal(copy, copy.bfloat16().float())]
    assert finer  # what a step adds below the precision of a weight is in the copies only
    pipeline.load_state_dict(state)
    for name, value in pipeline.optim_named_parameters():
        assert torch.equal(value, plain.get_parameter(name).float()), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_what_is_saved_is_loaded_to_the_bit(tmp_path, name):
    model = make_model(name)
    pipeline = wrapped(model)
    optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=0.1)
    pipeline.forward_backward(input_kwargs=hf_batch())
    pipeline.step(optimizer.step, is_async=True)
    pipeline.save_pretrained(tmp_path, max_shard_size="30KB")
    loaded = type(model).from_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_copies_of_the_optimizer_are_not_resized():
    model = make_model("llama").bfloat16()
    pipeline = wrapped(model, optim_dtype=torch.float32)
    size = pipeline.resize_token_embeddings(140, mean_resizing=False).weight.shape[0]
    assert size == model.config.vocab_size == 140
    list(pipeline.optim_parameters())
    with pytest.raises(ConfigError, match=r"have the old size. Resize first:\n    model.resize_token_embeddings"):
        pipeline.resize_token_embeddings(150)
    assert model.config.vocab_size == 140
    pipeline.forward_backward(input_kwargs=hf_batch())


@pytest.mark.parametrize("size", [90, 140])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_are_resized_while_a_graph_is_held(name, size):
    model = hf_model(name).eval()
    plain, batch = copy.deepcopy(model), hf_batch()
    pipeline = wrapped(model)
    held = pipeline(**batch)  # a graph of the parameters before they are resized
    ids = batch["input_ids"].clamp(max=60)
    batch = {**batch, "input_ids": ids, "labels": ids}
    for one in (pipeline, plain):
        torch.manual_seed(1)
        one.resize_token_embeddings(size, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundPipeWarning)
        for _ in range(2):  # the second call proves the loss again
            plain.zero_grad()
            pipeline.zero_grad()
            expected = plain(**batch).loss
            expected.backward()
            loss = pipeline.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=2))
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            assert worst_gradient(model, plain) < 1e-4
    assert held.logits.shape[-1] != size


@pytest.mark.parametrize("is_copied", [False, True])
def test_parameters_that_the_script_resizes_itself_are_refused_with_the_cure(is_copied):
    model = hf_model("llama").float()
    pipeline = wrapped(model, optim_dtype=torch.float64 if is_copied else None)
    batch = hf_batch()
    pipeline.forward_backward(input_kwargs=batch)
    before = {name: one.grad.clone() for name, one in pipeline.optim_named_parameters()}
    model.resize_token_embeddings(140, mean_resizing=False)
    if is_copied:
        pipeline.zero_grad()
    with pytest.raises(ConfigError, match="old size. Resize first:" if is_copied else r"first:\n    model.zero_grad"):
        pipeline.forward_backward(input_kwargs=batch)
    if not is_copied:
        with pytest.raises(ConfigError, match=r"first:\n    model.zero_grad"):  # not one piece for a reason of torch
            wrapped(model)
        kept = {name: one.grad for name, one in pipeline.optim_named_parameters() if one.grad is not None}
        assert all(torch.equal(one, before[name]) for name, one in kept.items())
        pipeline.zero_grad()
        plain = copy.deepcopy(model)
        loss = pipeline.forward_backward(input_kwargs=batch)
        assert loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-5)


def test_hooks_count_whenever_they_are_registered_once_a_microbatch():
    model = hf_model("llama")
    pipeline = wrapped(model)
    batch, rows, inner = hf_batch(), [], []
    handles = [
        pipeline.register_forward_hook(lambda module, args, output: rows.append(len(output.logits))),
        model.model.embed_tokens.register_forward_hook(lambda module, args, output: inner.append(len(output))),
    ]
    with torch.no_grad():
        pipeline(**batch)  # with trials of a few rows
        assert set(inner) == {2, 1}
        rows.clear()
        pipeline(**batch)
        assert sorted(rows) == [1, 2, 2]
        rows.clear()
        inner.clear()
        for handle in handles:
            handle.remove()
        pipeline(**batch)
    assert not rows
    assert not inner


def test_texts_behind_each_other_are_one_row():
    model = hf_model("llama")
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    ids = torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    begins = torch.tensor([0, 3, 5, 12], dtype=torch.int32)
    batch = {
        "input_ids": ids, "labels": ids, "position_ids": torch.tensor([[*range(3), *range(2), *range(7)]]),
        "cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 7, "max_length_k": 7,
    }  # fmt: skip
    pipeline = wrapped(model)
    expected = plain(**batch, num_items_in_batch=torch.tensor(40))
    found = pipeline(**batch, num_items_in_batch=torch.tensor(40))
    assert found.logits.shape == (1, 12, 128)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    with pytest.raises(ConfigError, match=r"of the texts in all 2 rows.*\n    DataCollatorWithFlattening"):
        pipeline(**{**batch, "input_ids": ids.reshape(2, 6)})


def test_a_forward_that_was_replaced_is_named():
    model = hf_model("llama")
    original = model.forward
    found = [original]
    model.forward = lambda **kwargs: found[0](**kwargs)
    with pytest.warns(CutRefusedWarning, match=r"Its forward was replaced by a function.*\n    wrap_model_to"):
        pipeline = wrapped(model, use_sequential_preset=None)
    batch = hf_batch()
    with torch.no_grad():
        assert torch.allclose(pipeline(**batch).logits, original(**batch).logits, rtol=1e-9)


class WithValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        self.pretrained_model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
        self.config = self.pretrained_model.config
        self.v_head = nn.Sequential(nn.Dropout(0.0), nn.Linear(32, 1))

    def forward(self, input_ids, attention_mask=None, use_cache=False):
        found = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache, output_hidden_states=True
        )
        return found.logits, self.v_head(found.hidden_states[-1]).squeeze(-1)


def policy_and_value_loss(outputs, labels):
    """A clipped ratio of probabilities with advantages, and the squared error of values: a sum, and its rows."""
    (logits, values), (tokens, old, returns) = outputs, labels
    ratio = (logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0] - old).exp()
    advantage = returns[:, None] - values[:, :-1].detach()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (policy + 0.5 * (values[:, :-1] - returns[:, None]).square()).sum(), len(tokens)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_head_of_values_is_found_and_trained(microbatches):
    model = WithValues().double()
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (5, 7), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    labels = (
        tokens,
        torch.randn(5, 6, generator=generator, dtype=torch.float64) - 4,
        torch.randn(5, generator=generator, dtype=torch.float64),
    )
    batch = {"input_ids": tokens, "attention_mask": mask}
    pipeline = wrapped(model, example={name: value[:2] for name, value in batch.items()})
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    loss = pipeline.forward_backward(input_kwargs=batch, label=labels, loss_fn=policy_and_value_loss, run_config=config)
    total, rows = policy_and_value_loss(plain(**batch), labels)
    expected = total / rows
    expected.backward()
    assert not pipeline.cut.report.is_whole
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert worst_gradient(model, plain) < 1e-6  # norms of Llama compute in float32
    assert model.v_head[1].weight.grad.norm() > 0
