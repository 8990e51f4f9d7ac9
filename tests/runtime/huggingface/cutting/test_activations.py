"""Tests of what passes between the pieces of a cut: who makes a tensor, who gets it, how it is called."""

import pytest
import torch
from torch import nn

from matrix.models import make_config
from roundpipe_runtime.huggingface import cut, passed_tensors
from tests.runtime.huggingface.hf_small import WIDTH, Block, Toy, hf_batch, hf_model, tokens, toy

pytestmark = pytest.mark.slow


def found(model, example, **options):
    made = cut(model, example, check=False)
    return [(one.kind, one.name, one.made, one.read) for one in passed_tensors(made, example, **options)]


def test_a_hidden_state_passes_from_piece_to_piece():
    passed = passed_tensors(cut(Toy(), {"input_ids": tokens(2)}), {"input_ids": tokens(2)})
    assert [(one.kind, one.made, one.read) for one in passed] == [("hidden", n, (n + 1,)) for n in range(4)]
    assert {(one.shape, one.bytes) for one in passed} == {((2, 6, WIDTH), 2 * 6 * WIDTH * 4)}
    # what no layer takes by a name is what a layer returned
    assert [one.name for one in passed] == ["x", "x", "x", "hidden_states"]


def test_what_the_model_makes_for_its_layers_is_a_side_input():
    def between(self, number, layer, x):
        if number == 0:
            self.__dict__["weight"] = self.embed.weight.mean(0) + 1
        return layer(x) if number == 1 else layer(x, scale=self.__dict__["weight"])

    passed = found(toy(between), {"input_ids": tokens(2)})
    assert ("side", "scale", 0, (1, 3)) in passed
    assert len(passed) == 5


class Remembering(Block):
    """A layer that returns the input of its norm beside its output, and takes what another one returned."""

    def forward(self, x, memory=None):
        out = super().forward(x)
        return (out if memory is None else out + memory), torch.sin(x).sum(-1, keepdim=True)


def test_what_a_layer_makes_for_a_later_one_is_carried():
    def between(self, number, layer, x):
        x, memory = layer(x, self.__dict__["memory"]) if number == 2 else layer(x)
        if number == 0:
            self.__dict__["memory"] = memory
        return x

    passed = found(toy(between, nn.ModuleList([Remembering() for _ in range(3)])), {"input_ids": tokens(2)})
    assert [one for one in passed if one[0] != "hidden"] == [("carried", "memory", 1, (3,))]


def test_what_hooks_take_out_of_layers_is_captured():
    passed = found(hf_model("mixtral"), {**hf_batch(2), "output_router_logits": True})
    assert [one for one in passed if one[0] == "captured"] == [
        ("captured", "router_logits", 1, (3,)),
        ("captured", "router_logits", 2, (3,)),
    ]


def test_shared_keys_are_carried_in_the_dictionary_that_layers_write():
    """Gemma 3n: the third and the fourth layer read the keys and values of the first two."""
    passed = found(hf_model("gemma3n_text"), hf_batch(2))
    shared = [one for one in passed if one[1].startswith("shared_kv_states")]
    # before transformers 5.23 the keys are the numbers of the layers
    sliding, full = ("'sliding_attention'", "'full_attention'") if "sliding" in str(shared) else (0, 1)
    assert shared == [
        ("carried", f"shared_kv_states[{sliding}][0]", 1, (2, 3, 4, 5)),
        ("carried", f"shared_kv_states[{sliding}][1]", 1, (2, 3, 4, 5)),
        ("carried", f"shared_kv_states[{full}][0]", 2, (3, 4, 5)),
        ("carried", f"shared_kv_states[{full}][1]", 2, (3, 4, 5)),
    ]


def test_the_output_of_an_encoder_waits_for_every_layer_of_the_decoder():
    """T5: the phase between the two lists makes it, and the bias of positions passes by the hidden state's side."""
    batch = hf_batch(2)
    example = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"].flip(1)[:, :6]}
    passed = found(hf_model("seq2seq:t5"), example)
    assert ("side", "encoder_hidden_states", 3, (4, 5)) in passed
    assert ("carried", "position_bias", 1, (2,)) in passed
    assert ("hidden", "hidden_states", 2, (3, 6)) in passed


def test_weights_are_not_needed():
    from transformers import LlamaForCausalLM

    model = hf_model("llama").float()
    with torch.device("meta"):
        planned = LlamaForCausalLM(make_config("llama"))
    # a mask for all pairs of tokens is not asked whether it masks anything
    example = {"input_ids": tokens(2), "attention_mask": torch.zeros(2, 1, 6, 6)}
    shapes = [
        [(one.name, one.shape, one.made, one.read) for one in passed_tensors(cut(each, example, check=False), example)]
        for each in (model, planned)
    ]
    assert shapes[0] == shapes[1]


def test_the_model_is_as_before_and_without_an_example_tokens_are_made_up():
    model = hf_model("llama").train()
    passed = passed_tensors(cut(model, check=False))
    assert next(one.shape[:2] for one in passed if one.kind == "hidden") == (2, 12)
    assert model.training
    assert model.model.layers[0].training
    assert all(parameter.grad is None for parameter in model.parameters())
