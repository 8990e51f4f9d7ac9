"""Numbers, texts, enums and the static part of a program, and arguments that `forward` takes in its ``**kwargs``."""

import dataclasses
import enum
import inspect
from typing import Any

import onnxruntime
import pytest
import torch
from torch.export import Dim

from tests.models import make_model
from tests.modules import module_class, module_of
from yobx_flatten import Case, DecodeSizes, check_inputs, decode_inputs, export_onnx, export_program, prove_program
from yobx_flatten.declare import pytree_dataclass, register, register_class_flattening, unregister_class_flattening
from yobx_flatten.declare.scopes import register_flattening_functions
from yobx_flatten.errors import InvalidArgumentError, ReplayError, SpecMismatchError

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


Sample = module_class("Sample", lambda self, x, temperature: {"y": (x / temperature).softmax(-1)})


def _repeat(self, x, options):
    return {"y": x * options["times"] if options["doubled"] else x, "z": x + len(options["text"])}


Pool = module_class("Pool", lambda self, x, mode: {"y": x.mean(-1) if mode is Mode.MEAN else x.amax(-1)})


def _nested(self, x, options):
    assert isinstance(options["modes"][0], Mode)
    y = x.mean(-1) if options["modes"][0] is Mode.MEAN else x.amax(-1)
    return {"y": y if Parts.LEFT in options["parts"] else -y}


@pytree_dataclass
@dataclasses.dataclass
class Setting:
    weight: torch.Tensor
    scale: float = 2.0
    mode: Mode = dataclasses.field(default=Mode.MAX, metadata={"static": True})


def _scaled(self, x, setting):
    y = x @ setting.weight * setting.scale
    return {"y": y.amax(-1) if setting.mode is Mode.MAX else y}


OPTIONS = {"options": {"times": 3, "doubled": True, "text": "ab"}}


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (Sample(), {"temperature": 0.7}, ["temperature=0.7"]),
        (module_of(_repeat), OPTIONS, ["options.times=3", "options.doubled=True", "options.text='ab'"]),
        (Pool(), {"mode": Mode.MAX}, ["mode=Mode.MAX"]),
        (
            module_of(_nested),
            {"options": {"modes": [Mode.MEAN], "parts": Parts.LEFT | Parts.RIGHT}},
            ["options.modes.0=Mode.MEAN", "options.parts=Parts.LEFT|RIGHT"],
        ),
        (module_of(_scaled), {"setting": Setting(torch.ones(3, 2))}, ["setting.scale=2.0", "setting.mode=Mode.MAX"]),
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


@pytest.mark.parametrize(
    ("module", "given", "other", "message"),
    [
        (Sample(), {"temperature": 0.7}, {"temperature": torch.tensor(0.7)}, "passes a tensor of shape"),
        (Pool(), {"mode": Mode.MAX}, {"mode": Mode.MEAN}, r"was 'Mode\.MAX' .* passes 'Mode\.MEAN'"),
        (
            module_of(_repeat),
            OPTIONS,
            {"options": {**OPTIONS["options"], "text": "no"}},
            r"kwargs\['options'\]\['text'\] was 'ab'",
        ),
    ],
    ids=["tensor", "enum", "text"],
)
def test_a_call_with_another_constant_is_refused(module, given, other, message):
    program = export_program(module, kwargs={"x": X, **given})
    with pytest.raises(SpecMismatchError, match=message):
        program(x=X, **other)


def test_infinity_is_itself_and_none_is_not_noted():
    filled = module_class("Filled", lambda self, x, fill, mask=None: torch.where(x > 0, x, fill))()
    with register_flattening_functions():
        program = torch.export.export(filled, (), {"x": X, "fill": float("inf")})
        assert torch.equal(program.module()(x=X, fill=float("inf")), filled(X, float("inf")))
    report = export_program(filled, kwargs={"x": X, "fill": X, "mask": None}).report
    assert not any("fixed in the program and the file" in remark for remark in report.remarks)


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
    power = module_class("Power", lambda self, x, step: x**step)()
    program = export_program(power, kwargs={"x": X, "step": Step.TWO})
    assert torch.equal(program(x=X, step=Step.TWO), X**2)


@pytree_dataclass
@dataclasses.dataclass
class Result:
    y: torch.Tensor
    scale: float
    version: str


AsClass = module_class("AsClass", lambda self, x: Result(x * 2.5, 2.5, "v1"))
AsDict = module_class("AsDict", lambda self, x: {"y": x * 2.5, "scale": 2.5, "exact": True, "none": None, "rows": 2})
AsTuple = module_class("AsTuple", lambda self, x: ("v1", x * 2.5, 7))


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

    def counted(self, x):
        return {"y": x * 2, "share": 0.5 if torch.compiler.is_exporting() else 0.25}

    with pytest.raises(ReplayError, match=r"output 'share': the module returns 0\.25, but .* example, 0\.5"):
        export_onnx(module_of(counted), (X,), path=tmp_path / "m.onnx", proof="sample")


X_ONES = torch.ones(2, 3)


@dataclasses.dataclass
class Options:
    scale: float


class Named:
    def __init__(self, x, names) -> None:
        self.x, self.names = x, names


@dataclasses.dataclass
class Listed:
    x: Any
    names: list = dataclasses.field(default_factory=list, metadata={"static": True})


class Counts(torch.nn.Module):
    def forward(self, named):
        return named.x * (len(named.names) if isinstance(named.names, list) else named.names.scale), named


@pytest.fixture(autouse=True)
def registered():
    register_class_flattening(Named, lambda o: ([o.x], o.names), lambda children, names: Named(*children, names), None)
    register(Listed)
    yield
    for cls in (Named, Listed):
        unregister_class_flattening(cls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: Listed(X_ONES, ["a"]), lambda: Named(X_ONES, ["a"]), lambda: Named(X_ONES, Options(1.0))]
)
def test_a_change_after_the_export_is_refused(make):
    given = make()
    exported = export_program(Counts(), (given,), cases=[])
    plain = torch.export.export(Counts(), (given,)).module()
    if isinstance(given.names, list):
        given.names.append("b")
    else:
        given.names.scale = 2.0
    assert torch.equal(Counts()(given)[0], 2 * X_ONES)
    for program in (exported, plain) if isinstance(given, Listed) else (exported,):
        with pytest.raises(ValueError, match="input tree spec"):
            program(given)


@pytest.mark.slow
def test_what_a_program_returns_is_the_callers_own_and_a_sentinel_stays_the_one_that_everybody_uses():
    """A copy of it would equal no input."""
    exported = export_program(Counts(), (Listed(X_ONES, ["a"]),), cases=[])
    first = exported(Listed(X_ONES, ["a"]))[1]
    first.names.append("b")
    assert exported(Listed(X_ONES, ["a"]))[1].names == ["a"]
    missing = object()  # equals nothing else
    with register_flattening_functions():
        module = torch.export.export(Counts(), (Named(X_ONES, [missing]),)).module()
    assert torch.equal(module(Named(X_ONES, [missing]))[0], X_ONES)


ROWS = {0: Dim.AUTO}


class Keeps(torch.nn.Module):
    def forward(self, x, **kwargs):
        more = kwargs.get("more")
        return x * 2 if more is None else x * 2 + more


def _other() -> list[Case]:
    return [Case("five rows", (), {"x": torch.ones(5, 3), "more": torch.ones(5, 3)})]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [
        "auto",
        {"x": ROWS, "more": ROWS},
        {"x": ROWS, "kwargs": {"more": ROWS}},
        {"x": ROWS, "**kwargs": {"more": ROWS}},
        None,
    ],
    ids=["auto", "given", "by its parameter", "as torch 2.15 calls it", "fixed"],
)
def test_they_vary_like_the_others(shapes):
    """torch.export alone takes fixed sizes only."""
    module = Keeps()
    cases = [] if shapes is None else _other()
    exported = export_program(module, (), {"x": X_ONES, "more": X_ONES}, dynamic_shapes=shapes, cases=cases)
    assert exported.report.ok
    assert torch.equal(exported(x=X_ONES, more=X_ONES), torch.full((2, 3), 3.0))
    assert "forward" not in vars(module)
    assert list(inspect.signature(module.forward).parameters) == ["x", "kwargs"]


@pytest.mark.slow
def test_so_they_do_with_dynamo_and_in_an_onnx_file(tmp_path):
    given = {"x": X_ONES, "more": X_ONES}
    assert export_program(Keeps(), (), given, strict=True, cases=_other()).report.ok
    report = export_onnx(Keeps(), (), given, path=tmp_path / "keeps.onnx", cases=_other()).report
    assert report.input_names == ["x", "more"]


@pytest.mark.slow
def test_transformers_reads_some_there():
    """Its models have no parameter for hidden states, and return them."""
    model = make_model("llama")
    report = export_program(model, (), {**decode_inputs(model, DecodeSizes()), "output_hidden_states": True}).report
    assert report.ok
    assert "hidden_states.0" in report.output_names


@pytest.mark.slow
def test_an_argument_that_is_not_read_is_refused_before_the_trace():
    reads = r"reads no such name from its \*\*kwargs\. Its parameters are x\. Did you mean 'x'\?"
    with pytest.raises(InvalidArgumentError, match=reads):
        export_program(Keeps(), (), {"x": X_ONES, "xs": X_ONES}, cases=[])
    model = make_model("llama")
    with pytest.raises(InvalidArgumentError, match=r"no parameter 'use_cahce'.* Did you mean 'use_cache'\?"):
        export_program(model, (), {**decode_inputs(model, DecodeSizes()), "use_cahce": False})
