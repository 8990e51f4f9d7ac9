"""Tests of the matrix of trainings: its rows, its batches, what it calls wrong, its page."""

import copy
import io
import json
from pathlib import Path

import pytest
import torch

from matrix.cases import DifferenceError
from matrix.heads import head_names, make_head, tables_of
from matrix.heads_batches import NoBatchError, batch_for
from matrix.results import Results
from matrix.trainings import choose, main, parse, wrong_cells
from matrix.trainings_cases import COLUMNS, run_type
from matrix.trainings_kinds import kind_names
from matrix.trainings_page import outcome_of
from matrix.trainings_trial import HeadTrial, RefusedError

pytestmark = pytest.mark.slow

QUESTIONS = "question_answering:BertForQuestionAnswering"
TOKENS = "token_classification:BertForTokenClassification"


def test_every_class_with_a_head_is_a_row_once():
    listed = {one for task, table in tables_of().items() for held in table.values() for one in held
              if task not in ("backbone", "image", "text_encoding")}  # fmt: skip
    assert sorted(name.partition(":")[2] for name in head_names()) == sorted(listed)


def test_names_can_be_typed():
    assert not any("," in name for name in kind_names())
    assert choose(parse(["--only", f"{TOKENS},own_loss:focal"])) == ["own_loss:focal", TOKENS]
    assert len(choose(parse(["--only", "own_loss:"]))) > 20


def test_rows_of_a_batch_have_different_numbers_of_labels():
    found = batch_for(TOKENS, make_head(TOKENS))
    counts = (found.make(5, 1)["labels"] != -100).sum(1).tolist()
    assert len(set(counts)) > 2
    assert (found.make(5, 1, some_missing=True)["labels"] != -100).sum(1).tolist() == [0, 0, *counts[2:]]


def test_one_answer_lies_outside_of_the_text():
    found = batch_for(QUESTIONS, make_head(QUESTIONS))
    batch = found.make(5, 1)
    assert (batch["end_positions"] >= batch["input_ids"].shape[1]).tolist() == [False] * 4 + [True]
    without = found.make(5, 1, some_missing=True)
    assert (without["start_positions"] >= 12).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("rows", [2, 5])
def test_objects_of_a_picture_are_few_or_many(rows):
    name = "object_detection:YolosForObjectDetection"
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
    events = io.StringIO()
    run_type(TOKENS, "", list(COLUMNS), {}, None, events)
    lines = [json.loads(line) for line in events.getvalue().splitlines()]
    results = {line["column"]: line["result"] for line in lines if "column" in line}
    expected = dict.fromkeys(COLUMNS, True) | {"other labels": None}  # tokens have classes, and nothing else
    assert {name: result["ok"] for name, result in results.items()} == expected
    assert results["3 microbatches"]["gradients"] < 1e-12


def test_a_wrong_gradient_is_found():
    trial = HeadTrial(TOKENS)
    run = trial.fused
    trial.fused = lambda pipeline, batch, count: run(pipeline, {
        key: value[:4] if isinstance(value, torch.Tensor) else value for key, value in batch.items()
    }, count)  # fmt: skip
    with pytest.raises(DifferenceError, match="loss off by"):
        COLUMNS["3 microbatches"](trial)
    trial.close()


def test_rows_that_depend_on_each_other_are_named():
    trial = HeadTrial(TOKENS)
    trial.model.classifier.register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),))
    assert "rows depend on each other: logits" in trial.cause(trial.batch(5, 1))


def test_an_error_of_the_package_is_a_refusal():
    from roundpipe_runtime.errors import SplitError

    trial = HeadTrial(TOKENS)
    with pytest.raises(RefusedError, match="SplitError: no rows"), trial.piped():
        raise SplitError("no rows")


def test_a_class_without_a_batch_says_what_was_tried():
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


@pytest.mark.parametrize(
    ("columns", "outcome"), [(GOOD, "equal"), (WRONG, "wrong"), (REFUSED, "refused"), (ABSENT, "not built")]
)
def test_a_row_has_the_outcome_of_its_worst_cell(columns, outcome):
    assert outcome_of({"columns": columns}) == outcome


def test_a_wrong_number_is_a_failure_and_what_cannot_be_built_is_none():
    found = _results(ctc__Good=GOOD, ctc__Wrong=WRONG, ctc__Refused=REFUSED, ctc__Absent=ABSENT)
    lines = wrong_cells(found, list(found.types), list(COLUMNS))
    assert lines == ["ctc:Wrong, 1 microbatch: DifferenceError: loss off by 2.0e+00"]


def test_the_command_ends_with_1_for_a_wrong_number(tmp_path, monkeypatch):
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
