"""A model that is changed after it was wrapped: calls compute what it computes now, or an error names the change."""

import copy
import functools

import pytest
import torch
import transformers
from torch import nn

from roundpipe_runtime import RoundPipeError, StageError
from tests.runtime.huggingface.hf_small import hf_batch, hf_model, wrapped
from tests.runtime.small import gradients, near_gradients

F = nn.functional
pytestmark = pytest.mark.slow

LOSS = 1e-6  # losses of transformers are computed in float32, whatever the model is


def assert_alike(change, model, batch, *, calls_before=1):
    """Compare losses and gradients of a plain model and of a pipeline, which ran before both were changed alike."""
    plain = copy.deepcopy(model)
    pipeline = wrapped(model)
    for _ in range(calls_before):
        pipeline.forward_backward(input_kwargs=batch)
    pipeline.zero_grad()
    for one in (plain, pipeline):
        torch.manual_seed(3)
        change(one)
    expected = plain(**batch).loss
    expected.backward()
    with torch.no_grad():
        called = pipeline(**batch).loss
    for found in (called, pipeline.forward_backward(input_kwargs=batch)):
        assert found.item() == pytest.approx(expected.item(), rel=LOSS)
    assert gradients(pipeline.cut.model).keys() == gradients(plain).keys()
    assert near_gradients(pipeline.cut.model, plain, rtol=1e-4, atol=1e-6)


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states * self.scale


def small_llama(kind=transformers.LlamaForCausalLM):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=128,
        use_cache=False, pad_token_id=0,
    )  # fmt: skip
    return kind(config).double()


LAYER = r"model\.layers\.{} \(LlamaDecoderLayer\) was {}".format
REMOVED = LAYER(1, "removed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers, _: layers.__delitem__(1), REMOVED),
        (lambda layers, _: layers.insert(1, layers.pop(0)), r"model\.layers\.0, model\.layers\.1 were moved"),
        (lambda layers, _: layers.__setitem__(1, Skip()), REMOVED + r", model\.layers\.1 \(Skip\) was added"),
        (lambda layers, model: setattr(model.model, "layers", layers[:2]), LAYER(2, "removed")),
        (lambda layers, _: layers.append(copy.deepcopy(layers[0])), LAYER(r"\d+", "added")),
    ],
    ids=["deleted", "swapped", "replaced", "sliced", "appended"],
)
@pytest.mark.parametrize("calls", [0, 1])
def test_layers_that_were_changed_are_refused(change, message, calls):
    model = small_llama()
    pipeline = wrapped(model)
    batch = hf_batch()
    for _ in range(calls):
        pipeline.forward_backward(input_kwargs=batch)
    change(pipeline.model.layers, pipeline)
    for call in (
        lambda: pipeline.forward_backward(input_kwargs=batch),
        lambda: pipeline(**batch),
        lambda: pipeline.generate(batch["input_ids"], max_new_tokens=2),
    ):
        with pytest.raises(
            StageError, match=message + r".*\n    pipeline = wrap_model_to_roundpipe\(pipeline\.cut\.model"
        ):
            call()
    again = wrapped(pipeline.cut.model)
    with torch.no_grad():
        assert torch.allclose(again(**batch).logits, model(**batch).logits, rtol=1e-9)


def _ten_times(logits, labels, **options):
    logits = logits.flatten(0, -2)[: labels.numel()]
    return 10 * F.cross_entropy(logits, labels.flatten()[: len(logits)].clamp(min=0) % logits.shape[-1])


@pytest.mark.parametrize("name", ["llama", "seq2seq:t5", "bert", "gpt2"])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_loss_function_that_is_set_later(name, calls):
    model = hf_model(name)
    model.config.decoder_start_token_id = 2
    assert_alike(
        lambda one: setattr(one, "loss_function", _ten_times), model, hf_batch(padding=False), calls_before=calls
    )


class Options:
    """An object of the user's, without a tensor of its own class."""

    def __init__(self):
        self.scale, self.weight = 1.0, None


class Weighted(transformers.LlamaForCausalLM):
    """A loss with weights of classes, which are an attribute or in an object."""

    def __init__(self, config):
        super().__init__(config)
        self.weights, self.scale, self.reduction = None, 1.0, "mean"
        self.options = Options()
        self.pair = [1.0, torch.ones(config.vocab_size)]
        self.compute = functools.partial(F.cross_entropy, ignore_index=-100)

    def forward(self, input_ids, labels=None, attention_mask=None, **options):
        logits = super().forward(input_ids, attention_mask=attention_mask).logits
        if labels is None:
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)
        weights = self.weights if self.options.weight is None else self.options.weight
        weights = (torch.ones_like(logits[0, 0]) if weights is None else weights.to(logits)) * self.pair[1].to(logits)
        loss = self.compute(logits.flatten(0, 1), labels.flatten(), weight=weights, reduction=self.reduction)
        loss = loss * self.scale * self.options.scale * self.pair[0]
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def _weights(start=1.0):
    return torch.linspace(start, 3.0, 128, dtype=torch.float64)


CHANGES = {
    "weights": lambda model: setattr(model, "weights", _weights()),
    "a number": lambda model: setattr(model, "scale", 7.0),
    "a text": lambda model: setattr(model, "reduction", "sum"),
    "a number of an object": lambda model: setattr(model.options, "scale", 3.0),
    "a tensor of an object": lambda model: setattr(model.options, "weight", _weights()),
    "an object": lambda model: setattr(model, "options", copy.deepcopy(model.options)),
    "a number in a list": lambda model: model.pair.__setitem__(0, 5.0),
    "a tensor in a list": lambda model: model.pair.__setitem__(1, _weights()),
    "a tensor in a list, in place": lambda model: model.pair[1].copy_(_weights()),
    "a function": lambda model: setattr(model, "compute", functools.partial(F.cross_entropy, label_smoothing=0.2)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("calls", [0, 2])
def test_what_a_loss_reads_is_changed(change, calls):
    ids = torch.randint(0, 32, (6, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    assert_alike(CHANGES[change], small_llama(Weighted), batch, calls_before=calls)


def test_weights_change_at_each_step():
    model = small_llama(Weighted)
    plain, pipeline = copy.deepcopy(model), wrapped(model)
    ids = torch.randint(0, 32, (6, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    for one in (plain, pipeline):
        one.weights = _weights()
    pieces = []
    for step in range(4):
        for one in (plain, pipeline):
            if step % 2:
                one.weights.mul_(_weights(start=0.5))
            else:
                one.weights = _weights(start=1.0 + step)
        found = pipeline.forward_backward(input_kwargs=batch)
        assert found.item() == pytest.approx(plain(**batch).loss.item(), rel=LOSS)
        pieces.append(pipeline.cut.pieces[-1].copy)
    assert len(set(map(id, pieces))) == 1


def _clamp(module, args, kwargs):
    return args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=20)}


def _double(module, args, output):
    output.loss = output.loss * 2
    return output


HOOKS = {
    "pre": lambda model: model.register_forward_pre_hook(_clamp, with_kwargs=True),
    "forward": lambda model: model.register_forward_hook(_double),
    "backward": lambda model: model.lm_head.register_full_backward_hook(lambda m, given, out: (given[0] * 3,)),
    "backward pre": lambda model: model.lm_head.register_full_backward_pre_hook(lambda m, out: (out[0] * 3,)),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", ["pipeline", "model"])
@pytest.mark.parametrize("calls", [0, 1])
def test_hooks_of_the_whole_model(hook, place, calls):
    register = HOOKS[hook]
    change = register if place == "pipeline" else lambda model: register(_root(model))
    assert_alike(change, hf_model("llama"), hf_batch(), calls_before=calls)


def _shifted(module):
    """A forward of the object itself, as accelerate's ``add_hook_to_module`` sets it."""
    before = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **kwargs) * 1.5


PLACES = {
    "norm": lambda model: model.model.norm,
    "head": lambda model: model.lm_head,
    "embedding": lambda model: model.model.embed_tokens,
    "layer": lambda model: model.model.layers[1],
    "inside a layer": lambda model: model.model.layers[1].mlp,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("calls", [0, 1])
def test_a_forward_that_is_set_on_an_object(place, calls):
    assert_alike(lambda model: _shifted(PLACES[place](_root(model))), hf_model("llama"), hf_batch(), calls_before=calls)
    changed = hf_model("llama")
    _shifted(PLACES[place](changed))
    back = lambda model: vars(PLACES[place](_root(model))).pop("forward")  # noqa: E731 # a change like the others
    assert_alike(back, changed, hf_batch(), calls_before=calls)


def _root(model):
    return model.cut.model if hasattr(model, "cut") else model


def _layer_norm(model):
    model.model.norm = nn.LayerNorm(model.config.hidden_size).double()
    nn.init.normal_(model.model.norm.bias)


@pytest.mark.parametrize(
    "change",
    [
        _layer_norm,
        lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.randn(128, dtype=torch.float64))),
        lambda model: setattr(model.model.norm, "weight", nn.Parameter(torch.rand_like(model.model.norm.weight))),
        lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq / 2),
    ],
    ids=["norm", "bias", "weight", "rotary"],
)
@pytest.mark.parametrize("calls", [0, 1])
def test_modules_around_the_layers_are_replaced(change, calls):
    assert_alike(lambda model: change(_root(model)), hf_model("llama"), hf_batch(), calls_before=calls)


def test_a_copy_of_the_pipeline_is_read_by_itself():
    pipeline = wrapped(hf_model("llama"))
    batch = hf_batch()
    before = pipeline.forward_backward(input_kwargs=batch)
    other = copy.deepcopy(pipeline)
    other.loss_function = _ten_times
    assert other.forward_backward(input_kwargs=batch).item() != pytest.approx(before.item(), rel=1e-3)
    assert pipeline.forward_backward(input_kwargs=batch).item() == pytest.approx(before.item(), rel=LOSS)
    del other.model.layers[0]
    with pytest.raises(RoundPipeError, match=r"model\.layers\.0 \(LlamaDecoderLayer\) was removed"):
        other.forward_backward(input_kwargs=batch)
    assert pipeline.forward_backward(input_kwargs=batch).item() == pytest.approx(before.item(), rel=LOSS)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_model_that_was_saved_is_cut_as_before(name, tmp_path):
    """Saving notes the class and the dtype in the configuration, on one of many ranks; no piece gets more to hold."""
    pipeline = wrapped(hf_model(name))
    before = pipeline._rp_cut, [[key for key, _ in piece.named_parameters()] for piece in pipeline._rp_cut.pieces]
    pipeline.save_pretrained(tmp_path)
    pipeline.forward_backward(input_kwargs=hf_batch())
    now = pipeline._rp_cut, [[key for key, _ in piece.named_parameters()] for piece in pipeline._rp_cut.pieces]
    assert (tmp_path / "config.json").exists()
    assert now[0] is before[0]
    assert now[1] == before[1]
