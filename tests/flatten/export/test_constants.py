"""Numbers, texts and enums among the inputs and outputs of an export: the program holds them, the report says so."""

import dataclasses
import enum

import onnxruntime
import pytest
import torch

from yobx_flatten import check_inputs, export_onnx, export_program, pytree_dataclass, register_flattening_functions
from yobx_flatten.errors import ReplayError, SpecMismatchError
from yobx_flatten.export.calls import prove_program

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]])


class Mode(enum.Enum):
    MEAN = 1
    MAX = 2


class Parts(enum.Flag):
    LEFT = 1
    RIGHT = 2


class Step(enum.IntEnum):
    ONE = 1
    TWO = 2


class Sample(torch.nn.Module):
    def forward(self, x, temperature):
        return {"y": (x / temperature).softmax(-1)}


class Repeat(torch.nn.Module):
    def forward(self, x, options):
        return {"y": x * options["times"] if options["doubled"] else x, "z": x + len(options["text"])}


class Pool(torch.nn.Module):
    def forward(self, x, mode):
        return {"y": x.mean(-1) if mode is Mode.MEAN else x.amax(-1)}


class Nested(torch.nn.Module):
    def forward(self, x, options):
        assert isinstance(options["modes"][0], Mode)
        y = x.mean(-1) if options["modes"][0] is Mode.MEAN else x.amax(-1)
        return {"y": y if Parts.LEFT in options["parts"] else -y}


@pytree_dataclass
@dataclasses.dataclass
class Setting:
    weight: torch.Tensor
    scale: float = 2.0
    mode: Mode = dataclasses.field(default=Mode.MAX, metadata={"static": True})


class Scaled(torch.nn.Module):
    def forward(self, x, setting):
        y = x @ setting.weight * setting.scale
        return {"y": y.amax(-1) if setting.mode is Mode.MAX else y}


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (Sample(), {"temperature": 0.7}, ["temperature=0.7"]),
        (
            Repeat(),
            {"options": {"times": 3, "doubled": True, "text": "ab"}},
            ["options.times=3", "options.doubled=True", "options.text='ab'"],
        ),
        (Pool(), {"mode": Mode.MAX}, ["mode=Mode.MAX"]),
        (
            Nested(),
            {"options": {"modes": [Mode.MEAN], "parts": Parts.LEFT | Parts.RIGHT}},
            ["options.modes.0=Mode.MEAN", "options.parts=Parts.LEFT|RIGHT"],
        ),
        (Scaled(), {"setting": Setting(torch.ones(3, 2))}, ["setting.scale=2.0", "setting.mode=Mode.MAX"]),
    ],
    ids=["float", "dict", "enum", "nested", "dataclass"],
)
def test_the_report_names_each_number_text_and_enum_that_is_fixed(module, given, said, tmp_path):
    kwargs = {"x": X, **given}
    exported = export_onnx(module, kwargs=kwargs, path=tmp_path / "m.onnx")
    (note,) = [remark for remark in exported.report.remarks if "fixed in the program and the file" in remark]
    assert [value for value in said if value not in note] == []
    assert {case.runtime for case in exported.report.cases} == {"torch.export", "onnxruntime"}
    assert torch.equal(exported(**kwargs)["y"], module(**kwargs)["y"])


def test_none_and_tensors_are_not_noted():

    class Masked(torch.nn.Module):
        def forward(self, x, mask=None):
            return x if mask is None else x * mask

    report = export_program(Masked(), kwargs={"x": X, "mask": None}).report
    assert not any("fixed in the program and the file" in remark for remark in report.remarks)


@pytest.mark.parametrize(
    ("module", "given", "other", "message"),
    [
        (Sample(), {"temperature": 0.7}, {"temperature": torch.tensor(0.7)}, "passes a tensor of shape"),
        (Pool(), {"mode": Mode.MAX}, {"mode": Mode.MEAN}, r"was 'Mode\.MAX' .* passes 'Mode\.MEAN'"),
        (
            Repeat(),
            {"options": {"times": 3, "doubled": True, "text": "ab"}},
            {"options": {"times": 3, "doubled": True, "text": "no"}},
            r"kwargs\['options'\]\['text'\] was 'ab'",
        ),
    ],
    ids=["tensor", "enum", "text"],
)
def test_a_call_with_another_constant_is_refused(module, given, other, message):
    program = export_program(module, kwargs={"x": X, **given})
    with pytest.raises(SpecMismatchError, match=message):
        program(x=X, **other)


def test_a_constant_that_is_not_a_number_is_itself():
    """NaN is not equal to NaN, and still the same constant."""

    class Filled(torch.nn.Module):
        def forward(self, x, fill):
            return torch.where(x > 0, x, fill)

    with register_flattening_functions():
        program = torch.export.export(Filled(), (), {"x": X, "fill": float("inf")})
        assert torch.equal(program.module()(x=X, fill=float("inf")), Filled()(X, float("inf")))


def test_torch_export_takes_enums_inside_the_block(tmp_path):
    with register_flattening_functions():
        assert not check_inputs(Pool(), kwargs={"x": X, "mode": Mode.MEAN}).errors
        program = torch.export.export(Pool(), (X,), {"mode": Mode.MEAN})
        report = prove_program(program, Pool()).report
        torch.export.save(program, tmp_path / "pool.pt2")
        loaded = torch.export.load(tmp_path / "pool.pt2").module()
        found = loaded(X, mode=Mode.MEAN)["y"]
        with pytest.raises(SpecMismatchError, match=r"Mode\.MAX"):
            loaded(X, mode=Mode.MAX)
    assert report.ok
    assert torch.equal(found, X.mean(-1))


def test_members_of_an_enum_of_integers_stay_what_they_were():
    """Torch takes an IntEnum for the number that it is."""

    class Power(torch.nn.Module):
        def forward(self, x, step):
            return x**step

    program = export_program(Power(), kwargs={"x": X, "step": Step.TWO})
    assert torch.equal(program(x=X, step=Step.TWO), X**2)


@pytree_dataclass
@dataclasses.dataclass
class Result:
    y: torch.Tensor
    scale: float
    version: str


class AsClass(torch.nn.Module):
    def forward(self, x):
        return Result(x * 2.5, 2.5, "v1")


class AsDict(torch.nn.Module):
    def forward(self, x):
        return {"y": x * 2.5, "scale": 2.5, "exact": True, "none": None, "rows": 2}


class AsTuple(torch.nn.Module):
    def forward(self, x):
        return "v1", x * 2.5, 7


@pytest.mark.parametrize(
    ("module", "outputs", "said"),
    [
        (AsDict(), ["y"], ["scale=2.5", "exact=True", "rows=2"]),
        (AsTuple(), ["output.1"], ["output.0='v1'", "output.2=7"]),
        (AsClass(), ["y"], ["scale=2.5", "version='v1'"]),
    ],
    ids=["dict", "tuple", "dataclass"],
)
def test_a_file_returns_the_tensors_and_the_report_names_the_constants(module, outputs, said, tmp_path):
    """Torch's exporter ends in "'float' object has no attribute 'name'" for such a module."""
    path = tmp_path / "m.onnx"
    report = export_onnx(module, (X,), path=path).report
    (note,) = [remark for remark in report.remarks if "constant" in remark]
    assert [value for value in said if value not in note] == []
    assert "none" not in note
    assert report.output_names == outputs
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": X.numpy()})
    assert torch.equal(torch.from_numpy(found), X * 2.5)


def test_an_output_that_is_another_constant_in_a_call_is_an_error(tmp_path):
    """A number of Python that a module works out anew in each call is none that a program can return."""

    class Counted(torch.nn.Module):
        def forward(self, x):
            return {"y": x * 2, "share": 0.5 if torch.compiler.is_exporting() else 0.25}

    with pytest.raises(ReplayError, match=r"output 'share': the module returns 0\.25, but .* example, 0\.5"):
        export_onnx(Counted(), (X,), path=tmp_path / "m.onnx", proof="sample")
