"""What models do between their layers."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipeRunConfig
from roundpipe_runtime.huggingface import BatchStructureError, CutError
from tests.runtime.huggingface.hf_small import (
    Block,
    Opaque,
    TakesOpaque,
    Toy,
    assert_like_plain,
    compare_toy,
    hf_batch,
    hf_model,
    squares,
    tokens,
    without_dropout,
    worst_gradient,
    wrapped,
)


def test_plain_layers_are_two_phases_and_code_between_them_is_one_more():
    class Glue(Toy):
        def between(self, number, layer, x):
            return layer(x) * 2 if number == 1 else layer(x)

    assert compare_toy(Toy()).report.pieces == ("phase 0", "layers.0", "layers.1", "layers.2", "phase 1")
    assert compare_toy(Glue()).report.pieces == ("phase 0", "layers.0", "layers.1", "phase 1", "layers.2", "phase 2")


def test_code_between_all_layers_may_have_parameters():
    class Glue(Toy):
        def between(self, number, layer, x):
            return layer(x) + self.head(x)[..., :8] * self.embed.weight[0]

    assert compare_toy(Glue()).report.phases == 4


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
    class Skipping(Toy):
        def between(self, number, layer, x):
            return x if number == 1 and x.shape[0] > 3 else layer(x)

    model = Skipping().double()
    ids = tokens(7)
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    found = pipeline(ids, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    assert torch.allclose(found, torch.cat([model(part) for part in ids.split((4, 3))]), rtol=1e-12)


def test_layers_that_the_example_did_not_call_are_an_error():
    class Adding(Toy):
        def between(self, number, layer, x):
            return layer(layer(x)) if x.shape[1] == 6 else layer(x)

    model = Adding()
    pipeline = wrapped(model, example={"input_ids": tokens(2, 4)})
    with pytest.raises(BatchStructureError, match=r"This batch calls layers\.0 where the example") as caught:
        pipeline(tokens())
    assert "wrap_model_to_roundpipe(model, example=batch)" in str(caught.value)
    assert pipeline(tokens(5, 4)).shape == (5, 4, 20)


def test_code_that_the_example_did_not_run_is_an_error():
    class Sometimes(Toy):
        def between(self, number, layer, x):
            return layer(x) * 2 if x.shape[1] == 6 and number == 0 else layer(x)

    pipeline = wrapped(Sometimes(), example={"input_ids": tokens(2, 4)})
    with pytest.raises(BatchStructureError, match=r"runs more steps \(layers, and code between layers\)"):
        pipeline(tokens())


def test_opaque_objects_among_arguments_are_refused():
    class Handing(Toy):
        def between(self, number, layer, x):
            return layer(x, Opaque(self.head.bias).tensor[0])

    class Holding(Toy):
        def between(self, number, layer, x):
            return layer(x, Opaque(self.head.bias))

    compare_toy(Handing())
    with pytest.raises(CutError, match="gets an argument that cannot be passed between layers") as caught:
        wrapped(Holding(nn.ModuleList([TakesOpaque(), TakesOpaque()])), example={"input_ids": tokens(2)})
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
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    before, behind = pipeline(tokens())
    assert (before == 0).any()
    assert torch.equal(before, behind)


class EvalGlue(Toy):
    def between(self, number, layer, x):
        x = layer(x)
        return x + torch.relu(x) if number == 1 and not self.training else x


def test_code_between_layers_in_evaluation_only():
    model, plain = EvalGlue().double().train(), EvalGlue().double().train()
    pipeline = wrapped(model, example={"input_ids": tokens(2)})
    assert pipeline.cut.report.phases == 3
    for mode in (True, False, True):
        model.train(mode)
        plain.train(mode)
        expected = plain(tokens())
        (expected.square().sum() / 5).backward()
        _, found = pipeline.forward_backward((tokens(),), loss_fn=squares, return_outputs=True)
        assert torch.allclose(found, expected, rtol=1e-12)
        assert worst_gradient(model, plain) < 1e-12


def test_xlnet_trains_though_it_keeps_memories_in_evaluation():
    """Its code computes memories between the layers in evaluation, and none in training."""
    assert_like_plain(without_dropout(hf_model("xlnet")), hf_batch())


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
