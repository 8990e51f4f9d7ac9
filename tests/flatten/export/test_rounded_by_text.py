"""Files in few bits whose matrices were rounded by what they multiply on a text."""

import copy
import heapq
import statistics

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tests.flatten.export.trained_model import text_of, trained_model
from yobx_flatten import DecodeSizes, decode_inputs, export_onnx, register_flattening_functions
from yobx_flatten.export.onnx.file import UnprovenFile
from yobx_flatten.export.onnx.rounding import input_moments
from yobx_flatten.export.quantization import Quantization, from_the_start, text_cases
from yobx_flatten.runners.ports import CacheSlot, Port


def _text(module, rows: int) -> torch.Tensor:
    return text_of(module)[: rows * 96].reshape(rows, 96)


def _exported(path, dtype=torch.float32, **options):
    model = copy.deepcopy(trained_model()).to(dtype)
    inputs = decode_inputs(model, DecodeSizes(batch=2, past=5, new=3))
    return model, inputs, export_onnx(model, kwargs=inputs, path=path, cases=[], steps=2, **options)


def _divergence(path, tokens: torch.Tensor) -> float:
    """Mean divergence of the file's scores from the model's, in nats, without any code of ours."""
    session = onnxruntime.InferenceSession(path)
    feeds = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    for node in session.get_inputs():
        if node.name.startswith("past_key_values"):
            dtype = torch.float16 if node.type == "tensor(float16)" else torch.float32
            feeds[node.name] = torch.zeros(len(tokens), 2, 0, 32, dtype=dtype).numpy()
    found = torch.from_numpy(session.run(["logits"], feeds)[0]).double().log_softmax(-1)
    with torch.no_grad():
        wanted = trained_model()(input_ids=tokens).logits.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_the_moments_are_those_of_what_modules_receive(tmp_path):
    """Of each projection, over all tokens, each of one size: the first of a row, too, which calls have cached."""
    path = tmp_path / "m.onnx"
    model, inputs, _ = _exported(path)
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(module, given):
        seen.setdefault(id(module), []).append(given[0].detach().flatten(0, 1))

    tokens = _text(heapq, 5)
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_pre_hook(keep) for part in linears]
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    expected = [torch.cat(seen[id(part)]) for part in linears]
    assert {len(rows) for rows in expected} == {5 * 96}
    products = [node for node in ir.load(path).graph if node.op_type == "MatMul" and node.inputs[1].is_initializer()]
    sizes = {node.inputs[0].name: node.inputs[1].const_value.shape[0] for node in products}
    file = UnprovenFile(path, tmp_path)
    names = [node.name for node in ir.load(path).graph.inputs if not node.is_initializer()]
    calls = text_cases(model, inputs, tokens)
    with register_flattening_functions(patch_transformers=True):
        found = dict(input_moments(file, sizes, calls, names, tokens))
    assert len(found) == 2 * 4 + 1 == len(sizes)
    for rows in expected:
        rows = rows / rows.square().mean(1, keepdim=True).sqrt()
        wanted = rows.T @ rows / len(rows)
        near = [float((one - wanted).abs().max()) for one in found.values() if one.shape == wanted.shape]
        assert min(near) < 1e-4 * float(wanted.abs().max())
    assert [one.name for one in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("other", ["token_type_ids", "cache_position", "past_key_values.0.conv_states"])
def test_calls_with_other_inputs_are_not_read_from_the_start(other):
    """What they are for the first token is not known, so weights are rounded to nearest then."""
    tokens = torch.ones(2, 5, dtype=torch.int64)
    feeds = {"input_ids": tokens[:, 1:], "attention_mask": tokens}
    found = from_the_start(feeds, [], tokens)
    assert found is not None
    assert found["input_ids"] is tokens
    slots = [CacheSlot(Port(other, (None, 2, None), torch.float32), None)] if "." in other else []
    assert from_the_start({**feeds, other: tokens}, slots, tokens) is None


@pytest.mark.parametrize(("bits", "part"), [("int4", 0.6), ("int8", 0.8)])
def test_a_file_rounded_by_a_text_is_nearer_to_its_model(tmp_path, bits, part):
    how = {"activations": "float", "perplexity_ratio": 2.0}
    nearest = Quantization(bits, **how)
    by_text = Quantization(bits, **how, tokens=_text(heapq, 4), calibration=_text(statistics, 40))
    _exported(tmp_path / "nearest.onnx", quantize=nearest)
    *_, exported = _exported(tmp_path / "text.onnx", quantize=by_text)
    held_out = text_of(heapq)[4 * 96 : 12 * 96].reshape(8, 96)
    found = [_divergence(tmp_path / name, held_out) for name in ("text.onnx", "nearest.onnx")]
    assert found[0] < part * found[1]
    assert any("with a text" in remark for remark in exported.report.remarks)
    assert (tmp_path / "text.onnx").stat().st_size < 1.08 * (tmp_path / "nearest.onnx").stat().st_size


def test_weights_in_4_bits_multiply_in_half_precision(tmp_path):
    chosen = Quantization("int4", perplexity_ratio=2.0, tokens=_text(heapq, 4), calibration=_text(statistics, 40))
    held_out, found = text_of(heapq)[4 * 96 : 8 * 96].reshape(4, 96), {}
    for dtype in (torch.float16, torch.float32):
        path = tmp_path / f"{dtype}.onnx"
        _exported(path, dtype, quantize=chosen)
        found[dtype] = _divergence(path, held_out)
    assert found[torch.float16] < 1.2 * found[torch.float32]
    graph = onnx.load(tmp_path / "torch.float16.onnx").graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 7 + 1
    assert {types[node.input[2]] for node in products} == {onnx.TensorProto.FLOAT16}
