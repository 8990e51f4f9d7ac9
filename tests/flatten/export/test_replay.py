"""The replay: what it compares, padding that it leaves out, and how much of it a proof asks for."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import make_model
from tests.modules import Answers, module_of
from yobx_flatten import Case, InvalidArgumentError, NoRoomError, ReplayError, export_onnx, export_program
from yobx_flatten.export.model_facts import ModelFacts, weight_bytes
from yobx_flatten.export.onnx import file as onnx_file
from yobx_flatten.export.proof import eager_runs
from yobx_flatten.export.proof.eager_runs import draws_random_numbers, written_state
from yobx_flatten.export.proof.replay import Padding
from yobx_flatten.export.runtimes import write

pytestmark = pytest.mark.slow
nn = torch.nn
X = torch.arange(6.0).reshape(2, 3)
_exporting = torch.compiler.is_exporting


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
        self.register_buffer("n", torch.zeros(3))
        self.p = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        self.n.add_(1)
        return x + self.n


class Learns(Counts):
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


@pytest.mark.parametrize("make", [Learns, lambda: torch.nn.BatchNorm1d(3).train()])
def test_a_module_that_writes_to_its_parameters_or_statistics_is_as_it_was(make):
    module = make()
    before = _state(module)
    exported = export_program(module, (X,), cases=[])
    assert exported.report.max_difference == 0.0
    assert any("forward writes to" in remark for remark in exported.report.remarks)
    found = exported(X), exported(X)
    assert _state(module) == before
    if make is Learns:
        torch.testing.assert_close(found, (X * 2, X * 4))


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
    assert module.n.tolist() == [0.0] * 3


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


class WritesElsewhere(Counts):
    def forward(self, x):
        y = self.p * 2
        y[:1] += 1
        self.n.view(3, 1).chunk(2)[1].add_(1)
        return x + y + self.n.sum()


def test_only_what_is_written_to_is_copied():
    assert written_state(export_program(WritesElsewhere(), (X,), cases=[]).program) == ["n"]


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    "layer", [nn.LSTM(4, 5), nn.GRU(4, 5, 2, dropout=0.5), nn.RReLU(), nn.Dropout(0.0), nn.Dropout(0.5)], ids=str
)
def test_an_operator_draws_if_two_calls_of_the_model_differ(layer, is_training):
    """An LSTM without dropout in training mode does not draw, and its file is compared."""
    module = module_of(lambda self, x: found[0] if isinstance(found := self.layer(x), tuple) else found, layer=layer)
    module, x = module.train(is_training), -torch.rand(3, 6, 4)
    draws = not torch.equal(module(x), module(x))
    program = export_program(module, (x,), cases=[], steps=1).program
    assert bool(draws_random_numbers(program)) is draws
    assert written_state(program) == []


def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[PAD]", "Beautiful", "is", "better", "than", "ugly"]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "model_input_names": ["input_ids", "attention_mask"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **names)


def test_what_a_tokenizer_returns_is_exported_and_says_what_was_left_out(tmp_path):
    model = make_model("llama")
    inputs = dict(_tokenizer()("Beautiful is better", return_tensors="pt"))
    report = export_onnx(model, kwargs=inputs, path=tmp_path / "a.onnx").report
    assert [case.left_out[0] for case in report.cases if "padded" in case.case] == ["logits"] * 2
    assert all(case.left_out == () for case in report.cases if "padded" not in case.case)
    shown = str(report)
    assert "positions that the attention mask excludes were not compared in logits, present" in shown
    assert "this file has no cache" in shown
    assert "export_onnx(model, kwargs=decode_inputs(model, DecodeSizes()), path=...)" in shown

    batch = _tokenizer()(["Beautiful is better than ugly", "ugly is"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(["logits"], {key: value.numpy() for key, value in batch.items()})[0])
    with torch.no_grad():
        expected = model(**batch).logits
    read = batch["attention_mask"].bool()
    torch.testing.assert_close(found[read], expected[read], atol=1e-4, rtol=1e-4)


def drifting(self, input_ids, attention_mask):
    wrong = (attention_mask == self.where) if torch.compiler.is_exporting() else torch.zeros_like(attention_mask)
    return {"logits": input_ids[:, :, None] * 1.0 + 0.5 * wrong[:, :, None]}


def test_a_difference_in_padding_is_none_and_one_beside_it_is():
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    args = (torch.arange(6).reshape(2, 3), mask)
    report = export_program(module_of(drifting, where=0), args, cases=[]).report
    assert report.cases[0].left_out == ("logits",)
    assert report.max_difference == 0.0
    with pytest.raises(ReplayError, match=r"largest difference 5\.0e-01"):
        export_program(module_of(drifting, where=1), args, cases=[])


def test_positions_of_a_cache_that_was_given_are_compared():
    """They were not computed here: both sides got them. Those that were stay out for the rest of the loop."""
    padding = Padding()
    ids, keys = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 4, 5, 8)
    mask = torch.tensor([[0, 0, 1, 0, 1], [1, 1, 1, 1, 1]])
    padding.next_call({"input_ids": ids, "attention_mask": mask})
    assert padding.blank("present.0.key", keys)[0, 0, :, 0].tolist() == [1, 1, 1, 0, 1]
    assert padding.blank("logits", torch.ones(2, 2, 7))[:, :, 0].tolist() == [[0, 1], [1, 1]]
    longer = torch.cat([mask, torch.ones(2, 2, dtype=torch.int64)], dim=1)
    padding.next_call({"input_ids": ids, "attention_mask": longer})
    assert padding.blank("present.0.key", torch.ones(2, 4, 7, 8))[0, 0, :, 0].tolist() == [1, 1, 1, 0, 1, 1, 1]
    # a layer that slides kept the last four, a static one has room for more
    assert padding.blank("present.0.value", torch.ones(2, 4, 4, 8))[0, 0, :, 0].tolist() == [0, 1, 1, 1]
    assert padding.blank("present.0.value", torch.ones(2, 4, 9, 8))[0, 0, :, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1]
    assert padding.left_out == ["present.0.key", "logits", "present.0.value"]


def test_outputs_of_another_shape_and_those_of_a_decoder_after_an_encoder_are_compared_whole():
    given = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    decoder = given | {"decoder_input_ids": given["input_ids"]}  # whose mask is that of the encoder
    shapes = {"scores": (2, 3), "attentions.0": (2, 3, 3, 3), "pooled": (2, 8), "state": (3, 2, 8)}
    for inputs, outputs in ((given, shapes), (decoder, {"logits": (2, 3, 7)})):
        padding = Padding()
        padding.next_call(inputs)
        for name, shape in outputs.items():
            value = torch.ones(shape)
            assert padding.blank(name, value) is value, name


def both_ways(self, input_ids, attention_mask):
    """Attend in both directions where nothing is padded, and in one where anything is; a trace follows the second."""
    hidden = self.words(input_ids)
    seen = attention_mask[:, None, :].bool()
    if torch.compiler.is_compiling() or not bool(attention_mask.all()):
        seen = seen & torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    return (hidden @ hidden.mT).masked_fill(~seen, -1e9).softmax(-1) @ hidden


def of_the_batch(self, values, keep):
    """Divide each row by the tokens of the shortest one; a trace by those of the longest."""
    count = keep.sum(1).amax() if torch.compiler.is_compiling() else keep.sum(1).amin()
    return (values * keep).sum(1) / count


def of_words(padded):
    ids = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : 2 * padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def of_values(padded):
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[0, 3:] = not padded
    return {"values": torch.arange(10.0).reshape(2, 5), "keep": keep}


@pytest.mark.parametrize(("forward", "given"), [(both_ways, of_words), (of_the_batch, of_values)])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("export", [export_program, export_onnx])
def test_a_model_whose_rows_depend_on_the_padding_of_others_is_named_as_such(forward, given, first, export):
    module = module_of(forward, words=nn.Embedding(40, 8))
    both = [Case("a case", (), given(not first))]
    sentence = r"differs from the eager model \(.*\)\. The model itself changes a row's output by "
    with pytest.raises(ReplayError, match=sentence) as raised:
        export(module, (), given(first), cases=both)
    one, other = given(False), given(True)
    with torch.no_grad():
        moved = (module(**one) - module(**other)).abs()
    stated = float(re.search(r"changes a row's output by (\S+) ", str(raised.value)).group(1))
    assert stated == pytest.approx(float(moved[1:].max()), rel=0.1)


def test_a_difference_of_another_kind_is_not_blamed_on_padding():
    """Rows know nothing of each other here."""

    def wrong(self, values, keep):
        return (values * keep).sum(1) * (2.0 if torch.compiler.is_compiling() else 1.0)

    with pytest.raises(ReplayError) as raised:
        export_program(module_of(wrong), (), of_values(True))
    assert "when another row is padded" not in str(raised.value)


EXAMPLE = (torch.ones(2, 3),)
CASES = [Case("5 rows", (torch.ones(5, 3),)), Case("9 rows", (torch.ones(9, 3),)), Case("4 rows", (torch.ones(4, 3),))]


def replayed(report):
    return [(result.case, result.runtime) for result in report.cases]


PROGRAM, FILE = "torch.export", "onnxruntime"


@pytest.mark.parametrize(
    ("export", "proof", "count", "expected"),
    [
        (export_onnx, "auto", 1, [(name, of) for of in (PROGRAM, FILE) for name in ("the example", "5 rows")]),
        (export_onnx, "standard", 2, [("the example", FILE), ("5 rows", FILE), ("9 rows", FILE)]),
        (export_program, "standard", 2, [("the example", PROGRAM), ("5 rows", PROGRAM), ("9 rows", PROGRAM)]),
        (export_onnx, "sample", 3, [("the example", FILE), ("9 rows", FILE)]),  # the largest case
        (export_program, "sample", 3, [("the example", PROGRAM), ("9 rows", PROGRAM)]),
    ],
)
def test_a_proof_replays_the_cases_of_its_kind(tmp_path, export, proof, count, expected):
    path = {"path": tmp_path / "a.onnx"} if export is export_onnx else {}
    found = export(torch.nn.Linear(3, 2), EXAMPLE, **path, cases=CASES[:count], proof=proof)
    assert replayed(found.report) == expected
    assert found.report.proof == {"auto": "full"}.get(proof, proof)
    assert str(found).splitlines()[-1].strip().startswith("proof: sample; trace ") == (proof == "sample")


def test_a_sample_still_finds_a_wrong_file(tmp_path, monkeypatch):
    save = onnx_file.UnprovenFile.save

    def save_wrong(self, converted):
        initializer = converted.graph.initializers["bias"]
        initializer.const_value = type(initializer.const_value)(torch.full((2,), 7.0), name="bias")
        return save(self, converted)

    monkeypatch.setattr(onnx_file.UnprovenFile, "save", save_wrong)
    with pytest.raises(ReplayError):
        export_onnx(torch.nn.Linear(3, 2), EXAMPLE, path=tmp_path / "a.onnx", cases=CASES, proof="sample")
    assert not (tmp_path / "a.onnx").exists()


def test_without_a_proof_the_report_says_unproven_and_an_unknown_one_is_refused(tmp_path):
    found = export_onnx(torch.nn.Linear(3, 2), EXAMPLE, path=tmp_path / "a.onnx", cases=CASES, proof="none")
    assert found.report.cases == []
    assert str(found).splitlines()[1].strip().startswith("UNPROVEN")
    assert (tmp_path / "a.onnx").is_file()
    with pytest.raises(InvalidArgumentError, match="'auto', 'full', 'standard', 'sample', 'none'"):
        export_program(torch.nn.Linear(3, 2), EXAMPLE, proof="some")


def test_the_size_of_the_weights_of_which_tied_ones_count_once_decides_by_default(monkeypatch):
    """Two modules that share a table of 4 rows and 2 columns of float32 hold 32 bytes."""
    size = ModelFacts.of(torch.nn.Linear(3, 2)).weight_bytes
    assert size == 32
    monkeypatch.setattr(eager_runs, "STANDARD_FROM", 33)
    assert eager_runs.choose_proof("auto", size) == "full"
    monkeypatch.setattr(eager_runs, "STANDARD_FROM", 32)
    assert eager_runs.choose_proof("auto", size) == "standard"
    monkeypatch.setattr(eager_runs, "SAMPLED_FROM", 32)
    assert eager_runs.choose_proof("auto", size) == "sample"
    assert eager_runs.choose_proof("full", size) == "full"
    first, second = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    second.weight = first.weight
    assert weight_bytes(torch.nn.Sequential(first, second)) == 32


def test_the_report_has_time_and_memory_of_every_step(tmp_path):
    report = export_onnx(torch.nn.Linear(3, 2), EXAMPLE, path=tmp_path / "a.onnx", cases=[]).report
    assert list(report.seconds) == ["trace", "replay", "convert", "save", "load"]
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert report.peak_growth.keys() == report.seconds.keys()
    assert all(growth >= 0 for growth in report.peak_growth.values())


def test_what_there_is_no_room_or_opset_for_is_found_before_anything_is_traced(tmp_path, monkeypatch):
    module = torch.nn.Linear(3, 2)
    monkeypatch.setattr(module, "forward", lambda *args: pytest.fail("the module was called"))
    with pytest.raises(InvalidArgumentError, match="opset_version=99: the installed onnx has"):
        export_onnx(module, EXAMPLE, path=tmp_path / "a.onnx", opset_version=99)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    with pytest.raises(NoRoomError, match=r"the weights take 32 bytes, and 10 bytes are free"):
        export_onnx(module, EXAMPLE, path=tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
    facts = dataclasses.replace(ModelFacts.of(torch.nn.Linear(3, 2)), weight_bytes=2**31)
    monkeypatch.setattr(write, "memory_available", lambda: 2**30)
    monkeypatch.setattr(write.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**40}))
    with pytest.raises(NoRoomError, match=r"needs 2\.68 GB .* 1\.07 GB are available(?s:.*)proof=\"none\""):
        write.check_room(facts, pathlib.Path("a.onnx"))
    write.check_room(facts, pathlib.Path("a.onnx"), in_memory=0)
