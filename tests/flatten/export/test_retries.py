"""What fails while all sizes vary is retried; operators without a translation are named, or translated by the user."""

from __future__ import annotations

import traceback

import onnxruntime
import onnxscript
import pytest
import torch

from tests.modules import module_of
from yobx_flatten import Case, export_onnx, export_program, record_calls
from yobx_flatten.errors import InvalidArgumentError, ReplayError

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
    assert "test_retries.py" in first
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
