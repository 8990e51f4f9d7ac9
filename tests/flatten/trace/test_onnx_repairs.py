"""What stands in for operators that torch's ONNX exporter translates wrongly, slowly, or not at all."""

from __future__ import annotations

import importlib.util
import math

import onnxruntime
import pytest
import torch
from torch.nn import functional

from tests.modules import module_class, module_of
from yobx_flatten import export_onnx, register_flattening_functions
from yobx_flatten.trace.hook import filled_registry, remembering_decompositions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

INF, NAN = math.inf, math.nan
# each with each, so that every pair of signs, zeros and infinities is there
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.3, -2.5, 1e-30, -1e-30, 1e30, -1e30, INF, -INF])
FIRST, SECOND = (part.flatten() for part in torch.meshgrid(EDGES, EDGES, indexing="ij"))


def _of_pairs(self, x, y):
    signs = torch.signbit(x), torch.copysign(x, y), torch.copysign(x, -2.0)
    sums = torch.logaddexp(x, y), torch.logaddexp2(x, y)
    return torch.atan2(x, y), torch.hypot(x, y), torch.fmax(x, y), torch.fmin(x, y), *sums, *signs


def _clamped(self, x):
    sided = x.clamp(min=-1.0), x.clamp(max=0.5), x.clamp_min(0.25), x.clamp(-2.0, 2.0)
    return functional.logsigmoid(x), torch.remainder(x, 0.3), torch.remainder(x, -2.0), *sided


def _running(self, x):
    most, least = x.cummax(-1), x.cummin(0)
    return x.cumprod(-1), x.logcumsumexp(-1), x.cumprod(0), *most, *least


def _extremes(self, x):
    places = x.argmax(-1), x.argmin(0, keepdim=True), torch.argmax(x)
    return *x.max(-1), *x.min(0), x.amax(-1), x.amin((0, 1)), x.max(), *torch.aminmax(x, dim=-1), *places


def _ordered(self, x, ends):
    middle = x.median(-1)[0], x.median(), x.kthvalue(2, -1)[0]
    return *middle, torch.searchsorted(ends, x), torch.searchsorted(ends, x, right=True), torch.isin(x, ends)


def _losses(self, x, target, labels):
    smoothed = functional.cross_entropy(x, labels, label_smoothing=0.1)
    weight = torch.arange(1.0, 5.0)
    weighted = functional.cross_entropy(x, labels, weight, label_smoothing=0.2, reduction="sum")
    each = functional.binary_cross_entropy_with_logits(x, target, weight, reduction="none", pos_weight=weight)
    return functional.binary_cross_entropy_with_logits(x, target), each, smoothed, weighted


def _scattered(self, x, index, source):
    whole = x.scatter_reduce(1, index, source, "mean")
    return whole, x.scatter_reduce(1, index, source, "mean", include_self=False)


def _distances(self, x, y):
    return torch.cdist(x, y), torch.cdist(x, y, p=1.0), torch.cdist(x, y, p=INF), torch.cdist(x, y, p=3.0)


ROWS = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.5, -2.0, 4.0, 1.5], [2.0, 2.0, -1.0, 0.0]])
UNLIKE = torch.tensor([[NAN, 1.0, 2.0, 0.0], [3.0, NAN, 5.0, NAN], [-INF, -INF, 1.0, INF], [-1000.0, 0.0, 90.0, -90.0]])
CERTAIN = torch.tensor([[200.0, -200.0, 0.0, 50.0]] * 2)
NEAR = 1000 + torch.tensor([[0.0, 0.001], [0.002, 0.0], [0.0, 0.0]])
CASES = {
    "pairs": (_of_pairs, (torch.rand(6) + 0.5, torch.rand(6) + 0.5), (FIRST, SECOND)),
    "ends": (_clamped, (torch.rand(6),), (torch.cat([EDGES[:8], torch.tensor([200.0, -200.0, INF, -INF])])[:10],)),
    "running": (_running, (ROWS,), (UNLIKE[2:],)),
    "extremes": (_extremes, (ROWS,), (UNLIKE[:2],)),
    "ordered": (_ordered, (ROWS, torch.tensor([-1.0, 0.5, 2.0])), (ROWS.T.contiguous(), torch.tensor([0.0, 2, 2]))),
    "losses": (
        _losses,
        (ROWS, torch.rand(3, 4), torch.tensor([0, 3, 1])),
        (CERTAIN, torch.tensor([[1.0, 0.0, 1.0, 0.0]] * 2), torch.tensor([2, -100])),
    ),
    "scattered": (
        _scattered,
        (ROWS, torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)),
        (ROWS[:2], torch.zeros(2, 3, dtype=torch.int64), torch.rand(2, 3)),
    ),
    "distances": (_distances, (torch.rand(3, 2), torch.rand(4, 2)), (NEAR, NEAR[:2].contiguous())),
}  # fmt: skip


def _in_file(path, given):
    session = onnxruntime.InferenceSession(path)
    wanted = [one.name for one in session.get_inputs()]
    return [
        torch.tensor(found)
        for found in session.run(None, dict(zip(wanted, map(torch.Tensor.numpy, given), strict=True)))
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_file_computes_what_eager_does_at_values_unlike_the_examples(name, tmp_path):
    forward, example, unlike = CASES[name]
    module = module_of(forward)
    export_onnx(module, example, path=tmp_path / "m.onnx", cases=())
    for found, expected in zip(_in_file(tmp_path / "m.onnx", unlike), module(*unlike), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("kind", ["bool", "float", "three axes", "grouped", "scaled"])
def test_a_query_that_sees_nothing_gets_zeros(kind, opset, tmp_path):
    seen = torch.ones(2, 2, 4, 6, dtype=torch.bool)
    seen[..., 4:] = False
    blind = torch.ones(3, 2, 4, 6, dtype=torch.bool)
    blind[:, :, 1], blind[0, 0] = False, False
    how = {"grouped": {"enable_gqa": True}, "scaled": {"scale": 0.3}}.get(kind, {})
    attention = functional.scaled_dot_product_attention
    module = module_of(lambda self, q, k, v, mask: attention(q, k, v, attn_mask=mask, **how))

    def given(mask):
        q, k, v = (torch.randn(len(mask), 2, length, 8) for length in (4, 6, 6))
        mask = torch.zeros(mask.shape).masked_fill(~mask, -INF) if kind == "float" else mask
        if kind == "grouped":
            q, mask = torch.cat([q, q], 1), mask[:, :1].contiguous()
        return tuple(one[:, 0].contiguous() for one in (q, k, v, mask)) if kind == "three axes" else (q, k, v, mask)

    export_onnx(module, given(seen), path=tmp_path / "m.onnx", opset_version=opset, cases=())
    unlike = given(blind)
    (found,) = _in_file(tmp_path / "m.onnx", unlike)
    torch.testing.assert_close(found, module(*unlike), rtol=1e-4, atol=1e-5)


class Encodes(torch.nn.Module):
    def __init__(self, norm, float_mask):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, norm=torch.nn.LayerNorm(16) if norm else None)
        self.float_mask = float_mask

    def forward(self, x, padded):
        hidden = torch.zeros(padded.shape).masked_fill(padded, -INF) if self.float_mask else padded
        return self.encoder(x, src_key_padding_mask=hidden).sum(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("norm", "float_mask"), [(False, False), (True, False), (False, True)])
def test_an_encoder_returns_zeros_where_it_is_padded_on_the_right(norm, float_mask):
    """In a program: the encoder itself stays as it was, inside of the block, too."""
    before = torch.nn.TransformerEncoder.forward
    module = Encodes(norm, float_mask).eval().requires_grad_(False)
    rows = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    right, left, mixed, none = (torch.zeros(3, 5, dtype=torch.bool) for _ in range(4))
    right[0, 3:], right[1, 1:], left[0, :2] = True, True, True
    mixed[0, 3:], mixed[1, :2] = True, True
    x = torch.randn(3, 5, 16)
    expected = module(x, right)
    with register_flattening_functions():
        example = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
        program = torch.export.export(module, example, dynamic_shapes=(rows, rows)).module()
        torch.testing.assert_close(module(x, right), expected, rtol=0, atol=0)
    for padded in (right, left, mixed, none):
        torch.testing.assert_close(program(x, padded), module(x, padded), rtol=1e-4, atol=1e-5)
    assert torch.nn.TransformerEncoder.forward is before


def _rotary(self, x, angles):
    turns = torch.polar(torch.ones_like(angles), angles)
    x = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x * turns.unsqueeze(1)).flatten(-2), torch.view_as_real(turns.unsqueeze(-1))


_ErfInv = module_class("_ErfInv", lambda self, x: torch.special.erfinv(x))


def _converted(module, *args):
    with register_flattening_functions():
        return torch.onnx.export(torch.export.export(module, args), dynamo=True, verbose=False)


def test_an_axis_goes_into_a_complex_tensor_and_the_inverse_error_function_is_exact_to_the_last_digits():
    x, angles = torch.randn(2, 3, 4, 8), torch.rand(2, 4, 4)
    found = _converted(module_of(_rotary), x, angles)(x, angles)
    for ours, theirs in zip(found, module_of(_rotary)(x, angles), strict=True):
        torch.testing.assert_close(ours, theirs)
    x = torch.cat([torch.linspace(-0.999999, 0.999999, 20001), torch.tensor([1.0, -1.0, 0.0, 2.0, 1 - 1e-7])])
    (found,) = _converted(_ErfInv(), x)(x)
    torch.testing.assert_close(found, torch.special.erfinv(x), rtol=1e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_stable_sort_keeps_the_order_of_equals(dim, descending):
    sort = module_class("Sort", lambda self, x: tuple(torch.sort(x, stable=True, dim=dim, descending=descending)))()
    x = torch.randint(0, 3, (7, 9), generator=torch.Generator().manual_seed(0)).float()
    for ours, theirs in zip(_converted(sort, x)(x), sort(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("last", [1, 0])
def test_all_true_is_one_truth_value(last):
    all_true = module_class("AllTrue", lambda self, x: torch.ops.aten._is_all_true(x > 0))()
    x = torch.tensor([[1, 2], [3, last]])
    assert _converted(all_true, x)(x)[0].item() is bool(last)


def test_torch_has_its_own_table_again_outside_of_the_block():
    from torch.onnx._internal.exporter import _registration

    found = vars(_registration.ONNXRegistry)["from_torchlib"]
    with register_flattening_functions():
        assert vars(_registration.ONNXRegistry)["from_torchlib"] is not found
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is found
    with pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(torch.export.export(_ErfInv(), (torch.zeros(3),)), dynamo=True, verbose=False)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.exporters") is None, reason="transformers before 5.17 brings no translation"
)
def test_experts_are_converted_by_the_plain_function():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    ids = torch.randint(4, 32, (2, 5))
    with register_flattening_functions(patch_transformers=True), torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
    torch.testing.assert_close(converted(ids)[0], model(ids).logits, rtol=1e-4, atol=1e-5)


class Table:
    read = 0

    def __init__(self, opset):
        self.opset, self.functions = opset, {"aten::relu": ["a function"]}

    @classmethod
    def from_torchlib(cls, opset=18):
        cls.read += 1
        return cls(opset)


def made(cls, *args, **kwargs):
    return filled_registry(vars(Table)["from_torchlib"], cls, args, kwargs)


def test_a_table_is_read_once_for_each_opset_and_changes_stay_with_who_made_them():
    class Counted(Table):
        pass

    first = made(Counted)
    first.functions["aten::relu"].insert(0, "mine")
    first.functions["aten::tanh"] = ["mine"]
    assert made(Counted).functions == {"aten::relu": ["a function"]}
    assert Counted.read == 1
    assert [made(Counted, opset=23).opset, made(Counted, 23).opset, made(Counted).opset] == [23, 23, 18]
    assert Counted.read == 3
    library = torch.library.Library("yobx_flatten_test", "FRAGMENT")
    try:  # an operator that a library defines meanwhile
        library.define("defined_later(Tensor x) -> Tensor")
        made(Counted)
        made(Counted)
        assert Counted.read == 4
    finally:
        library._destroy()


def test_decompositions_are_those_of_the_exporter_and_read_again_only_when_there_is_another():
    from torch.onnx._internal.exporter._decomp import create_onnx_friendly_decomposition_table as original

    def described(table):
        return [(operator, getattr(function, "keywords", function)) for operator, function in table.items()]

    asked = []
    create, aten = (
        remembering_decompositions(lambda operators: asked.append(operators) or original(operators)),
        torch.ops.aten,
    )
    few, more = {aten.gelu.default}, {aten.gelu.default, aten.silu.default}
    expected = described(original(few))
    table = create(few)
    assert described(table) == expected
    del table[aten.silu.default]
    assert described(create(few)) == expected
    assert aten.silu.default not in create(more)
    assert asked == [few, more]
    asked = []
    create = remembering_decompositions(lambda operators: asked.append(operators) or {})
    library = torch.library.Library("yobx_flatten_test", "FRAGMENT")
    try:
        create(set())
        library.define("decomposed_later(Tensor x) -> Tensor")
        create(set())
        library.impl("decomposed_later", torch.neg, "CompositeImplicitAutograd")
        create(set())
        create(set())
        assert len(asked) == 3
        operator = torch.ops.yobx_flatten_test.decomposed_later.default
        torch._decomp.register_decomposition(operator)(lambda x: -x)
        create(set())
        assert len(asked) == 4
        del torch._decomp.decomposition_table[operator]
    finally:
        library._destroy()
