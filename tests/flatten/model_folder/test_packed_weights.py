"""Checkpoints of GPTQ, AWQ, compressed-tensors and torchao: their integers, by their formulas and in the files."""

import copy
import json

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from yobx_flatten import export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model

GROUP = 16


def _packed(fields, bits):
    """Integers of 32 bits of fields along the last axis, the first in the lowest bits; written as they are defined."""
    rows, columns = fields.shape
    count = 32 // bits
    made = torch.zeros(rows, columns // count, dtype=torch.int64)
    for place in range(columns):
        made[:, place // count] += fields[:, place].long() << (bits * (place % count))
    return torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)


def _drawn(rows, columns, bits, seed):
    """Numbers of shape (rows, columns), zeros and scales of shape (rows, groups), and the weights they stand for."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=draw)
    zeros = torch.randint(1, 2**bits - 2, (rows, columns // GROUP), generator=draw)
    scales = (torch.rand(rows, columns // GROUP, generator=draw) * 0.02 + 0.005).half()
    each = torch.arange(columns) // GROUP
    return numbers, zeros, scales, (numbers - zeros[:, each]).double() * scales[:, each].double()


def _gptq(layer, weight, bits, seed):
    numbers, zeros, scales, expected = _drawn(*weight.shape, bits, seed)
    made = {
        "qweight": _packed(numbers, bits).T,
        "qzeros": _packed((zeros - 1).T, bits),
        "scales": scales.T,
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return {f"{layer}.{name}": value.contiguous() for name, value in made.items()}, expected


def _awq(layer, weight, bits, seed):
    numbers, zeros, scales, expected = _drawn(*weight.shape, bits, seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight columns, which one the n-th field holds

    def columns(table):
        return _packed(table.reshape(len(table), -1, 8)[..., order].flatten(1), bits)

    made = {"qweight": columns(numbers.T), "qzeros": columns(zeros.T), "scales": scales.T}
    return {f"{layer}.{name}": value.contiguous() for name, value in made.items()}, expected


def _compressed(layer, weight, bits, seed):
    numbers, zeros, scales, expected = _drawn(*weight.shape, bits, seed)
    made = {
        "weight_packed": _packed(numbers, bits),
        "weight_scale": scales,
        "weight_zero_point": _packed(zeros.T, bits).T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return {f"{layer}.{name}": value.contiguous() for name, value in made.items()}, expected


def _torchao(layer, weight, bits, seed):
    """As `save_pretrained` writes an `IntxUnpackedToInt8Tensor`: numbers around 0, one in each byte."""
    numbers, zeros, scales, expected = _drawn(*weight.shape, bits, seed)
    half = 2 ** (bits - 1)
    made = {
        "_weight_qdata": (numbers - half).to(torch.int8),
        "_weight_zero_point": (zeros - half).to(torch.int8),
        "_weight_scale": scales.float(),
    }
    return {f"{layer}.{name}": value.contiguous() for name, value in made.items()}, expected


def _of_torchao(kind):
    return {"default": {"_type": kind, "_version": 2, "_data": {"granularity": {"_type": "PerGroup"}}}}


def _stated(method, bits):
    kind = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
    return {
        "gptq": {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False},
        "awq": {"quant_method": "awq", "bits": bits, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": kind}},
        },
        "torchao": {"quant_method": "torchao", "quant_type": _of_torchao("IntxWeightOnlyConfig")},
    }[method]


WRITERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "torchao": _torchao}


def _saved(folder, method, bits=4, stated=()):
    """A small Llama of integers, and the same model in full: of weights in float64 that are rounded once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = copy.deepcopy(small_model("llama"))
    held, full = {}, dict(model.state_dict())
    for number, (name, weight) in enumerate(list(full.items())):
        if not name.endswith("_proj.weight"):
            held[name] = weight
            continue
        stored, expected = WRITERS[method](name.removesuffix(".weight"), weight, bits, number)
        held |= stored
        full[name] = expected.float()
    model.load_state_dict(full)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _stated(method, bits) | dict(stated)
    (folder / "config.json").write_text(json.dumps(config))
    tied = {name: value.clone() for name, value in held.items() if name != "lm_head.weight" or name in full}
    save_file(tied, folder / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("method", "bits"),
    [("gptq", 4), ("gptq", 8), ("awq", 4), ("compressed-tensors", 4), ("torchao", 4), ("torchao", 8)],
)
def test_weights_are_those_that_the_integers_stand_for(tmp_path, method, bits):
    expected = _saved(tmp_path / "held", method, bits)
    model = find_model(str(tmp_path / "held")).load()
    found = model.state_dict()
    assert set(found) == set(expected.state_dict())
    for name, weight in expected.state_dict().items():
        assert torch.equal(found[name], weight), name
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("method", WRITERS)
def test_the_folder_holds_the_same_integers(tmp_path, method):
    _saved(tmp_path / "held", method)
    done = export_folder(tmp_path / "held", tmp_path / "out")
    assert done.verified.ok
    assert done.reports["model.onnx"].quality.weights == "keep"
    graph = onnx.load(tmp_path / "out/model.onnx").graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 14
    assert {a.i for node in products for a in node.attribute if a.name == "block_size"} == {GROUP}
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_inputs_in_another_order_are_read(tmp_path):
    """GPTQ can order the inputs by their activation: `g_idx` states the group of each."""
    _saved(tmp_path, "gptq", stated={"desc_act": True})
    before = find_model(str(tmp_path)).load().state_dict()
    held = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    groups = held[f"{name}.g_idx"]
    held[f"{name}.g_idx"] = groups.flip(0).contiguous()
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    after = find_model(str(tmp_path)).load().state_dict()[f"{name}.weight"]
    scales, zeros = held[f"{name}.scales"].float(), held[f"{name}.qzeros"]
    zero = torch.stack([(zeros >> (4 * n)) & 15 for n in range(8)], -1).flatten(1) + 1
    numbers = before[f"{name}.weight"].T / scales[groups.long()] + zero[groups.long()]
    turned = groups.flip(0).long()
    assert torch.allclose(after.T, (numbers.round() - zero[turned]) * scales[turned], atol=1e-6)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {"bits": 3}, "is quantised by gptq in 3 bits"),
        ("awq", {"version": "gemv"}, "is quantised by awq in 4 bits (gemv)"),
        ("compressed-tensors", {"format": "float-quantized"}, "is quantised by compressed-tensors (float-quantized)"),
        ("gptq", {"bits": 8}, "is damaged"),  # its integers are of 4
        (
            "torchao",
            {"quant_type": _of_torchao("Int8DynamicActivationInt8WeightConfig")},
            "is quantised by torchao (Int8DynamicActivationInt8WeightConfig)",
        ),
        ("torchao", {"quant_type": None}, "is quantised by torchao (in a form that its configuration does not name)"),
    ],
)
def test_another_form_is_refused_in_one_line(tmp_path, capsys, method, changes, message):
    _saved(tmp_path / "held", method, stated=changes)
    capsys.readouterr()  # bars of save_pretrained
    assert main(["export", str(tmp_path / "held"), "-o", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_library_compressed_tensors_packs_as_is_read(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 2 ** (bits - 1)
    numbers, zeros, scales, expected = _drawn(32, 64, bits, 0)
    parts = {
        "weight_packed": helpers.pack_to_int32((numbers - half).to(torch.int8), bits),
        "weight_zero_point": helpers.pack_to_int32((zeros - half).to(torch.int8), bits, packed_dim=0),
        "weight_scale": scales,
        "weight_shape": torch.tensor([32, 64]),
    }
    from yobx_flatten.model_folder.source.packed_weights import _compressed as reader

    packing = reader(_stated("compressed-tensors", bits))
    assert torch.equal(packing.unpack(parts, bits), expected.float())
