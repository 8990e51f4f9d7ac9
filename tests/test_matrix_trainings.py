"""The matrices of trainings and of cuts: their rows, their batches, what they call wrong."""

import copy
import io
import json
from pathlib import Path

import pytest
import torch

from matrix import cut, cut_cases
from matrix.cases import DifferenceError
from matrix.cut_cases import COLUMNS as CUT_COLUMNS
from matrix.heads import head_names, make_head, tables_of
from matrix.heads_batches import NoBatchError, batch_for
from matrix.models import make_model
from matrix.results import Results
from matrix.trainings import choose, main, parse, wrong_cells
from matrix.trainings_cases import COLUMNS, run_type
from matrix.trainings_kinds import kind_names
from matrix.trainings_page import outcome_of
from matrix.trainings_trial import HeadTrial, RefusedError
from roundpipe_runtime.errors import SplitError

pytestmark = pytest.mark.slow

QUESTIONS = "question_answering:BertForQuestionAnswering"
TOKENS = "token_classification:BertForTokenClassification"


def results_of(run, name, columns):
    events = io.StringIO()
    run(name, "", list(columns), {}, None, events)
    lines = [json.loads(line) for line in events.getvalue().splitlines()]
    return {line["column"]: line["result"] for line in lines if "column" in line}


def test_every_class_with_a_head_is_a_row_once():
    listed = {one for task, table in tables_of().items() for held in table.values() for one in held
              if task not in ("backbone", "image", "text_encoding")}  # fmt: skip
    assert sorted(name.partition(":")[2] for name in head_names()) == sorted(listed)
    assert not any("," in name for name in kind_names())  # names can be typed
    assert choose(parse(["--only", f"{TOKENS},own_loss:focal"])) == ["own_loss:focal", TOKENS]
    assert len(choose(parse(["--only", "own_loss:"]))) > 20


def test_rows_of_a_batch_have_different_numbers_of_labels_and_one_answer_lies_outside_of_the_text():
    found = batch_for(TOKENS, make_head(TOKENS))
    counts = (found.make(5, 1)["labels"] != -100).sum(1).tolist()
    assert len(set(counts)) > 2
    assert (found.make(5, 1, some_missing=True)["labels"] != -100).sum(1).tolist() == [0, 0, *counts[2:]]
    found = batch_for(QUESTIONS, make_head(QUESTIONS))
    batch = found.make(5, 1)
    assert (batch["end_positions"] >= batch["input_ids"].shape[1]).tolist() == [False] * 4 + [True]
    without = found.make(5, 1, some_missing=True)
    assert (without["start_positions"] >= 12).tolist() == [True, True, False, False, False]
    name = "object_detection:YolosForObjectDetection"
    for rows in (2, 5):
        labels = batch_for(name, make_head(name)).make(rows, 1)["labels"]
        assert [len(one["boxes"]) for one in labels] == [2, 1, 3, 1, 2][:rows]


def test_nothing_in_a_head_is_random_in_training():
    model = make_head("ctc:Wav2Vec2ForCTC").train()
    batch = batch_for("ctc:Wav2Vec2ForCTC", model).make(3, 1)
    losses = set()
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses.add(model(**copy.deepcopy(batch)).loss.item())
    assert len(losses) == 1


def test_one_head_is_equal_in_all_columns():
    results = results_of(run_type, TOKENS, COLUMNS)
    expected = dict.fromkeys(COLUMNS, True) | {"other labels": None}  # tokens have classes, and nothing else
    assert {name: result["ok"] for name, result in results.items()} == expected
    assert results["3 microbatches"]["gradients"] < 1e-12


def test_a_wrong_gradient_is_found_and_rows_that_depend_on_each_other_are_named():
    trial = HeadTrial(TOKENS)
    run = trial.fused
    trial.fused = lambda pipeline, batch, count: run(pipeline, {
        key: value[:4] if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }, count)  # fmt: skip
    with pytest.raises(DifferenceError, match="loss off by"):
        COLUMNS["3 microbatches"](trial)
    trial.close()
    trial = HeadTrial(TOKENS)
    trial.model.classifier.register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),))
    assert "rows depend on each other: logits" in trial.cause(trial.batch(5, 1))


def test_an_error_of_the_package_is_a_refusal_and_a_class_without_a_batch_says_what_was_tried():
    with pytest.raises(RefusedError, match="SplitError: no rows"), HeadTrial(TOKENS).piped():
        raise SplitError("no rows")
    model = make_head(TOKENS)

    def forward(input_ids=None, labels=None):
        raise ValueError("takes nothing")

    model.forward = forward
    with pytest.raises(NoBatchError, match="ValueError: takes nothing"):
        batch_for(TOKENS, model)


def _results(**rows):
    made = Results(Path("trainings.json"), {"torch": "2"}, "")
    made.types = {name.replace("__", ":"): {"columns": columns} for name, columns in rows.items()}
    return made


GOOD = {"built": {"ok": True}, "1 microbatch": {"ok": True, "loss": 0.0, "gradients": 2e-7, "seconds": 3.0}}
WRONG = {"built": {"ok": True}, "1 microbatch": {"ok": False, "why": "DifferenceError: loss off by 2.0e+00"}}
REFUSED = {"built": {"ok": True}, "1 microbatch": {"ok": None, "why": "RefusedError: CutError: no | layers"}}
ABSENT = {"built": {"ok": False, "why": "ImportError: timm"}, "1 microbatch": {"ok": None, "why": "built did not pass"}}


def test_a_wrong_number_is_a_failure_and_ends_the_command_with_1(tmp_path, monkeypatch):
    found = _results(ctc__Good=GOOD, ctc__Wrong=WRONG, ctc__Refused=REFUSED, ctc__Absent=ABSENT)
    lines = wrong_cells(found, list(found.types), list(COLUMNS))
    assert lines == ["ctc:Wrong, 1 microbatch: DifferenceError: loss off by 2.0e+00"]
    outcomes = ["equal", "wrong", "refused", "not built"]  # that of the worst cell of each row
    assert [outcome_of(row) for row in found.types.values()] == outcomes
    output = tmp_path / "trainings.json"
    from matrix.results import installed_versions

    held = _results(own_loss__focal=dict.fromkeys(COLUMNS, WRONG["1 microbatch"]) | {"built": {"ok": True}})
    held.path, held.versions, held.way = output, installed_versions(), "roundpipe_runtime"
    held.write()
    assert main(["--only", "own_loss:focal", "--output", str(output), "--against", str(output)]) == 1


def test_numbers_and_several_labels_are_compared_where_the_task_knows_them():
    found = COLUMNS["other labels"](HeadTrial("sequence_classification:BertForSequenceClassification"))
    kinds = ("regression", "multi_label_classification")
    assert all(found[f"{kind}, {what}"] < 1e-12 for kind in kinds for what in ("loss", "gradients"))


def test_a_batch_has_padding_and_labels_that_are_ignored_and_pictures_come_with_their_places():
    made = cut_cases.batch_of("llama", make_model("llama"), 3, 0)
    assert set(made) == {"input_ids", "attention_mask", "labels"}
    assert made["attention_mask"].sum(1).tolist() == [9, 12, 12]
    assert (made["labels"] == -100).sum(1).tolist() == [7, 0, 0]
    model = make_model("image:qwen2_5_vl")
    made = cut_cases.batch_of("image:qwen2_5_vl", model, 2, 0)
    assert made["image_grid_thw"].shape[0] == 2
    assert (made["input_ids"] == model.config.image_token_id).any(1).all()
    assert cut.choose(cut.parse(["--only", "llama,seq2seq:t5"])) == ["llama", "seq2seq:t5"]
    assert not any(":" in name for name in cut.choose(cut.parse([])))
    with pytest.raises(SystemExit, match="nonsense is not among the"):
        cut.choose(cut.parse(["--only", "nonsense"]))


def test_one_type_passes_all_columns():
    results = results_of(cut_cases.run_type, "llama", CUT_COLUMNS)
    assert {name: result["ok"] for name, result in results.items()} == dict.fromkeys(CUT_COLUMNS, True)
    assert results["cut"]["lists"] == ["model.layers"]
    assert results["microbatches"]["gradients"] < 1e-6


def test_a_wrong_gradient_of_a_cut_fails():
    trial = cut_cases.CutTrial("llama")
    made = cut_cases.CutTrial.wrapped

    def forgetful(self, model, devices, microbatches):
        pipeline = made(self, model, devices, microbatches)
        run = pipeline.forward_backward
        pipeline.__dict__["forward_backward"] = lambda **options: run(
            **{**options, "input_kwargs": {key: value[:4] for key, value in options["input_kwargs"].items()}}
        )
        return pipeline

    trial.wrapped = forgetful.__get__(trial)
    with pytest.raises((ArithmeticError, RuntimeError)):
        CUT_COLUMNS["microbatches"](trial)
