"""The file of an export: it takes its name when it is proven, and holds what was asked for."""

import onnx
import onnxruntime
import pytest
import torch

from tests.cases import cases
from tests.models import make_model
from yobx_flatten import DecodeSizes, InvalidArgumentError, ReplayError, decode_inputs, export_onnx

pytestmark = pytest.mark.slow


class Drifts(torch.nn.Module):
    """Eagerly adds what a trace does not see."""

    def forward(self, x):
        return x + (0.0 if torch.compiler.is_exporting() else 0.5)


class Twice(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 2}


def _run(path, **feeds):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([given.name for given in session.get_outputs()], session.run(None, feeds), strict=True))


# -- what stands under the name --------------------------------------------------------------------------------------


def test_a_file_that_failed_its_proof_does_not_replace_one_that_did_not(tmp_path):
    path = tmp_path / "a.onnx"
    path.write_bytes(b"the old one")
    with pytest.raises(ReplayError, match=r'(?s)Nothing was written to .*a\.onnx\. To look .* keep_failed="a folder"'):
        export_onnx(Drifts(), (torch.ones(2, 3),), path=path, cases=[])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.onnx"]
    assert path.read_bytes() == b"the old one"


def test_a_file_that_failed_is_kept_where_it_is_asked_for(tmp_path):
    path, failed = tmp_path / "a.onnx", tmp_path / "failed"
    with pytest.raises(ReplayError, match=r"The file that failed is .*failed.a\.onnx") as caught:
        export_onnx(Drifts(), (torch.ones(2, 3),), path=path, cases=[], keep_failed=failed)
    assert caught.value.report.max_difference == 0.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["failed"]
    assert _run(failed / "a.onnx", x=torch.ones(2, 3).numpy())["output"].tolist() == [[1.0] * 3] * 2


def test_a_failed_file_is_not_kept_where_it_would_replace_the_good_one(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"keep_failed=.* is the folder of the file itself"):
        export_onnx(Twice(), (torch.ones(2, 3),), path=tmp_path / "a.onnx", keep_failed=tmp_path)


@pytest.mark.parametrize(("refers", "left"), [(True, ["a.onnx"]), (False, ["a.onnx", "a.onnx.data"])])
def test_weights_beside_an_older_file_go_with_it(refers, left, tmp_path):
    """If the older file refers to them; a file of that name that is somebody else's stays."""
    path = tmp_path / "a.onnx"
    export_onnx(torch.nn.Linear(64, 64), (torch.ones(2, 64),), path=path, cases=[])
    if refers:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="a.onnx.data", size_threshold=0)
    else:
        (tmp_path / "a.onnx.data").write_text("mine")
    assert (tmp_path / "a.onnx.data").is_file()
    export_onnx(Twice(), (torch.ones(2, 3),), path=path, cases=[])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left
    assert _run(path, x=torch.ones(2, 3).numpy())["y"].tolist() == [[2.0] * 3] * 2


# -- what is in it ---------------------------------------------------------------------------------------------------


def test_outputs_may_be_called_like_nodes_and_parameters(tmp_path):
    """An ONNX graph has one namespace for all values (https://github.com/pytorch/pytorch/issues/165758)."""

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

        def forward(self, x):
            return {"sigmoid": torch.relu(x).sigmoid(), "relu": x.tanh() + self.weight, "weight": x * self.weight}

    x = torch.tensor([[-1.0, 0.5, 2.0], [1.0, -3.0, 0.0]])
    export_onnx(Named(), (x,), path=tmp_path / "named.onnx", cases=[])
    onnx.checker.check_model(tmp_path / "named.onnx")
    found = _run(tmp_path / "named.onnx", x=x.numpy())
    weight = torch.tensor([1.0, -2.0, 3.0])
    expected = {"sigmoid": x.clamp(min=0).sigmoid(), "relu": x.tanh() + weight, "weight": x * weight}
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), value)


@pytest.mark.parametrize("opset", cases([20, 23], quick=[20]))
def test_a_decode_call_of_several_rows_holds_in_every_opset(opset, tmp_path):
    """In 23 the exporter makes RotaryEmbedding of cosines with one row, which onnxruntime refuses for two."""
    model = make_model("llama")
    exported = export_onnx(
        model, kwargs=decode_inputs(model, DecodeSizes()), path=tmp_path / "a.onnx", opset_version=opset
    )
    assert exported.report.max_difference < 1e-4
    model_file = onnx.load(exported.path)
    assert [entry.version for entry in model_file.opset_import if entry.domain == ""] == [opset]
    onnx.checker.check_model(model_file)


@pytest.mark.parametrize("opset", [9, 16, 17, "18", 18.0, True])
def test_an_opset_below_the_first_of_the_exporter_is_refused_before_the_trace(opset, tmp_path, caplog, capfd):
    """torch would write another one, and log tracebacks of its converters."""

    class Untraceable(torch.nn.Module):
        def forward(self, x):
            raise AssertionError("traced")

    with pytest.raises(InvalidArgumentError, match="opset_version: expected None or an int of 18 or more"):
        export_onnx(Untraceable(), (torch.ones(2, 4),), path=tmp_path / "a.onnx", opset_version=opset)
    assert list(tmp_path.iterdir()) == []
    assert [record.name for record in caplog.records if "onnx" in record.name] == []
    assert "Traceback" not in "".join(capfd.readouterr())


# -- types of numbers ------------------------------------------------------------------------------------------------


def test_a_type_without_kernels_is_an_error_that_says_so(tmp_path):
    """https://github.com/pytorch/pytorch/issues/143643; the file can be kept for another provider."""
    module = torch.nn.Linear(3, 4).bfloat16()
    with pytest.raises(ReplayError, match=r"(?s)onnxruntime lacks kernels for bfloat16 on the CPU.*failed.a\.onnx"):
        export_onnx(
            module,
            (torch.ones(2, 3, dtype=torch.bfloat16),),
            path=tmp_path / "a.onnx",
            cases=[],
            keep_failed=tmp_path / "failed",
        )
    assert not (tmp_path / "a.onnx").exists()
    kept = onnx.load(tmp_path / "failed" / "a.onnx").graph
    assert kept.input[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16


def test_half_precision_is_compared_as_half_precision(tmp_path):
    model = make_model("llama")
    half = type(model)(model.config).eval()
    half.load_state_dict(model.state_dict())
    half = half.half()
    report = export_onnx(half, kwargs=decode_inputs(half, DecodeSizes()), path=tmp_path / "a.onnx", cases=[]).report
    assert report.tolerance == 6e-2
    assert export_onnx(Twice(), (torch.ones(2, 3),), path=tmp_path / "b.onnx", cases=[]).report.tolerance == 1e-4


def test_complex_numbers_are_pairs_in_the_file(tmp_path):
    """onnxruntime has no complex numbers; the replay takes them apart and together."""

    class Turn(torch.nn.Module):
        def forward(self, z):
            return {"turned": z * 1j, "size": z.abs()}

    z = torch.tensor([[1 + 2j, 3j], [-1.0, 2 - 2j]])
    report = export_onnx(Turn(), (z,), path=tmp_path / "a.onnx", cases=[]).report
    assert report.cases[-1].differences.keys() == {"turned", "size"}
    found = _run(tmp_path / "a.onnx", z=torch.view_as_real(z).numpy())
    assert found["turned"][0].tolist() == [[-2.0, 1.0], [-3.0, 0.0]]
    assert found["size"][0, 1] == 3.0


def test_8_bit_floats_go_in_and_come_out(tmp_path):
    """NumPy has no such type (https://github.com/pytorch/pytorch/issues/106877)."""

    class Cast(torch.nn.Module):
        def forward(self, x):
            return {"wide": x.to(torch.float32) * 3, "narrow": (x.to(torch.float32) * 3).to(torch.float8_e5m2)}

    x = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, 7.0]]).to(torch.float8_e4m3fn)
    report = export_onnx(Cast(), (x,), path=tmp_path / "a.onnx", cases=[], opset_version=20).report
    assert [case.runtime for case in report.cases] == ["torch.export", "onnxruntime"]
    assert report.cases[-1].differences == {"wide": 0.0, "narrow": 0.0}
