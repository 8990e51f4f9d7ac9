"""The replay: what a program may not return in the place of something else, and what a module is afterwards."""

import onnxruntime
import pytest
import torch

from tests.flatten.export.answers import Answers
from yobx_flatten import DecodeSizes, ReplayError, decode_inputs, export_onnx, export_program, record_calls
from yobx_flatten.export.proof.eager_runs import draws_random_numbers, written_state
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = pytest.mark.slow

X = torch.arange(6.0).reshape(2, 3)


def _exporting() -> bool:
    return torch.compiler.is_exporting()


TRAPS = {
    "an imaginary part": (lambda x: torch.complex(x, x + (0 if _exporting() else 1)), r"1\.0e\+00"),
    "another type of elements": (lambda x: x if _exporting() else x.long(), "expected torch.int64, found torch.float"),
    "None for a tensor": (lambda x: {"x": x + 1, "y": None if _exporting() else x}, "output 'y': expected a tensor"),
    "a tensor for None": (lambda x: {"x": x + 1, "y": x * 2 if _exporting() else None}, "'y': expected None, found a"),
    "another bool": (lambda x: {"x": x + 1, "y": _exporting()}, r"1\.0e\+00 +y"),
    "other text": (
        lambda x: {"x": x + 1, "y": "a" if _exporting() else "b"},
        "expected the str 'b', found the str 'a'",
    ),
    "another class": (lambda x: (x + 1, x) if _exporting() else [x + 1, x], "expected: list of 2 found: tuple of 2"),
    "integers above 2**53": (lambda x: x.long() + 2**60 + (1 if _exporting() else 0), r"1\.0e\+00"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_the_replay_sees(trap):
    answer, message = TRAPS[trap]
    with pytest.raises(ReplayError, match=message):
        export_program(Answers(answer), (X,), cases=[])


def test_recorded_calls_see_the_same():
    module = Answers(lambda x: {"x": x + 1, "y": "a" if _exporting() else "b"})
    with record_calls(module) as calls:
        module(X)
    program = torch.export.export(module, (X,))
    assert "expected the str 'b', found the str 'a'" in str(calls.replay(program))


def test_outputs_of_all_kinds_may_stay_the_same():
    module = Answers(
        lambda x: {"a": x.to(torch.float8_e4m3fn), "b": True, "c": None, "d": "s", "e": 3, "f": 2.5, "g": x.shape[0]}
    )
    report = export_program(module, (X,), cases=[]).report
    assert report.ok
    assert set(report.cases[0].differences) == {"a", "b", "e", "f", "g"}


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        self.n.add_(1)
        return x + self.n


class Learns(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.p.mul_(2)
        return x * self.p


class Fails(Counts):
    def forward(self, x):
        self.n.add_(1)
        return x + (self.n if _exporting() else None)


def _state(module):
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (id(tensor), tensor._version, tensor.tolist()) for name, tensor in held.items()}


@pytest.mark.parametrize(
    ("make", "first", "second"), [(Learns, X * 2, X * 4), (lambda: torch.nn.BatchNorm1d(3).train(), None, None)]
)
def test_a_module_that_writes_to_its_parameters_or_statistics_is_as_it_was(make, first, second):
    module = make()
    before = _state(module)
    exported = export_program(module, (X,), cases=[])
    assert exported.report.max_difference == 0.0
    assert any("forward writes to" in remark for remark in exported.report.remarks)
    found = exported(X), exported(X)
    assert _state(module) == before
    if first is not None:
        torch.testing.assert_close(found, (first, second))


def test_a_module_is_as_it_was_when_its_export_fails():
    module = Fails()
    before = _state(module)
    with pytest.raises(TypeError, match="NoneType"):
        export_program(module, (X,), cases=[])
    assert _state(module) == before


def test_an_onnx_file_that_forgets_what_forward_writes_says_so(tmp_path):
    """Every call begins with the state of the export: 0 + 1, each time."""
    module = Counts()
    exported = export_onnx(module, (X,), path=tmp_path / "counts.onnx", cases=[])
    assert "keeps no state between calls: n always" in str(exported.report)
    session = onnxruntime.InferenceSession(exported.path)
    assert [session.run(None, {"x": X.numpy()})[0][0, 0] for _ in range(2)] == [1.0, 1.0]
    assert module.n.item() == 0.0


def test_random_numbers_are_the_same_on_both_sides(tmp_path):
    """Seeded for each step; the caller's generator is where it was. onnxruntime draws others: the report says so."""
    module = Answers(lambda x: x + torch.rand(3) + torch.nn.functional.dropout(x, 0.5, True))
    torch.manual_seed(3)
    report = export_program(module, (X,), cases=[]).report
    assert report.max_difference == 0.0
    assert "aten.rand.default, aten.dropout.default" in str(report)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert after == torch.rand(1)
    with pytest.raises(ReplayError, match="onnxruntime draws its own random numbers"):
        export_onnx(module, (X,), path=tmp_path / "random.onnx", cases=[])


class WritesElsewhere(torch.nn.Module):
    """Writes to what it made of a parameter, and to a part of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("n", torch.zeros(2, 4))

    def forward(self, x):
        y = self.p * 2
        y[:1] += 1
        self.n.view(8).chunk(2)[1].add_(1)
        return x + y + self.n.sum()


def test_only_what_is_written_to_is_copied():
    assert written_state(export_program(WritesElsewhere(), (X,), cases=[]).program) == ["n"]


def test_a_model_in_eval_neither_draws_nor_writes():
    model = small_model("gpt2")
    program = export_program(model, (), decode_inputs(model, DecodeSizes()), cases=[], steps=1).program
    assert any("dropout" in str(node.target) for node in program.graph.nodes)
    assert draws_random_numbers(program) == []
    assert written_state(program) == []


class First(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x)
        return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(4, 5),
        torch.nn.GRU(4, 5, 2, dropout=0.5),
        torch.nn.RReLU(),
        torch.nn.Dropout(0.0),
        torch.nn.Dropout(0.5),
    ],
    ids=str,
)
def test_an_operator_draws_if_two_calls_of_the_model_differ(layer, is_training):
    """An LSTM without dropout in training mode does not draw, and its file is compared."""
    module, x = First(layer).train(is_training), -torch.rand(3, 6, 4)
    draws = not torch.equal(module(x), module(x))
    program = export_program(module, (x,), cases=[], steps=1).program
    assert bool(draws_random_numbers(program)) is draws
