"""Rules are tried where they can match, and the graph is the one of onnxscript's own optimizer."""

from __future__ import annotations

import onnx_ir
import pytest
import torch
from onnxscript import optimizer, rewriter

from tests.models import make_model
from yobx_flatten import DecodeSizes, decode_inputs, dynamic_shapes, register_flattening_functions
from yobx_flatten.export.onnx.rewrite.graph import _RuleOfOperator, optimize_graph

pytestmark = pytest.mark.slow


class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.two = torch.nn.Conv2d(4, 4, 3)

    def forward(self, x):
        x = self.norm(self.one(torch.nn.functional.pad(x, (1, 1, 1, 1))))
        x = torch.relu(torch.relu(x)).clamp(0, 6).clamp(1, 5)
        return self.two(x).transpose(1, 2).transpose(2, 1).to(torch.float64).to(torch.float32)


def converted(module, args, kwargs, shapes):
    program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    return torch.onnx.export(program, dynamo=True, verbose=False, optimize=False).model


def optimized(model, optimize):
    copy = onnx_ir.serde.deserialize_model(onnx_ir.serde.serialize_model(model))
    optimize(copy)
    return onnx_ir.serde.serialize_model(copy)


def test_the_graph_is_the_one_of_onnxscript_for_a_model_with_a_cache():
    """Mistral: embeddings, a window, attention, a head; byte for byte."""
    model = make_model("mistral")
    with register_flattening_functions(patch_transformers=True):
        inputs = decode_inputs(model, DecodeSizes())
        made = converted(model, (), inputs, dynamic_shapes(inputs))
    assert optimized(made, optimize_graph) == optimized(made, optimizer.optimize_ir)


def test_the_graph_is_the_one_of_onnxscript_for_convolutions():
    made = converted(Convolutions().eval(), (torch.ones(2, 3, 8, 8),), {}, None)
    found = optimized(made, optimize_graph)
    assert found == optimized(made, optimizer.optimize_ir)
    assert len(found.graph.node) < len(made.graph)


def test_a_rule_is_not_tried_at_other_operators():
    rule = next(rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name == "CastCast")
    node = onnx_ir.node("Relu", [onnx_ir.Value(name="x")])
    assert _RuleOfOperator(rule).try_rewrite(None, None, node) is None  # without a model, the rule itself would raise
    assert {_RuleOfOperator(rule)._operator for rule in rewriter._DEFAULT_REWRITE_RULES} >= {"Cast", "Slice", "Conv"}
