"""Weights in half precision: files may differ by what the type costs the model itself, and no wrong file passes."""

import copy
import dataclasses
import json
import shutil

import pytest
import torch
import transformers

from tests.modules import module_class, module_of
from yobx_flatten import Case, ReplayError, export_folder, export_onnx, export_program, prove_program, verify_folder
from yobx_flatten.export.onnx import attempts as onnx_attempts
from yobx_flatten.export.proof.report import Yardstick, explained
from yobx_flatten.export.runtimes import write as runtimes
from yobx_flatten.huggingface.cases import DecodeSizes, decode_inputs

pytestmark = pytest.mark.slow


def _llama(spread=0.3, layers=3):
    """Its scores are of size 20 to 40, as those of trained models are, so that half precision costs more than 6e-2."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=spread)).eval()
    with torch.no_grad():
        model.lm_head.weight *= 5
    return model.half()


def _swapped_heads(model):
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.q_proj.weight
        weight[:32] = weight[:32].roll(16, 0).clone()
    return model


def _no_scale(model):
    model.model.layers[1].self_attn.scaling = 1.0
    return model


def _hidden_position(model):
    """A mask that is off by one: no token sees the first one."""
    inner = model.model.forward

    def forward(*args, attention_mask=None, **others):
        seen = (torch.arange(attention_mask.shape[1]) > 0).long()
        return inner(*args, attention_mask=attention_mask * seen, **others)

    model.model.forward = forward
    return model


FAULTS = [_swapped_heads, _no_scale, _hidden_position]


@pytest.fixture(scope="module")
def model():
    return _llama()


def _written_of(monkeypatch, wrong, example):
    program = export_program(wrong, kwargs=example, proof="none").program
    convert = onnx_attempts.convert

    def converted(traced, *args, **options):
        return convert(dataclasses.replace(traced, program=program), *args, **options)

    monkeypatch.setattr(onnx_attempts, "convert", converted)


def test_what_the_type_costs_is_allowed_and_measuring_leaves_the_model_as_it_was(model, tmp_path):
    before = {name: (id(one), one.dtype, one._version) for name, one in model.named_parameters()}
    report = export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=tmp_path / "m.onnx").report
    assert {name: (id(one), one.dtype, one._version) for name, one in model.named_parameters()} == before
    assert report.operators.get("Attention") == 3
    wide = copy.deepcopy(model).float()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        cost = (model(input_ids=ids).logits.float() - wide(input_ids=ids).logits).abs().max().item()
    assert 0.3 * cost < report.yardstick.costs["logits"] < 30 * cost
    for case in report.cases:
        if case.runtime == "onnxruntime":
            assert case.allowed["logits"] == pytest.approx(min(5 * report.yardstick.costs["logits"], 4), rel=0.9)
            assert all(difference <= case.allowed[name] for name, difference in case.differences.items())
    assert "would change the model's own results by up to" in str(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_file_and_a_wrong_program_in_float16_are_refused(model, fault, tmp_path, monkeypatch):
    example = decode_inputs(model, DecodeSizes())
    report = prove_program(export_program(model, kwargs=example, proof="none").program, model).report
    assert report.yardstick.costs["logits"] > 1e-3
    wrong = fault(copy.deepcopy(model))
    with pytest.raises(ReplayError, match="differs from the eager model"):
        prove_program(export_program(wrong, kwargs=example, proof="none").program, model)
    _written_of(monkeypatch, wrong, example)
    with pytest.raises(ReplayError, match="differs from the eager model"):
        export_onnx(model, kwargs=example, path=tmp_path / "m.onnx")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_file_of_a_model_with_small_scores_is_refused(fault, tmp_path, monkeypatch):
    """Scores of 0.02, as new models have them: a fixed 6e-2 would allow any file."""
    small = _llama(spread=0.05)
    with torch.no_grad():
        small.lm_head.weight *= 0.005
    example = decode_inputs(small, DecodeSizes())
    assert small(**copy.deepcopy(example)).logits.abs().max() < 6e-2
    export_onnx(small, kwargs=example, path=tmp_path / "right.onnx")
    _written_of(monkeypatch, fault(copy.deepcopy(small)), example)
    with pytest.raises(ReplayError, match="differs from the eager model"):
        export_onnx(small, kwargs=example, path=tmp_path / "wrong.onnx")


@pytest.mark.parametrize(
    ("method", "writer", "suffix", "faults"),
    [
        ("to_openvino", "write_openvino", ".xml", FAULTS),
        ("to_aotinductor", "write_package", ".pt2", [_no_scale]),  # each is compiled, for a minute
    ],
)
def test_files_of_other_runtimes_have_the_same_yardstick(method, writer, suffix, faults, tmp_path, monkeypatch):
    if suffix == ".xml":
        pytest.importorskip("openvino")
    elif shutil.which("c++") is None:
        pytest.skip("no compiler")
    model = _llama(layers=2)
    example = decode_inputs(model, DecodeSizes())
    exported = export_program(model, kwargs=example, proof="sample")
    report = getattr(exported, method)(tmp_path / f"right{suffix}")
    assert report.yardstick is exported.report.yardstick
    for case in report.cases:
        assert case.allowed["logits"] > 1e-3
        assert all(difference <= case.allowed[name] for name, difference in case.differences.items())
    home = runtimes.openvino if "openvino" in writer else runtimes  # where the writer is called from
    write = getattr(home, writer)
    for fault in faults:
        program = export_program(fault(copy.deepcopy(model)), kwargs=example, proof="none").program

        def wrong(traced, *others, of=program, **options):
            return write(dataclasses.replace(traced, program=of), *others, **options)

        monkeypatch.setattr(home, writer, wrong)
        with pytest.raises(ReplayError, match="differs from the eager model"):
            getattr(exported, method)(tmp_path / f"{fault.__name__}{suffix}")


def test_scores_that_are_returned_in_float32_are_measured_too(model, tmp_path):
    """They are as rough as the float16 that they were computed in: a fixed 6e-2 refused them."""
    scores = lambda self, input_ids: self.inner(input_ids=input_ids, use_cache=False).logits.float()  # noqa: E731 # a forward
    upcast = module_of(scores, inner=model)
    ids = torch.randint(3, 150, (2, 9), generator=torch.Generator().manual_seed(0))
    assert max(export_onnx(upcast, (ids,), path=tmp_path / "m.onnx").report.yardstick.largest.values()) > 6e-2
    with pytest.raises(ReplayError, match=r"allowed 1\.0e-04"):  # a tolerance that is passed is the tolerance
        export_onnx(upcast, (ids,), path=tmp_path / "m.onnx", tolerance=1e-4)


def test_a_folder_in_float16_states_what_it_allows_and_a_stranger_cannot_state_more(model, tmp_path):
    folder = tmp_path / "folder"
    export_folder(model, folder)
    manifest = json.loads((folder / "yobx_flatten.json").read_text())
    stated = manifest["tolerances"]["model.onnx"]
    assert 6e-2 < stated["logits"] < 5
    assert verify_folder(folder).ok
    export_folder(_hidden_position(copy.deepcopy(model)), tmp_path / "wrong")
    (folder / "model.onnx").write_bytes((tmp_path / "wrong/model.onnx").read_bytes())
    manifest["tolerances"]["model.onnx"] = dict.fromkeys(stated, 1e9)
    (folder / "yobx_flatten.json").write_text(json.dumps(manifest))
    report = verify_folder(folder)
    assert not report.ok
    assert not all(check.ok for check in report.checks if check.file == "model.onnx")


def test_what_is_explained_is_bounded_by_the_output_and_float32_is_judged_by_float64():
    """A tenth of the range and five roundings of the largest element at least; a stated tolerance stays as it is."""
    values = torch.tensor([-20.0, 20.0], dtype=torch.float16)
    assert explained(1e9, values) == pytest.approx(4.0)
    assert explained(0.0, values) == pytest.approx(5 * 20 * torch.finfo(torch.float16).eps)
    assert explained(1.0, torch.tensor([torch.inf], dtype=torch.float16)) == 0.0
    assert explained(0.0, values.float()) == 1e-4
    module = module_class("Large", lambda self, x: {"sum": (x * self.weight).sum(-1)})()
    module.weight = torch.nn.Parameter(torch.full((64,), 1e4 / 3))
    x = {"x": torch.randn(9, 64, generator=torch.Generator().manual_seed(0))}
    report = export_program(module, (), x, cases=[]).report
    assert report.yardstick is None  # nothing differed, so nothing was measured
    case = Case("the example", (), x)
    with torch.no_grad():
        apart = module(**x)["sum"] - (x["x"].double() * module.weight.double()).sum(-1)
    cost, range_ = float(apart.abs().max()), float(torch.aminmax(module(**x)["sum"].detach())[1] * 2)
    allowed = Yardstick(module, (), is_half=False).allowed(case)["sum"]
    assert cost > 1e-4
    assert allowed == pytest.approx(min(5 * cost, 1e-5 * range_), rel=0.5)
    assert module.weight.dtype == torch.float32
    assert report.explained_by_float64(case) == {"sum": allowed}
    assert "float64 weights would change" in str(report)
    assert export_program(module, (), x, cases=[], tolerance=1e-6).report.explained_by_float64(case) is None
