"""What an export refuses or does without: errors name the case, the line of the module, and what was not equal."""

from __future__ import annotations

import dataclasses
import math
import traceback
from typing import Any

import accelerate
import onnxruntime
import onnxscript
import pytest
import torch
from torch.export import Dim

from tests.modules import Answers, module_class, module_of
from yobx_flatten import DynamicShapesError, InvalidArgumentError, NotRegisteredError, ReplayError, StaticDataError
from yobx_flatten.core.compare import share_of_nan
from yobx_flatten.declare import register, register_class_flattening, unregister_class_flattening
from yobx_flatten.diagnose import check_inputs, explain_error
from yobx_flatten.export import Case, export_onnx, export_program
from yobx_flatten.export.record import record_calls
from yobx_flatten.storage import StoredCase, replay_case
from yobx_flatten.trees import check_dynamic_shapes

X = torch.ones(2, 3)


@dataclasses.dataclass
class Images:
    x: Any
    sizes: Any = dataclasses.field(default=(), metadata={"static": True})


@dataclasses.dataclass
class Holder:
    x: Any
    part: Any


class ByHand:
    def __init__(self, x, sizes) -> None:
        self.x, self.sizes = x, sizes


@pytest.fixture(autouse=True)
def registered():
    register(Images)
    register(Holder)
    register_class_flattening(ByHand, lambda o: ([o.x], {"s": [o.sizes]}), lambda c, s: ByHand(*c, s["s"][0]), None)
    yield
    for cls in (Images, Holder, ByHand):
        unregister_class_flattening(cls)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda x: Images(x + 1, [(x.shape[0], 3)]), r"Images\.sizes\[0\]\[0\], a dynamic size"),
        (lambda x: ByHand(x + 1, x.shape[0]), r"of ByHand holds \S+ at static\['s'\]\[0\], a size that varies"),
    ],
)  # fmt: skip
def test_a_size_of_the_trace_is_no_static_data(make, place):
    """A program has one static part; the size of the example would stay in it."""
    with pytest.raises(StaticDataError, match=rf"{place}.*among the children"):
        export_program(Answers(make), (X,), cases=[])


def test_a_module_among_the_inputs_and_an_output_of_an_unregistered_class_are_refused_with_the_line():
    with pytest.raises(NotRegisteredError, match=r"(?s)given\.part is a module \(.*Linear\).*self\.part = part"):
        export_program(Answers(lambda h: h.part(h.x)), (Holder(X, torch.nn.Linear(3, 3)),))
    carrier = module_class("Carrier", lambda self: self.x)()
    carrier.x = X
    with pytest.raises(NotRegisteredError, match=r"(?s)given is a .*Carrier.*register\(Carrier, children=\['x'\]\)"):
        export_program(Answers(lambda c: c.x + 1), (carrier,))
    made = type("Result", (), {"__init__": lambda self, x: setattr(self, "x", x)})
    with pytest.raises(NotRegisteredError, match=r"(?s)output is a .*Result.*register\(Result, children=\['x'\]\)"):
        export_program(Answers(lambda x: made(x + 1)), (X,))


def test_a_float_does_not_vary():
    """torch takes a Dim for an int only."""
    with pytest.raises(DynamicShapesError, match=r"f: expected None for the float 1\.5"):
        check_dynamic_shapes({"f": 1.5}, {"f": Dim.DYNAMIC})
    check_dynamic_shapes({"n": 3}, {"n": Dim.DYNAMIC})


def test_inputs_on_another_device_and_offloaded_weights_are_named_before_a_plain_export():
    module, given = torch.nn.Linear(3, 4), torch.ones(2, 3, device="meta")
    (warning,) = check_inputs(module, (given,))
    assert "input is on meta, the weights are on cpu" in str(warning)
    with pytest.raises(InvalidArgumentError, match=r"input is on meta.* are on cpu.*\n    input.to\('cpu'\)"):
        export_program(module, (given,))
    assert not check_inputs(module, (X,))
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    accelerate.cpu_offload(module, torch.device("cpu"))
    (warning,) = check_inputs(module, (X,))
    assert "weights of 0 (Linear) are offloaded" in str(warning)
    assert "accelerate.hooks.remove_hook_from_module(module, recurse=True)" in str(warning)
    accelerate.hooks.remove_hook_from_module(module, recurse=True)
    assert not check_inputs(module, (X,))


def test_numbers_alone_are_replaced_by_tensors_as_the_line_states(tmp_path):
    """Without an input, torch's exporter finds no tensor at all."""
    module = Answers(lambda given: [item * 2 for item in given])
    with pytest.raises(InvalidArgumentError, match="No input is a tensor") as caught:
        export_onnx(module, ([1.5, 2.5],), path=tmp_path / "model.onnx")
    tensor = eval(str(caught.value).splitlines()[-1], {"torch": torch})
    exported = export_onnx(module, ([tensor, tensor + 1],), path=tmp_path / "model.onnx")
    assert exported.report.ok
    assert [float(one) for one in exported([tensor + 2, tensor + 3])] == [7.0, 9.0]


def test_sizes_are_not_named_where_fixing_them_does_not_help(tmp_path):
    """torch's exporter refuses a branch that returns a view of its input, with sizes that vary and without."""
    module = Answers(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.view(-1).view(2, 3), (x,)))
    with pytest.raises(InvalidArgumentError, match="aliasing") as caught:
        export_onnx(module, (X,), path=tmp_path / "model.onnx")
    assert "sizes" not in str(caught.value)
    line = str(caught.value).splitlines()[-1]
    exported = eval(line, {"export_program": export_program, "module": module, "args": (X,), "kwargs": {}})
    torch.testing.assert_close(exported(X), X.sin())
    torch.testing.assert_close(exported(-X), -X)


Planted = module_class("Planted", lambda self, x: x + torch.ones(3, 4))
PLANTED = [
    Planted,
    module_class("Stacked", lambda self, x: torch.cat([x, torch.ones(3, 4)], dim=1)),
    module_class("Multiplied", lambda self, x: torch.ones(2, 3) @ x),
    module_class("Viewed", lambda self, x: x.reshape(3, 4)),
    module_class("Expanded", lambda self, x: x[:, :1].T.expand(4, 3)),
]


@pytest.mark.parametrize("kind", PLANTED)
def test_a_case_at_which_the_module_stops_is_named_with_its_line(kind):
    cases = [Case("three rows", (torch.randn(3, 4),)), Case("bigger", (torch.randn(9, 4),))]
    with pytest.raises(InvalidArgumentError, match=rf"case 'bigger', step 0: {kind.__name__} itself fails") as caught:
        export_program(kind(), (torch.randn(3, 4),), cases=cases)
    text = str(caught.value)
    assert "test_refusals.py" in text
    assert "the code creates a tensor of a fixed size" in text
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert explain_error(caught.value.__cause__).known
    if kind is Planted:
        assert "The size of tensor a (9) must match the size of tensor b (3)" in text
        assert "x + torch.ones(3, 4)" in text


BRANCHES = {
    "if x.sum() > 0": lambda self, x: x + 1 if x.sum() > 0 else x - 1,
    "x[: int(x.max().item())]": lambda self, x: x[: int(x.max().item())],
}


@pytest.mark.parametrize("line", BRANCHES)
def test_a_branch_on_values_is_pointed_to(line, capfd):
    module = module_class("Branches", BRANCHES[line])()
    with pytest.raises(InvalidArgumentError, match=r"Branches cannot be traced\. The code branches on") as caught:
        export_program(module, (torch.ones(4, 3),))
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    assert capfd.readouterr() == ("", "")


def test_what_was_not_equal_is_in_the_first_line():
    grows = module_class("Grows", lambda self, x: x[: 2 if x.shape[0] < 4 else 3])()
    with pytest.raises(ReplayError) as caught:
        export_program(grows, (torch.ones(3, 3),), cases=[Case("seven rows", (torch.ones(7, 3),))])
    first = str(caught.value).splitlines()[0]
    assert "seven rows: step 0" in first
    assert "inf" not in first


def _sets_data(self, x):
    self.weight.data = self.weight.data * 2
    return x * self.weight


def _writes_data(self, x):
    x.data.add_(1)
    return x * 2


UNTRACEABLE = {
    "gradient": lambda self, x: torch.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(x),
    "sets .data": _sets_data,
    "writes .data": _writes_data,
    "asks for numbers": lambda self, x: x * torch.tensor(x.numpy() ** 2),
}


@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_what_a_trace_does_not_follow_has_a_cure(kind):
    """Each is one of torch's own assertions, which name neither the cause nor what to write."""
    module = module_of(UNTRACEABLE[kind], weight=torch.ones(3))
    with pytest.raises(InvalidArgumentError, match=r"Own is not traced\. forward uses torch\.func, \.data"):
        export_program(module, (torch.ones(4, 3),))


def test_the_cure_is_exported():
    def differentiates(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(x.pow(3).sum(), x)
        return gradient

    exported, x = export_program(module_of(differentiates), (torch.ones(4, 3),)), torch.randn(5, 3)
    assert torch.allclose(exported(x), 3 * x**2)


NAN = float("nan")


@pytest.mark.parametrize(
    ("leaf", "share"),
    [
        (torch.tensor([1.0, NAN, 2.0, 3.0]), 0.25),
        (torch.tensor([NAN, -math.inf]), 1.0),
        (torch.tensor([1.0, -math.inf]), 0.0),  # a mask
        (torch.tensor([complex(NAN, 1), 1j]), 0.5),
        (torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn), 0.5),
        (torch.tensor([NAN, 1.0], dtype=torch.bfloat16), 0.5),
        (torch.tensor([3, 4]), 0.0),
        (torch.nested.nested_tensor([torch.tensor([NAN]), torch.ones(3)], layout=torch.jagged), 0.25),
        (torch.empty(0), None),
        (NAN, 1.0),
        ("text", None),
        (10**400, 0.0),
        (None, None),
    ],
)
def test_the_share_of_a_leaf(leaf, share):
    assert share_of_nan(leaf) == share


@pytest.mark.parametrize("answer", [lambda x: x / 0.0 * 0.0, lambda x: x / 0.0], ids=["NaN", "infinite"])
def test_outputs_without_a_number_prove_nothing(tmp_path, answer):
    module = Answers(lambda x: {"sum": x.sum(), "nothing": answer(x)})
    returns = r"Answers could not be checked: the model itself returns only NaN or infinite values in nothing"
    with pytest.raises(ReplayError, match=returns):
        export_program(module, (torch.ones(3, 2),))
    with pytest.raises(ReplayError, match=r"could not be checked"):
        export_onnx(module, (torch.ones(3, 2),), path=tmp_path / "nan.onnx")
    assert not any(tmp_path.iterdir())


def test_nan_of_a_row_and_of_one_case_is_noted_and_at_padding_it_is_not_compared():
    """At padding a row that sees no position is a softmax over nothing."""
    linear = torch.nn.Linear(3, 4)
    linear.weight.data[1] = NAN
    report = export_program(linear, (torch.ones(5, 3),)).report
    assert report.ok
    assert "note: values that are NaN in the model itself were not compared: up to 25.0% of output." in str(report)
    module = Answers(lambda x: (x - x.mean(0)).square().sum(0) / (x.shape[0] - 1))
    cases = [Case("one row", (torch.rand(1, 3),)), Case("five rows", (torch.rand(5, 3),))]
    report = export_program(module, (torch.rand(4, 3),), cases=cases).report
    assert report.ok
    assert "up to 100.0% of output" in str(report)

    def tokens(self, input_ids, attention_mask):
        return torch.where(attention_mask == 0, NAN, input_ids.float())[..., None].repeat(1, 1, 2)

    given = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    padded = {**given, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    report = export_program(module_of(tokens), (), given, cases=[Case("padded", (), padded)]).report
    assert report.ok
    assert "NaN" not in str(report)
    assert "positions that the attention mask excludes were not compared" in str(report)


def test_recorded_calls_and_stored_cases_say_so(tmp_path):
    module = Answers(lambda x: x / 0.0 * 0.0)
    x = torch.ones(2, 3)
    with record_calls(module) as calls:
        module(x)
    replayed = calls.replay(torch.export.export(module, (x,)))
    assert not replayed.ok
    assert "the model itself returns only NaN or infinite values in " in str(replayed)
    linear = torch.nn.Linear(3, 2)
    linear.weight.data[:] = NAN
    export_onnx(linear, (x,), path=tmp_path / "a.onnx", proof="none")
    report = replay_case(StoredCase({"input": x}, linear(x).detach()), tmp_path / "a.onnx")
    assert not report.ok
    assert "the model itself returns only NaN or infinite values in " in str(report)


nn = torch.nn


def _differences(path, module, *calls):
    session = onnxruntime.InferenceSession(path)
    found = []
    for call in calls:
        got = session.run(None, {name: value.numpy() for name, value in call.items()})
        with torch.no_grad():
            want = module(**call)
        found.append(max(float((torch.tensor(a) - b).abs().max()) for a, b in zip(got, want.values(), strict=True)))
    return found


def _grid(self, x):
    rows, columns = torch.meshgrid(torch.arange(x.shape[1]), torch.arange(x.shape[2]), indexing="ij")
    return {"y": x + rows - columns}


ALL_SIZES = {
    "numel": (
        lambda self, x, labels: {"y": nn.functional.mse_loss(x, labels, reduction="sum") / labels.numel()},
        lambda n: {"x": torch.randn(n, 3), "labels": torch.randn(n, 3)},
    ),
    "meshgrid": (_grid, lambda n: {"x": torch.randn(n, 3, n + 2)}),
    "mean of integers": (
        lambda self, x: {"y": x.mean(dtype=torch.float32)},
        lambda n: {"x": torch.randint(0, 9, (n, n + 1))},
    ),
    "vmap over weights": (
        lambda self, x: {"y": torch.vmap(lambda weight: nn.functional.linear(x, weight).relu())(self.weight)},
        lambda n: {"x": torch.randn(n, 6)},
    ),
    "vmap over rows": (
        lambda self, x, y: {"y": torch.vmap(lambda a, b: a @ b)(x, y)},
        lambda n: {"x": torch.randn(n, 3), "y": torch.randn(n, 3, n)},
    ),
}


@pytest.mark.parametrize("name", ALL_SIZES)
def test_sizes_that_the_code_counts_with_all_vary(name, tmp_path):
    forward, make = ALL_SIZES[name]
    module = module_of(forward, weight=torch.randn(3, 4, 6))
    exported = export_onnx(module, kwargs=make(2), path=tmp_path / "m.onnx")
    assert not [remark for remark in exported.report.remarks if "fixed" in remark]
    assert max(_differences(tmp_path / "m.onnx", module, make(5), make(3), make(1))) < 1e-5


class Stream(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn, self.has_cell = kind(5, 6, **options), kind is nn.LSTM

    def forward(self, x, state, cell=None):
        y, found = self.rnn(x, (state, cell) if self.has_cell else state)
        return {"y": y, "state": found[0], "cell": found[1]} if self.has_cell else {"y": y, "state": found}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 3, "batch_first": True}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.RNN, {}),
    ],
)
def test_a_recurrent_layer_with_its_state_takes_any_batch(kind, options, tmp_path):
    module = Stream(kind, **options).eval()
    layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)

    def make(rows):
        x = torch.randn(rows, 7, 5) if options.get("batch_first") else torch.randn(7, rows, 5)
        states = {"state": torch.randn(layers, rows, 6), "cell": torch.randn(layers, rows, 6)}
        return {"x": x, **(states if kind is nn.LSTM else {"state": states["state"]})}

    export_onnx(module, kwargs=make(2), path=tmp_path / "m.onnx")
    assert max(_differences(tmp_path / "m.onnx", module, make(5), make(1))) < 1e-5
    shapes = {one.name: one.shape for one in onnxruntime.InferenceSession(tmp_path / "m.onnx").get_inputs()}
    assert shapes["state"][2] == 6
    assert isinstance(shapes["state"][1], str)


def test_chunks_of_a_varying_size_need_no_retry(tmp_path):
    """torch's exporter refuses them, a translation here does not; the program has as many chunks as the example."""
    module = module_of(lambda self, x: {"y": torch.stack(x.chunk(x.shape[1] // 2, 1))})
    report = export_onnx(module, kwargs={"x": torch.randn(3, 6)}, path=tmp_path / "m.onnx").report
    assert not [remark for remark in report.remarks if "fixed as in the example" in remark]
    assert _differences(tmp_path / "m.onnx", module, {"x": torch.randn(7, 6)}) == [0.0]
    with pytest.raises(Exception, match=r"these sizes are refused, expected x\.shape\[1\] == 3"):  # of onnxruntime
        _differences(tmp_path / "m.onnx", module, {"x": torch.randn(3, 8)})


ROLLED = module_of(lambda self, x: {"y": torch.roll(x, x.shape[1] // 2, 1)})


def test_a_size_that_fails_is_fixed_and_named_unless_it_was_stated_or_is_that_of_a_case(tmp_path):
    """Where a size was stated or a case has another, the first error comes out."""
    report = export_onnx(ROLLED, kwargs={"x": torch.randn(3, 6)}, path=tmp_path / "m.onnx").report
    (note,) = [remark for remark in report.remarks if "fixed as in the example" in remark]
    assert note.startswith("x.shape[1] is fixed")
    assert "torch's exporter raises" in note
    assert "dynamic_shapes=" in note
    assert _differences(tmp_path / "m.onnx", ROLLED, {"x": torch.randn(7, 6)}) == [0.0]
    with pytest.raises(Exception, match=r"(?i)dimension"):  # onnxruntime has classes for each of its codes
        _differences(tmp_path / "m.onnx", ROLLED, {"x": torch.randn(3, 8)})
    free = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    other = Case("8 columns", (), {"x": torch.randn(3, 8)})
    for stated in ({"dynamic_shapes": free}, {"cases": [other]}):
        with pytest.raises(InvalidArgumentError, match=r"(?s)aten\.roll\.default.*translations=") as caught:
            export_onnx(ROLLED, kwargs={"x": torch.randn(3, 6)}, path=tmp_path / "stated.onnx", **stated)
        assert len(str(caught.value).splitlines()) <= 4
        assert not (tmp_path / "stated.onnx").exists()


class Doubled(nn.Module):
    def forward(self, x):  # torch notes the line of a function of this name only
        return {"y": torch.ops.yobx_tests.twice_plus(x, 1.0)}


class Reread(nn.Module):
    def forward(self, x):
        return {"y": x.view(torch.int32)}


@pytest.mark.parametrize(
    ("module", "operator"), [(Doubled(), "yobx_tests.twice_plus.default"), (Reread(), "aten.view.dtype")]
)
def test_an_operator_without_translation_is_named_with_the_line_to_type(module, operator, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.fx.config, "do_not_emit_stack_traces", False)
    with pytest.raises(InvalidArgumentError, match="has no translation") as caught:
        export_onnx(module, kwargs={"x": torch.randn(2, 3, 4)}, path=tmp_path / "m.onnx")
    first, last = str(caught.value).splitlines()
    assert operator in first
    assert "test_refusals.py" in first
    assert last.strip() == f"translations={{torch.ops.{operator}: function}}"


def test_a_module_made_in_inference_mode_is_exported(tmp_path):
    with torch.inference_mode():
        parts = {"convolution": nn.Conv1d(3, 4, 3), "norm": nn.BatchNorm1d(4)}
        module = module_of(lambda self, x: {"y": self.norm(self.convolution(x))}, **parts)
    export_onnx(module, kwargs={"x": torch.randn(2, 3, 9)}, path=tmp_path / "m.onnx")
    assert all(one.requires_grad and one.is_inference() for one in module.parameters())
    assert max(_differences(tmp_path / "m.onnx", module, {"x": torch.randn(1, 3, 9)})) < 1e-5


def test_a_program_checks_a_size_of_one_value():
    module = module_of(lambda self, x: {"y": x @ self.weight}, weight=torch.randn(4, 5))
    exported = export_program(module, kwargs={"x": torch.randn(3, 4)})
    (x,) = [node.meta["val"] for node in exported.program.graph.nodes if node.name == "x"]
    assert type(x.shape[1]) is int
    assert type(x.shape[0]) is torch.SymInt
    assert exported(x=torch.ones(7, 4))["y"].shape == (7, 5)
    with pytest.raises(Exception, match="4"):
        exported(x=torch.ones(7, 3))


def test_autocast_inside_forward_is_named_as_the_cause(tmp_path):
    """It rounds to 16 bits, which onnxruntime has no kernels for on the CPU."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return {"y": x @ self.weight}

    module = module_of(forward, weight=torch.randn(6, 6))
    with pytest.raises(ReplayError, match=r"torch\.autocast\('cpu', torch\.bfloat16\).*enabled=False"):
        export_onnx(module, kwargs={"x": torch.randn(2, 6)}, path=tmp_path / "m.onnx")


@pytest.mark.filterwarnings("ignore:A model attribute:UserWarning")  # torch's, of what it lifts out of such a trace
def test_an_error_of_torch_is_one_line_and_a_line_to_type():
    module = module_of(lambda self, x: {"y": torch.func.grad(lambda value: (value**3).sum())(x)})
    known = "Own (cannot be exported: torch raises|is not traced. forward uses torch.func)"  # by version
    with pytest.raises(InvalidArgumentError, match=known) as caught:
        export_program(module, kwargs={"x": torch.randn(2, 4)})
    assert len(str(caught.value).splitlines()) <= 5
    assert "torch raises" not in str(caught.value) or "\n    explain_error(error.__cause__, " in str(caught.value)
    *_, (innermost, _) = traceback.walk_tb(caught.value.__cause__.__traceback__)
    assert innermost.f_globals["__name__"].startswith("torch.")


@torch.library.custom_op("yobx_tests::twice_plus", mutates_args=())
def twice_plus(x: torch.Tensor, more: float) -> torch.Tensor:
    return 2 * x + more


@twice_plus.register_fake
def _twice(x, more):
    return torch.empty_like(x)


OPERATOR = torch.ops.yobx_tests.twice_plus.default
OWN = module_of(lambda self, x: (torch.ops.yobx_tests.twice_plus(x * 0.5, 3.0)).relu() + 1)


def _translated(factor):
    op = onnxscript.opset18
    return lambda x, more: op.Add(op.Mul(x, op.Constant(value_float=factor)), op.Constant(value_float=more))


def test_an_operator_of_ones_own_is_written_with_its_translation_and_a_wrong_one_is_refused(tmp_path):
    x, path = torch.randn(4, 3), tmp_path / "own.onnx"
    with pytest.raises(ReplayError, match="differs from the eager model") as caught:
        export_onnx(OWN, (x,), path=path, translations={OPERATOR: _translated(5.0)})
    assert "the first value that differs is 'twice_plus' (yobx_tests.twice_plus.default" in str(caught.value)
    for wrong in ({"twice_plus": _translated}, {OPERATOR: "Add"}):
        with pytest.raises(InvalidArgumentError, match=r"(?s)translations: expected a dict from operators.*ions="):
            export_onnx(OWN, (x,), path=path, translations=wrong)
    assert not path.exists()
    export_onnx(OWN, (x,), path=path, translations={OPERATOR: _translated(2.0)})
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.tensor(found), (x + 3).relu() + 1)


class Encodes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)

    def encode(self, x, scale):
        return self.linear(x) * scale


def test_a_method_is_named_with_the_way_that_exports_it(tmp_path):
    """A method is no module; a recorded call of it is one."""
    model, path = Encodes().eval(), tmp_path / "encode.onnx"
    for export in (export_program, export_onnx):
        with pytest.raises(InvalidArgumentError, match=r"the method 'encode' of Encodes.*") as caught:
            export(model.encode, (torch.randn(4, 3), torch.ones(2)))
        assert "with record_calls(model, method='encode') as calls: model.encode(...)" in str(caught.value)
        assert "export_onnx(calls.module(), kwargs=calls.example()" in str(caught.value)
    with record_calls(model, method="encode") as calls:
        for rows in (4, 6):
            model.encode(torch.randn(rows, 3), torch.ones(2))
    export_onnx(calls.module(), kwargs=calls.example(), path=path)
    x, scale = torch.randn(9, 3), torch.tensor([2.0, 3.0])
    (found,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy(), "scale": scale.numpy()})
    torch.testing.assert_close(torch.tensor(found), model.encode(x, scale).detach())
