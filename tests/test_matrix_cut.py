"""Tests of the cut matrix: its inputs, its columns on one type, its page."""

import io
import json

import pytest

from matrix.cut import choose, parse
from matrix.cut_cases import COLUMNS, CutTrial, batch_of, run_type
from matrix.models import make_model

pytestmark = pytest.mark.slow


def test_a_batch_has_padding_and_labels_that_are_ignored():
    made = batch_of("llama", make_model("llama"), 3, 0)
    assert set(made) == {"input_ids", "attention_mask", "labels"}
    assert made["attention_mask"].sum(1).tolist() == [9, 12, 12]
    assert (made["labels"] == -100).sum(1).tolist() == [7, 0, 0]


def test_pictures_come_with_their_places():
    model = make_model("image:qwen2_5_vl")
    made = batch_of("image:qwen2_5_vl", model, 2, 0)
    assert made["image_grid_thw"].shape[0] == 2
    assert (made["input_ids"] == model.config.image_token_id).any(1).all()


def test_one_type_passes_all_columns():
    events = io.StringIO()
    run_type("llama", "", list(COLUMNS), {}, None, events)
    lines = [json.loads(line) for line in events.getvalue().splitlines()]
    results = {line["column"]: line["result"] for line in lines if "column" in line}
    assert {name: result["ok"] for name, result in results.items()} == dict.fromkeys(COLUMNS, True)
    assert results["cut"]["lists"] == ["model.layers"]
    assert results["microbatches"]["gradients"] < 1e-6


def test_a_wrong_gradient_fails():
    trial = CutTrial("llama")
    made = CutTrial.wrapped

    def forgetful(self, model, devices, microbatches):
        pipeline = made(self, model, devices, microbatches)
        run = pipeline.forward_backward
        pipeline.__dict__["forward_backward"] = lambda **options: run(
            **{**options, "input_kwargs": {key: value[:4] for key, value in options["input_kwargs"].items()}}
        )
        return pipeline

    trial.wrapped = forgetful.__get__(trial)
    with pytest.raises((ArithmeticError, RuntimeError)):
        COLUMNS["microbatches"](trial)


def test_options_choose_the_types():
    assert choose(parse(["--only", "llama,seq2seq:t5"])) == ["llama", "seq2seq:t5"]
    assert not any(":" in name for name in choose(parse([])))
    with pytest.raises(SystemExit, match="nonsense is not among the"):
        choose(parse(["--only", "nonsense"]))
