"""Folders in few bits: integers of a checkpoint, a calibration text, the quality, and tokens next to the model's."""

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import shutil

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import ByT5Tokenizer

from tests.flatten.export.trained_model import trained_model
from tests.flatten.model_folder.exported_folders import restate
from yobx_flatten import GenerationSettings, StoredCase, export_folder, load_case, open_model, verify_folder
from yobx_flatten.__main__ import main
from yobx_flatten.errors import InvalidArgumentError, ModelSourceError
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.source.find import find_model
from yobx_flatten.model_folder.texts import CHATS, chat_prompts, python_text
from yobx_flatten.model_folder.verify import count_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "out"
    done = export_folder(trained_model(), path, quantize="int4", optimize="onnxruntime")
    report = done.reports["model.onnx"]
    assert report.operators["GroupQueryAttention"] > 0
    assert report.quality.perplexity_ratio < 1.03
    assert report.quality.text_tokens == 8 * 126  # of a row, one token is in the cache, and one more is only read
    assert str(report.quality) in str(done)
    return path


def test_the_quality_is_measured_again_from_the_folder(folder):
    stored = json.loads((folder / "yobx_flatten.json").read_text(encoding="utf-8"))["quality"]["model.onnx"]
    report = verify_folder(folder)
    assert report.ok
    assert [check.file for check in report.checks] == ["model.onnx", "generate"]
    found = report.checks[0].quality
    assert found.perplexity == pytest.approx(stored["perplexity"], rel=1e-6)
    assert found.model_perplexity == pytest.approx(stored["model_perplexity"], rel=1e-6)
    assert found.weights == stored["weights"] == "int4"


@pytest.mark.slow  # the import of NNCF alone takes 3 seconds
def test_a_folder_for_openvino_is_measured_in_the_same_way(tmp_path):
    if importlib.util.find_spec("nncf") is None:
        pytest.skip("NNCF is not installed")
    done = export_folder(small_model("llama"), tmp_path / "out", target="openvino", quantize="int8")
    quality = done.reports["model.xml"].quality
    stored = json.loads((tmp_path / "out/yobx_flatten.json").read_text(encoding="utf-8"))
    assert (stored["runtime"], stored["quality"]["model.xml"]["weights"]) == ("openvino", "int8")
    assert quality.text_tokens == 8 * 126
    report = verify_folder(tmp_path / "out")
    assert report.ok
    assert [check.file for check in report.checks] == ["model.xml", "generate"]
    assert report.checks[0].quality.perplexity == pytest.approx(quality.perplexity, rel=1e-4)


def test_a_text_is_in_the_tokens_of_the_model(tmp_path):
    model = small_model("llama")
    assert python_text(model, None, 8).shape == (8, 128)
    model.config.max_position_embeddings = 40
    text = python_text(model, None, 3)
    assert text.shape == (3, 40)
    assert bytes((text[0, :20] - 3).tolist()) == b'"""Text wrapping and'
    model.config.vocab_size = 50
    assert python_text(model, None, 3) is None
    assert python_text(small_model("llama"), tmp_path, 3) is None  # no tokenizer there


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
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=draw)
    zeros = torch.randint(1, 2**bits - 2, (rows, columns // GROUP), generator=draw)
    scales = (torch.rand(rows, columns // GROUP, generator=draw) * 0.02 + 0.005).half()
    each = torch.arange(columns) // GROUP
    return numbers, zeros, scales, (numbers - zeros[:, each]).double() * scales[:, each].double()


def _awq_columns(table, bits):
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of eight columns, which one the n-th field holds
    return _packed(table.reshape(len(table), -1, 8)[..., order].flatten(1), bits)


# by method: what is stored of the integers, zero points and scales of a matrix
WRITERS = {
    "gptq": lambda numbers, zeros, scales, bits: {
        "qweight": _packed(numbers, bits).T,
        "qzeros": _packed((zeros - 1).T, bits),
        "scales": scales.T,
        "g_idx": (torch.arange(numbers.shape[1]) // GROUP).int(),
    },
    "awq": lambda numbers, zeros, scales, bits: {
        "qweight": _awq_columns(numbers.T, bits),
        "qzeros": _awq_columns(zeros.T, bits),
        "scales": scales.T,
    },
    "compressed-tensors": lambda numbers, zeros, scales, bits: {
        "weight_packed": _packed(numbers, bits),
        "weight_scale": scales,
        "weight_zero_point": _packed(zeros.T, bits).T,
        "weight_shape": torch.tensor(numbers.shape),
    },
    "torchao": lambda numbers, zeros, scales, bits: {
        "_weight_qdata": (numbers - 2 ** (bits - 1)).to(torch.int8),
        "_weight_zero_point": (zeros - 2 ** (bits - 1)).to(torch.int8),
        "_weight_scale": scales.float(),
    },
}


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


def _saved(folder, method, bits=4, stated=()):
    model = small_model("llama")
    held, full = {}, dict(model.state_dict())
    for number, (name, weight) in enumerate(list(full.items())):
        if not name.endswith("_proj.weight"):
            held[name] = weight
            continue
        *parts, expected = _drawn(*weight.shape, bits, number)
        for part, value in WRITERS[method](*parts, bits).items():
            held[f"{name.removesuffix('.weight')}.{part}"] = value.contiguous()
        full[name] = expected.float()
    model.load_state_dict(full)
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    restate(folder / "config.json", quantization_config=_stated(method, bits) | dict(stated))
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
        ("gptq", {"bits": 3}, "is quantized by gptq in 3 bits"),
        ("awq", {"version": "gemv"}, "is quantized by awq in 4 bits (gemv)"),
        ("compressed-tensors", {"format": "float-quantized"}, "is quantized by compressed-tensors (float-quantized)"),
        ("gptq", {"bits": 8}, "is damaged"),  # its integers are of 4
        ("torchao", {"quant_type": _of_torchao("Int8DynamicConfig")}, "is quantized by torchao (Int8DynamicConfig)"),
        ("torchao", {"quant_type": None}, "is quantized by torchao (in a form that its configuration does not name)"),
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
    assert torch.equal(packing.unpack(parts), expected.float())


PROMPTS = ["def heappush(heap, item):", "for index in range(len(values)):", "import statistics"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n")
    return file


def test_the_perplexity_is_that_of_the_prompts_whose_answers_are_kept(prompts, tmp_path):
    """Computed again by the model alone, of all tokens but the first two of the row; the card states it."""
    source, folder = tmp_path / "source", tmp_path / "out"
    trained_model().save_pretrained(source)
    ByT5Tokenizer(extra_ids=0).save_pretrained(source)
    assert main(["export", str(source), "-o", str(folder), "--quantize", "int8", "--calibration", str(prompts)]) == 0
    stated = json.loads((folder / "yobx_flatten.json").read_text())["quality"]["model.onnx"]
    ids = torch.tensor(ByT5Tokenizer(extra_ids=0)("\n".join(PROMPTS), add_special_tokens=False)["input_ids"])[None]
    with torch.no_grad():
        scores = trained_model()(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(scores[0, 1:-1], ids[0, 2:])
    assert stated["text_tokens"] == ids.shape[1] - 2
    assert stated["model_perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-3)
    case = load_case(folder / "cases/generate-chats.case")
    rows = [row[mask.bool()] for row, mask in zip(case.inputs["input_ids"], case.inputs["attention_mask"], strict=True)]
    assert [bytes(int(token) - 3 for token in row).decode() for row in rows] == PROMPTS
    card, ratio = (folder / "README.md").read_text(), stated["perplexity"] / stated["model_perplexity"]
    assert f"{ratio:.4f} of the model's" in card
    assert f"tokens of prompts.txt | {ratio:.4f}" in card
    assert f"{stated['text_divergence']:.4f} nats" in card
    assert "the same greedy token, 3 chats, " in card
    assert f"{(folder / 'model.onnx').stat().st_size / 1e6:.1f} MB, int8" in card


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": None}, "needs quantize="),
        ({"logits": "last"}, "or with logits"),
        ({"task": "feature-extraction"}, "is for models that generate text, not for feature-extraction"),
        ({"calibration": b"\n \n"}, "contains no prompts"),
        ({"calibration": b"\xff\xfe"}, "not a text in UTF-8"),
    ],
)
def test_a_text_that_measures_nothing_is_refused(prompts, tmp_path, options, message):
    model = small_model("bert").base_model if "task" in options else trained_model()
    if "calibration" in options:
        (tmp_path / "p.txt").write_bytes(options["calibration"])
        options = {"calibration": tmp_path / "p.txt"}
    with pytest.raises((InvalidArgumentError, ModelSourceError), match=message):
        export_folder(model, tmp_path / "out", **{"quantize": "int8", "calibration": prompts, **options})
    assert not (tmp_path / "out").exists()


FOLDER = os.environ.get("SMOLLM2_FOLDER", "")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="SMOLLM2_FOLDER names no folder; docs/guide/quantize.md has the package")
def test_smollm2_is_written_in_4_bits_by_default(tmp_path):
    """Rounded again it is 1.26 times as perplexed; these weights are integers already, those of the head in 8 bits."""
    done = export_folder(FOLDER, tmp_path / "out", quantize="int4", optimize="onnxruntime", proof="sample")
    report = done.reports["model.onnx"]
    assert done.verified.ok
    assert report.quality.perplexity_ratio <= 1.01
    assert report.onnx_bytes < 106e6
    assert pathlib.Path(tmp_path / "out/model.onnx").stat().st_size <= report.onnx_bytes
    (note,) = [remark for remark in report.remarks if remark.startswith("stored in int8")]
    assert "lm_head" in note


MODEL = torch.tensor([[7, 1, 2, 3, 0, 9], [7, 4, 5, 6, 4, 5]])  # a prompt of one token; 0 ends a row, 9 fills it
CLEAR, TIE = 5.0, 1e-5


@dataclasses.dataclass
class Fixed:
    tokens: torch.Tensor
    settings: GenerationSettings = dataclasses.field(default_factory=lambda: GenerationSettings(eos_token_ids=(0,)))

    def generate(self, input_ids, **_options):
        read = input_ids
        for place in range(1, self.tokens.shape[1]):
            scores = torch.nn.functional.one_hot(self.tokens[:, place], 10).float()
            for process in self.settings.processors:
                scores = process(read, scores)
            read = torch.cat([read, scores.argmax(-1)[:, None]], dim=1)
        return read


def _case(margins=None) -> StoredCase:
    outputs = {"sequences": MODEL, "new_tokens": 5} | ({} if margins is None else {"margins": margins})
    return StoredCase({"input_ids": MODEL[:, :1]}, outputs, "chat")


def _margins(**tied) -> torch.Tensor:
    margins = torch.full(MODEL.shape, CLEAR)
    margins[:, 0] = torch.inf
    for row, place in tied.values():
        margins[row, place] = TIE
    return margins


def test_tokens_that_differ_are_counted_and_excused_after_a_tie():
    found = torch.tensor([[7, 1, 3, 3, 0, 8], [7, 4, 5, 1, 1, 5]])
    count = count_tokens(Fixed(found), _case(_margins()), 1e-4)
    assert (count.tokens, count.different, count.excused, count.ok) == (9, 3, 0, False)
    assert str(count) == "3 of 9 tokens differ"
    count = count_tokens(Fixed(found), _case(_margins(one=(1, 3))), 1e-4)
    assert (count.different, count.excused, count.ok) == (3, 2, False)
    both = count_tokens(Fixed(found), _case(_margins(one=(1, 3), other=(0, 2))), 1e-4)
    assert (both.different, both.excused, both.ok) == (3, 3, True)
    assert str(both) == "3 of 9 tokens differ, 3 of them excused: after a tie of two scores within float rounding"
    assert count_tokens(Fixed(found), _case(), 1e-4).ok is False  # a case without margins excuses nothing
    assert count_tokens(Fixed(MODEL), _case(), 1e-4).ok is True


@pytest.mark.parametrize(("wrong", "ok"), [(2, True), (3, False)])
def test_rounded_weights_are_judged_by_the_share_that_agrees_after_the_same_text(wrong, ok):
    found = MODEL.clone()
    found[1, 1 : 1 + wrong] = 8
    count = count_tokens(Fixed(found), _case(_margins()), 1e-4, 0.75)
    assert count.agreed == pytest.approx((9 - wrong) / 9)
    assert count.ok is ok
    assert f"{wrong} of 9 tokens differ after the model's own text: " in str(count)
    early = count_tokens(Fixed(MODEL[:, :4]), _case(_margins()), 1e-4, 0.75)  # it ends before the model does
    assert (early.different, early.ok) == (3, False)


def test_the_stated_count_is_that_of_one_call_for_the_whole_text(folder):
    """Next to the text of model.generate itself, which the file reads in one call, and not what the folder stored."""
    case = load_case(folder / "cases/generate.case")
    with torch.no_grad():
        expected = trained_model().generate(**case.inputs, max_new_tokens=40, do_sample=False)
    mask = torch.cat([case.inputs["attention_mask"], torch.ones(len(expected), 40).long()], 1)
    scores = open_model(folder)(input_ids=expected, attention_mask=mask).logits
    (check,) = [check for check in verify_folder(folder).checks if check.file == "generate"]
    assert check.ok
    differs = scores[:, 8:-1].argmax(-1) != expected[:, 9:]
    assert check.difference == check.tokens.different == int(differs.sum())
    assert check.tokens.tokens == expected[:, 9:].numel()
    assert "agree, at least 40% have to" in " ".join(check.cells())


@pytest.mark.parametrize("broken", ["a matrix of zeros", "scales of other rows"])
def test_a_broken_file_fails_where_it_generates(folder, tmp_path, broken):
    """A head whose scales are zero, or whose bits and zero points are those of the next row: the structure is right."""
    path = tmp_path / "broken"
    shutil.copytree(folder, path)
    model = onnx.load(path / "model.onnx")
    parts = {tensor.name: tensor for tensor in model.graph.initializer}
    bits, scales, points = ([n.input for n in model.graph.node if n.op_type == "MatMulNBits"][-1])[1:4]
    for name in (scales,) if broken == "a matrix of zeros" else (bits, points):
        values = numpy_helper.to_array(parts[name])
        size = len(values) // 259  # of a row, where all of them are in one axis
        made = 0 * values if broken == "a matrix of zeros" else numpy.roll(values, size, axis=0)
        parts[name].CopyFrom(numpy_helper.from_array(made, name))
    onnx.save(model, path / "model.onnx")
    checks = {check.file: check for check in verify_folder(path).checks}
    assert not checks["model.onnx"].ok
    assert checks["model.onnx"].quality.perplexity_ratio > 1.1
    assert not checks["generate"].ok
    assert checks["generate"].tokens.agreed < 0.4


def _tokenizer(place, template="{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}\n"):
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(place)
    return tokenizer


def test_chats_are_prompts_in_the_template_of_the_tokenizer(tmp_path):
    tokenizer, model = _tokenizer(tmp_path / "chat"), small_model("llama")
    model.config.max_position_embeddings = 512
    prompts = chat_prompts(model, tmp_path / "chat", 2)
    row, mask = prompts["input_ids"][0], prompts["attention_mask"][0]
    assert tokenizer.decode(row[mask.bool()]).strip() == "<user>What is the capital of France?"
    assert mask.tolist() == sorted(mask.tolist())
    assert chat_prompts(model, None, 2) is None
    _tokenizer(tmp_path / "plain", None)
    assert chat_prompts(model, tmp_path / "plain", 2) is None
    _tokenizer(tmp_path / "faulty", "{{ raise_exception('no users') }}")
    assert chat_prompts(model, tmp_path / "faulty", 2) is None
    model.config.max_position_embeddings = 60
    assert chat_prompts(model, tmp_path / "chat", 2) is None


@pytest.mark.slow  # exports a model, and generates 500 tokens
def test_a_quantised_folder_with_a_template_is_compared_with_chats_of_the_model(tmp_path):
    model = trained_model()
    _tokenizer(tmp_path / "source")
    before = model.config.max_position_embeddings
    model.config.max_position_embeddings = max(before, 512)
    try:
        done = export_folder(model, tmp_path / "out", quantize="int8", source=tmp_path / "source")
    finally:
        model.config.max_position_embeddings = before
    assert (tmp_path / "out" / CHATS).exists()
    (check,) = [check for check in done.verified.checks if "chats" in check.case]
    assert check.ok
    assert check.tokens.tokens == 10 * 50
    assert check.tokens.allowed == 0.9
