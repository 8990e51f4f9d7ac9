"""Programs that are trained: gradients flow through caches and registered classes as in the eager module."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.modules import module_of
from yobx_flatten import (
    dynamic_shapes,
    make_dynamic_cache,
    make_flattening_function_for_dataclass,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)

WINDOW = 4


@dataclasses.dataclass
class Scored:
    scores: torch.Tensor
    past: object


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 4)

    def forward(self, scored):
        new = self.project(scored.scores)
        keys, values = scored.past.update(new, new * 2, 0)
        return {"loss": (keys * values).sum() + self.project(keys).mean(), "past": scored.past}


def inputs(batch, length):
    generator = torch.Generator().manual_seed(length)
    new, keys, values = (torch.randn(batch, 2, size, 4, generator=generator) for size in (2, length, length))
    keys.requires_grad_()
    cache = make_dynamic_cache([(keys, values)], "DynamicSlidingWindowLayer", {"sliding_window": WINDOW})
    return Scored(new, cache), keys


@pytest.fixture(autouse=True)
def registered():
    flatten, flatten_with_keys, unflatten = make_flattening_function_for_dataclass(Scored, set())
    register_class_flattening(Scored, flatten, unflatten, flatten_with_keys)
    yield
    unregister_class_flattening(Scored)


def gradients(module, scored, keys):
    module.zero_grad()
    module(scored)["loss"].backward()
    return [keys.grad, *(parameter.grad for parameter in module.parameters())]


def test_a_program_has_the_gradients_of_its_module():
    torch.manual_seed(0)
    module = Reader().train()
    with register_flattening_functions(patch_transformers=True):
        example, _ = inputs(2, 2)
        program = torch.export.export(module, (example,), dynamic_shapes=dynamic_shapes((example,)))
        trained = program.module()
        for batch, length in ((2, 2), (3, WINDOW - 1)):
            expected = gradients(module, *inputs(batch, length))
            found = gradients(trained, *inputs(batch, length))
            torch.testing.assert_close(found, expected)
            assert all(gradient.abs().max() > 0 for gradient in expected)


class Attention(Reader):
    def forward(self, scored):
        new = self.project(scored.scores)
        keys, values = scored.past.update(new, new * 2, 0)
        found = torch.nn.functional.scaled_dot_product_attention(new, keys, values)
        return {"loss": found.square().mean()}


@pytest.mark.parametrize("reader", [Reader, Attention])
def test_one_graph_of_forward_and_backward_has_the_gradients_of_its_module(reader):
    experimental = pytest.importorskip("torch.export.experimental")
    torch.manual_seed(0)
    # the loss alone: torch's joint export takes no other output that has a gradient
    module = module_of(lambda self, scored: {"loss": self.reader(scored)["loss"]}, reader=reader()).train()
    with register_flattening_functions(patch_transformers=True):
        example, _ = inputs(2, 2)
        program = torch.export.export(module, (example,), dynamic_shapes=dynamic_shapes((example,)))
        # with the kernel of the CPU torch 2.13 decomposes the forward, and leaves a backward that expects another one
        with sdpa_kernel(SDPBackend.MATH):
            joint = experimental._export_forward_backward(program)
        backward = joint.graph_signature.backward_signature
        assert backward.loss_output == joint.graph_signature.user_outputs[0]
        assert list(backward.gradients_to_parameters.values()) == list(dict(module.named_parameters()))
        for batch, length in ((2, 2), (3, WINDOW - 1)):
            scored, _ = inputs(batch, length)
            with torch.no_grad():
                loss, *found = joint.graph_module(*module.parameters(), *torch.utils._pytree.tree_leaves(scored))
            keys, *weights = gradients(module, *inputs(batch, length))
            torch.testing.assert_close(loss, module(scored)["loss"])
            torch.testing.assert_close(found, [*weights, keys])
            assert all(gradient.abs().max() > 0 for gradient in found)
