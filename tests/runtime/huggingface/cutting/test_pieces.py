"""What models do between their layers; models whose forward was replaced, and caches that a model makes."""

import functools
import types

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.huggingface import BatchStructureError, CutError, cut
from roundpipe_runtime.huggingface.cutting.caches import MadeCache, entries_read, without_caches
from roundpipe_runtime.huggingface.cutting.stub import Key, rebind_functions
from tests.runtime.huggingface import hf_small
from tests.runtime.huggingface.hf_small import Block, Toy, compare_toy, hf_batch, hf_model, tokens, toy, wrapped


def test_plain_layers_are_two_phases_and_code_between_them_is_one_more():
    glued = toy(lambda self, number, layer, x: layer(x) * 2 if number == 1 else layer(x))
    assert compare_toy(Toy()).report.pieces == ("phase 0", "layers.0", "layers.1", "layers.2", "phase 1")
    assert compare_toy(glued).report.pieces == ("phase 0", "layers.0", "layers.1", "phase 1", "layers.2", "phase 2")


def test_code_between_all_layers_may_have_parameters():
    glued = toy(lambda self, number, layer, x: layer(x) + self.head(x)[..., :8] * self.embed.weight[0])
    assert compare_toy(glued).report.phases == 4


def test_side_inputs_get_their_gradients():
    class Sides(Toy):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            scale = self.head.bias[:8] * 2
            for layer in self.layers:
                x = layer(x, scale=scale)
            return self.head(x)

    assert compare_toy(Sides()).report.phases == 2


def test_layers_called_again_and_in_another_order():
    class Loop(Toy):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for number in (1, 0, 1, 2, 1):
                x = self.layers[number](x)
            return self.head(x)

    made = compare_toy(Loop())
    assert made.report.pieces[1:-1] == ("layers.1", "layers.0", "layers.1", "layers.2", "layers.1")


class WithResidual(Block):
    """Returns what it adds and what it is to be added to."""

    def forward(self, x, residual=None):
        residual = x if residual is None else residual + x
        return {"x": torch.tanh(self.linear(residual)), "residual": residual, "none": None}


def test_carried_state_passes_from_layer_to_layer():
    class Carried(Toy):
        def forward(self, input_ids):
            x, residual = self.embed(input_ids), None
            for layer in self.layers:
                out = layer(x, residual)
                x, residual = out["x"], out["residual"]
            return self.head(x + residual)

    assert compare_toy(Carried(nn.ModuleList([WithResidual() for _ in range(3)]))).report.phases == 2


class Sharing(Block):
    def forward(self, x, shared):
        if len(shared) < 2:
            shared[f"key {len(shared)}"] = torch.sigmoid(self.linear(x))
        return x + self.linear(shared["key 0"]) * sum(shared.values())


def test_a_dictionary_that_layers_write_is_shared_and_the_model_may_read_it_between_them():
    class Boxed(Toy):
        def forward(self, input_ids):
            x, shared = self.embed(input_ids), {}
            for number, layer in enumerate(self.layers):
                x = layer(x, shared)
                x = x * 3 if number == 1 else x
            return self.head(x + shared["key 1"])

    compare_toy(Boxed(nn.ModuleList([Sharing() for _ in range(4)])))


def test_a_microbatch_may_leave_layers_out():
    model = toy(lambda self, number, layer, x: x if number == 1 and x.shape[0] > 3 else layer(x)).double()
    ids = tokens(7)
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    found = pipeline(ids, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    assert torch.allclose(found, torch.cat([model(part) for part in ids.split((4, 3))]), rtol=1e-12)


def test_layers_that_the_example_did_not_call_are_an_error():
    model = toy(lambda self, number, layer, x: layer(layer(x)) if x.shape[1] == 6 else layer(x))
    pipeline = wrapped(model, example={"input_ids": tokens(2, 4)})
    with pytest.raises(BatchStructureError, match=r"This batch calls layers\.0 where the example") as caught:
        pipeline(tokens())
    assert "wrap_model_to_roundpipe(model, example=batch)" in str(caught.value)
    assert pipeline(tokens(5, 4)).shape == (5, 4, 20)


def test_code_that_the_example_did_not_run_is_an_error():
    model = toy(lambda self, number, layer, x: layer(x) * 2 if x.shape[1] == 6 and number == 0 else layer(x))
    pipeline = wrapped(model, example={"input_ids": tokens(2, 4)})
    with pytest.raises(BatchStructureError, match=r"runs more steps \(layers, and code between layers\)"):
        pipeline(tokens())


def test_opaque_objects_among_arguments_are_refused():
    compare_toy(toy(lambda self, number, layer, x: layer(x, hf_small.Opaque(self.head.bias).tensor[0])))
    layers = nn.ModuleList([hf_small.TakesOpaque(), hf_small.TakesOpaque()])
    held = toy(lambda self, number, layer, x: layer(x, hf_small.Opaque(self.head.bias)), layers)
    with pytest.raises(CutError, match="gets an argument that cannot be passed between layers") as caught:
        wrapped(held, example={"input_ids": tokens(2)})
    assert caught.value.reason == "structure"


def test_noise_of_the_models_own_code_is_the_same_in_all_phases():
    class Twice(Toy):
        def forward(self, input_ids):
            x = torch.nn.functional.dropout(self.embed(input_ids), 0.5, self.training)
            y = self.layers[0](x.clone())
            y = self.layers[1](y * 0 + x)
            return y * 0 + x, self.layers[2](y * 0 + x * 1)

    class Identity(Block):
        def forward(self, x):
            return x + 0 * self.linear(x)

    model = Twice(nn.ModuleList([Identity() for _ in range(3)])).train()
    before, behind = wrapped(model, example={"input_ids": tokens(2)})(tokens())
    assert (before == 0).any()
    assert torch.equal(before, behind)


def test_code_between_layers_in_evaluation_only():
    def between(self, number, layer, x):
        x = layer(x)
        return x + torch.relu(x) if number == 1 and not self.training else x

    model, plain = toy(between).double().train(), toy(between).double().train()
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    assert pipeline.cut.report.phases == 3
    for mode in (True, False, True):
        model.train(mode)
        plain.train(mode)
        expected = plain(tokens())
        (expected.square().sum() / 5).backward()
        _, found = pipeline.forward_backward((tokens(),), loss_fn=hf_small.squares, return_outputs=True)
        assert torch.allclose(found, expected, rtol=1e-12)
        assert hf_small.worst_gradient(model, plain) < 1e-12


def test_xlnet_trains_though_it_keeps_memories_in_evaluation():
    """Its code computes memories between the layers in evaluation, and none in training."""
    hf_small.assert_like_plain(hf_small.without_dropout(hf_model("xlnet")), hf_batch())


class WithEntities(Block):
    """Returns what it was given next to the text, if anything, as the layers of LUKE do."""

    def forward(self, x, entities=None, strict=False):
        if strict and entities is None:
            raise ValueError("entities are missing")
        more = 0.0 if entities is None else torch.tanh(entities).mean(1, keepdim=True)
        return super().forward(x) + more, None if entities is None else entities * 2


class ReadsEntities(Toy):
    strict = False

    def __init__(self):
        super().__init__(nn.ModuleList([WithEntities() for _ in range(3)]))

    def forward(self, input_ids, entities=None):
        x, strict = self.embed(input_ids), self.strict and entities is not None
        for layer in self.layers:
            x, entities = layer(x, entities, strict=strict)
        return self.head(x)


@pytest.mark.parametrize("strict", [False, True], ids=["would be wrong", "would raise an error of the layer"])
def test_a_batch_for_which_layers_return_more_than_for_the_example_is_an_error(strict):
    """The calls after them were recorded without it: the answer would lack it, or a layer would miss it."""
    model = ReadsEntities()
    model.strict = strict
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    entities = torch.randn(5, 6, 8)
    with pytest.raises(BatchStructureError, match=r"Layers before layers\.1 return tensors for this batch"):
        pipeline(tokens(), entities)
    assert pipeline(tokens()).shape == (5, 6, 20)
    pipeline = wrapped(model, example={"input_ids": tokens(2), "entities": entities[:2]})
    assert torch.allclose(pipeline(tokens(), entities), model(tokens(), entities), atol=1e-6)


class Attends(Block):
    """A layer that adds the mean of the keys that a cache has for it, and writes its own ones."""

    def __init__(self, number, reads=None):
        super().__init__()
        self.number = number
        self.reads = number if reads is None else reads

    def forward(self, x, cache):
        states = x.unsqueeze(1)
        cache.update(states, states, self.number)
        return super().forward(x + cache.layers[self.reads].keys.mean(2))


class Prefixed(Toy):
    def __init__(self, reads=(None, None, None)):
        super().__init__(nn.ModuleList([Attends(number, other) for number, other in enumerate(reads)]))
        self.prefix = nn.Parameter(torch.randn(3, 2, hf_small.WIDTH))

    def forward(self, input_ids):
        x, cache = self.embed(input_ids), DynamicCache()
        for number, prefix in enumerate(self.prefix):
            rows = prefix.expand(len(x), 1, 2, hf_small.WIDTH)
            cache.update(rows, rows * 2, number)
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


def test_learned_keys_get_the_gradients_of_the_layers():
    found = compare_toy(Prefixed())
    assert list(found.layers) == ["layers.0", "layers.1", "layers.2"]
    assert found.program.cache_reads == {place: frozenset({(0, place)}) for place in range(3)}


def test_a_layer_that_reads_what_another_has_written_is_refused():
    report = cut(Prefixed((None, None, 0)), {"input_ids": tokens(2)}, check=False).report
    assert report.is_whole
    assert "layers.2 and layers.0 use the same keys and values" in str(report)


def test_a_layer_gets_the_entries_that_it_read_before():
    cache = DynamicCache()
    for number in range(2):
        cache.update(torch.full((1, 1, 2, 3), float(number)), torch.ones(1, 1, 2, 3), number)
    values = {}

    def named(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        values[Key(-1, len(values))] = leaf
        return Key(-1, len(values) - 1)

    made = MadeCache.of(cache, named, frozenset({(0, 1)}))
    assert made.keys() == values.keys()
    built = made.build(values)
    assert torch.equal(built.layers[1].keys, torch.ones(1, 1, 2, 3))
    built.update(torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 3), 1)
    assert built.layers[1].keys.shape[2] == 3
    assert cache.layers[1].keys.shape[2] == 2
    assert entries_read(((built,), {})) == {(0, 1)}
    with pytest.raises(BatchStructureError, match="reads entry 0 of the cache"):
        built.get_seq_length(0)


def test_outputs_lose_caches_and_nothing_else():
    cache, logits = DynamicCache(), torch.ones(1)
    assert without_caches({"logits": logits, "cache": cache}) == {"logits": logits, "cache": None}
    assert without_caches((logits, cache)) == (logits,)
    assert without_caches(logits) is logits


def in_a_closure(model):
    """A function whose closure holds the former forward, a method of the model."""
    original = model.forward

    def forward(*args, scale=1.0, **kwargs):
        return original(*args, **kwargs) * scale

    model.forward = forward


def as_a_method(model):
    """A method of the model that calls the former forward, as the heads of TRL are."""
    original = model.forward

    def forward(self, *args, scale=1.0, **kwargs):
        return original(*args, **kwargs) * scale

    model.forward = types.MethodType(forward, model)


def of_the_module(model):
    """A function whose closure holds the model itself, and calls its class."""

    @functools.wraps(model.forward)
    def forward(*args, scale=1.0, **kwargs):
        return type(model).forward(model, *args, **kwargs) * scale

    model.forward = forward


@pytest.mark.parametrize(
    "replace", [in_a_closure, as_a_method, lambda model: [in_a_closure(model), as_a_method(model)], of_the_module]
)
def test_a_model_with_a_replaced_forward_is_cut(replace):
    model, plain = Toy(), Toy()
    replace(model)
    replace(plain)
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    assert len(pipeline.cut.layers) == 3
    batch = {"input_ids": tokens(), "scale": 0.5}
    expected = plain(**batch)
    expected.square().sum().backward()
    found = pipeline(**batch)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    assert hf_small.worst_gradient(model, plain) < 1e-6


def test_a_forward_that_is_replaced_later_counts():
    model, plain = hf_model("llama"), hf_model("llama")
    plain.load_state_dict(model.state_dict())
    pipeline, batch = wrapped(model), hf_batch()
    before = pipeline(**batch).logits
    for one in (model, plain):

        def forward(self, *args, halves=False, **kwargs):
            output = type(self).forward(self, *args, **kwargs)
            output.logits = output.logits / 2 if halves else output.logits
            return output

        one.forward = types.MethodType(forward, one)
    torch.testing.assert_close(pipeline(**batch, halves=True).logits, plain(**batch, halves=True).logits)
    torch.testing.assert_close(pipeline(**batch).logits, before)
    prompt = {"input_ids": batch["input_ids"][:, :4], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(pipeline.generate(**prompt), plain.generate(**prompt))


def test_a_forward_that_calls_another_model_stays():
    """A function that holds no module of the model is kept as it is, and so is what it counts."""
    model = Toy()
    calls = 0

    def forward(input_ids):
        nonlocal calls
        calls += 1
        return input_ids

    model.head.forward = forward
    rebind_functions(model, {})
    assert model.head.forward is forward
    assert not cut(Toy(), {"input_ids": tokens(2)}).report.is_whole
    assert calls == 0
