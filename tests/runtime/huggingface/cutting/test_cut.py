"""Tests of roundpipe_runtime.huggingface.cut, over models of transformers."""

import time

import pytest
import torch
from torch import nn

from matrix.models import make_config
from roundpipe_runtime.huggingface import BatchStructureError, CutError, cut, passed_tensors
from tests.runtime.huggingface.hf_small import Opaque, TakesOpaque, Toy, hf_batch, hf_model, tokens, wrapped

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "calls", "phases"),
    [
        ("llama", 2, 2),
        ("gemma3_text", 2, 2),
        ("mamba", 2, 2),
        ("seq2seq:t5", 4, 3),  # the norm of the encoder stands between
        ("seq2seq:bart", 4, 2),  # the encoder's output goes to the decoder as it is
        ("hrm_text", 16, 9),  # two stacks, in loops
    ],
)
def test_models_are_cut_where_their_layers_are(name, calls, phases):
    report = cut(hf_model(name)).report
    assert (len(report.pieces) - report.phases, report.phases) == (calls, phases)
    assert report.equivalence.outputs == 0.0
    assert report.equivalence.gradients < 1e-6


def test_the_report_says_what_was_found_and_the_embedding_belongs_to_the_first_phase():
    """The code of the last phase begins with it again, but only layers that were called already would read it."""
    model = hf_model("llama")
    made = cut(model)
    report = made.report
    assert report.lists == ("model.layers",)
    assert report.pieces == ("phase 0", "model.layers.0", "model.layers.1", "phase 1")
    assert report.bytes[1] == sum(p.numel() * 8 for p in model.model.layers[0].parameters())
    assert str(report).startswith("LlamaForCausalLM: 4 pieces, 2 calls of layers in model.layers, 2 phases\n")
    assert "model.embed_tokens.weight" in dict(made.pieces[0].copy.named_parameters())
    assert {name for name, _ in made.pieces[-1].copy.named_parameters()} == {"model.norm.weight", "lm_head.weight"}
    assert made.program.embeddings == {"model.embed_tokens"}


class Positioned(Toy):
    """Computes with its embedding before the first layer, and hands it out where it is asked for."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.adds = adds

    def forward(self, input_ids, output_hidden_states=False, reads=False):
        first = x = self.embed(input_ids) + 1.0 if self.adds else self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = x + first if reads else x
        return (self.head(x), first) if output_hidden_states else (self.head(x),)


@pytest.mark.parametrize("adds", [True, False])
def test_what_was_embedded_is_there_when_it_is_asked_for(adds):
    model, ids = Positioned(adds=adds).double(), tokens(5)
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    assert pipeline.cut.program.embeddings == (frozenset() if adds else {"embed"})
    found, expected = (one(ids, output_hidden_states=True) for one in (pipeline, model))
    assert [torch.allclose(*pair) for pair in zip(found, expected, strict=True)] == [True, True]
    found[1].square().sum().backward()
    gradient = model.embed.weight.grad
    model.embed.weight.grad = None
    expected[1].square().sum().backward()
    assert torch.allclose(gradient, model.embed.weight.grad)


def test_tokens_that_code_looks_for_are_there():
    model, batch = hf_model("gemma4_unified"), hf_batch()
    given = {**batch, "inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach()}
    del given["input_ids"]
    pipeline = wrapped(model)
    with torch.no_grad():
        found, expected = pipeline(**given), model(**given, use_cache=False)
    assert pipeline.cut.program.embeddings
    assert torch.allclose(found.logits, expected.logits, rtol=1e-9)


def test_a_batch_that_reads_what_was_embedded_is_an_error():
    model = Positioned(adds=False).double()
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    with pytest.raises(BatchStructureError, match="After its layers, the model uses embed"):
        pipeline(tokens(5), reads=True)
    pipeline = wrapped(model, example={"input_ids": tokens(2), "reads": True})
    assert torch.allclose(pipeline(tokens(5), reads=True)[0], model(tokens(5), reads=True)[0])


def test_parameters_on_meta_are_enough_for_a_plan():
    """80 layers are cut without a weight, in seconds, and nothing is compared."""
    from transformers import LlamaForCausalLM

    config = make_config("llama")
    config.num_hidden_layers = 80
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    start = time.perf_counter()
    report = cut(model).report
    assert len(report.pieces) == 82
    assert report.equivalence is None
    assert time.perf_counter() - start < 30


def test_the_model_is_left_alone():
    model = hf_model("llama").train()
    model.model.layers[0].eval()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    cut(model)
    assert [model.training, *(layer.training for layer in model.model.layers)] == [True, False, True]
    assert (model.lm_head.weight.grad == 1).all()
    assert model.model.norm.weight.grad is None
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_a_model_without_layers_stays_whole_with_a_reason():
    made = cut(nn.Sequential(nn.Linear(2, 2)), {"input": torch.ones(1, 2)})
    report = made.report
    assert report.is_whole
    assert passed_tensors(made) == []
    assert report.refused == (("layers", "The model has no list of two or more modules with parameters."),)


def test_fewer_lists_are_cut_where_all_do_not_go():
    class Two(Toy):
        def __init__(self):
            super().__init__(count=4)
            self.others = nn.ModuleList([TakesOpaque(), TakesOpaque()])

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for layer in self.others:
                x = layer(x, Opaque(self.head.bias))
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    report = cut(Two(), {"input_ids": tokens(2)}).report
    assert report.lists == ("layers",)
    assert [reason for reason, _ in report.refused] == ["structure"]


def test_an_example_that_the_model_cannot_run_is_an_error():
    with pytest.raises(CutError, match=r"Toy does not run on the example \(input_ids\): IndexError") as caught:
        cut(Toy(), {"input_ids": torch.tensor([[99]])})
    assert caught.value.reason == "example"
    assert "cut(model, example=batch)" in str(caught.value)


def test_skipped_modules_are_not_cut():
    model = hf_model("seq2seq:bart")
    assert cut(model, skip_modules=[model.model.encoder]).report.lists == ("model.decoder.layers",)


def test_pictures_are_part_of_an_example():
    from matrix.cut_cases import batch_of

    model = hf_model("image:llava")
    report = cut(model, batch_of("image:llava", model, 2, 0)).report
    assert "model.language_model.layers" in report.lists
    assert report.equivalence.gradients < 1e-9
