"""Bits go where a text needs them: the order, the end of the search, and files made so."""

import dataclasses
import math

import onnx
import onnxruntime
import pytest
import torch

from tests.flatten.export.trained_model import trained_model
from yobx_flatten import DecodeSizes, decode_inputs, export_onnx
from yobx_flatten.export.proof.quality import Quality
from yobx_flatten.export.quantization import Budget, Quantization, Role

ROLES = {
    "up": Role("up", 2, 100, False),
    "down": Role("down", 2, 100, False),
    "o": Role("o", 2, 10, False),
    "head": Role("head", 1, 50, True),
}
COSTS = {"up": {4: 0.05, 8: 0.01}, "down": {4: 0.08, 8: 0.01}, "o": {4: 0.02, 8: 0.01}, "head": {4: 0.1, 8: 0.0}}
"""What each role adds to the logarithm of the perplexity; nothing in 32 bits."""


def _search(allowed, bits=4, worst=1.0, agreed=None):
    tried = []

    def measure(given):
        tried.append(dict(given))
        log = sum(COSTS[name].get(width, 0.0) for name, width in given.items())
        agreement = None if agreed is None else agreed[given["head"]]
        return Quality("int4", 32, 9, worst, 0.1, 0.1, agreement, None, 9, 10.0, 10.0 * math.exp(log), allowed)

    return *Budget(ROLES, bits, measure).find(), tried


def test_the_head_is_the_first_to_get_more_bits():
    """0.25 are 0.15 without the rounding of the head."""
    bits, quality, tried = _search(math.exp(0.151))
    assert bits == {"up": 4, "down": 4, "o": 4, "head": 8}
    assert (quality.ok, len(tried)) == (True, 2)


@pytest.mark.parametrize(("agreed", "head", "count"), [(None, 4, 1), (0.96, 4, 1), (0.94, 8, 2)])
def test_the_head_gets_more_bits_where_tokens_differ(agreed, head, count):
    """The ratio holds with all in 4 bits, and less than 19 of 20 tokens are the model's; then the search ends."""
    bits, quality, tried = _search(1.5, agreed=agreed and {4: agreed, 8: 0.94})
    assert bits == {"up": 4, "down": 4, "o": 4, "head": head}
    assert (quality.ok, len(tried)) == (True, count)


def test_a_model_of_integers_keeps_the_8_bits_of_its_head():
    """In 4 bits it would be within the ratio; with its own integers nothing is lost, and nothing else is tried."""
    roles = {name: dataclasses.replace(role, exact=8 if role.is_last else 4) for name, role in ROLES.items()}
    tried = []

    def measure(given):
        tried.append(dict(given))
        return Quality("int4", 32, 9, 0.1, 0.1, 0.1, 1.0, None, 9, 10.0, 10.0, 1.1)

    bits, _ = Budget(roles, 4, measure).find()
    assert bits == {"up": 4, "down": 4, "o": 4, "head": 8}
    assert tried == [bits]


def test_the_next_is_the_role_that_brings_most_for_its_size():
    """0.01 of 10 weights, then 0.07 of 100: 0.15 become 0.14 and 0.07."""
    bits, quality, _ = _search(math.exp(0.0701))
    assert bits == {"up": 4, "down": 8, "o": 8, "head": 8}
    assert quality.perplexity_ratio == pytest.approx(math.exp(0.07))


@pytest.mark.parametrize(("allowed", "is_ok"), [(math.exp(0.0201), True), (1 + 1e-9, False)])
@pytest.mark.parametrize("first", [4, 8])
def test_roles_stay_in_float_where_8_bits_are_not_enough_but_never_most_weights(allowed, is_ok, first):
    """0.03 in 8 bits, of which the smallest role is the cheapest third. A ratio that no file keeps is a refusal."""
    bits, quality, _ = _search(allowed, bits=first)
    assert bits == {"up": 8, "down": 8, "o": 32, "head": 32}
    assert quality.ok == is_ok


def test_a_file_that_computes_nothing_is_not_searched():
    assert len(_search(1.01, worst=math.inf)[2]) == 1


def _exported(path, ratio):
    inputs = decode_inputs(trained_model(), DecodeSizes(batch=2, past=5, new=3))
    asked = Quantization("int4", perplexity_ratio=ratio)
    return export_onnx(trained_model(), kwargs=inputs, path=path, cases=[], steps=2, quantize=asked)


@pytest.mark.slow  # exports a model twice, and measures a file for each kind of matrix
def test_a_small_ratio_gets_a_larger_file_and_no_error(tmp_path):
    loose = _exported(tmp_path / "loose.onnx", 1.5).report
    before = loose.quality.perplexity_ratio
    assert before > 1.0005
    strict = _exported(tmp_path / "strict.onnx", 1 + (before - 1) / 2).report
    assert strict.quality.ok
    assert strict.onnx_bytes > loose.onnx_bytes
    (note,) = [remark for remark in strict.remarks if remark.startswith("stored in int8")]
    assert "lm_head (1 of 0.0332 million weights)" in note
    widths = [
        {a.name: a.i for a in node.attribute}["bits"]
        for node in onnx.load(tmp_path / "strict.onnx").graph.node
        if node.op_type == "MatMulNBits"
    ]
    assert widths[-1] == 8
    assert len(widths) == 15
    assert not [remark for remark in loose.remarks if remark.startswith("stored in")]


def test_a_tied_table_is_in_the_file_once(tmp_path):

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(80, 64)
            self.head = torch.nn.Linear(64, 80, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids, x):
            return self.table(ids), self.head(x)

    torch.manual_seed(0)
    module, ids = Tied().eval(), torch.tensor([[3, 79, 0]])
    report = export_onnx(
        module, (ids, torch.eye(64)), path=tmp_path / "m.onnx", cases=[], quantize="int8", dynamic_shapes=None
    ).report
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert sum(len(tensor.raw_data) for tensor in graph.initializer) < 1.3 * 80 * 64
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    names = [one.name for one in session.get_inputs()]
    rows, columns = session.run(None, dict(zip(names, (ids.numpy(), torch.eye(64).numpy()), strict=True)))
    table = module.table.weight.detach()
    torch.testing.assert_close(torch.from_numpy(rows), table[ids], atol=0.02, rtol=0)
    torch.testing.assert_close(torch.from_numpy(columns.T[ids.numpy()]), torch.from_numpy(rows), atol=0.02, rtol=0)
    assert any("is in the file once" in remark for remark in report.remarks)
