"""Prompts of the user: a quantised folder is measured on them, and its card states what was found."""

import json
import math

import pytest
import torch
from transformers import ByT5Tokenizer

from tests.flatten.export.trained_model import trained_model
from yobx_flatten import InvalidArgumentError, ModelSourceError, export_folder
from yobx_flatten.__main__ import main
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.storage.cases import load_case

PROMPTS = ["def heappush(heap, item):", "for index in range(len(values)):", "import statistics"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n")
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "model"
    trained_model().save_pretrained(path)
    ByT5Tokenizer(extra_ids=0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(source, prompts, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "out"
    assert main(["export", str(source), "-o", str(path), "--quantize", "int8", "--calibration", str(prompts)]) == 0
    return path


def test_the_perplexity_is_that_of_the_prompts(folder, source):
    """Computed again by the model alone, of all tokens but the first two of the row."""
    stated = json.loads((folder / "yobx_flatten.json").read_text())["quality"]["model.onnx"]
    ids = torch.tensor(ByT5Tokenizer(extra_ids=0)("\n".join(PROMPTS), add_special_tokens=False)["input_ids"])[None]
    with torch.no_grad():
        scores = trained_model()(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(scores[0, 1:-1], ids[0, 2:])
    assert stated["text_tokens"] == ids.shape[1] - 2
    assert stated["model_perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-3)


def test_the_answers_to_the_prompts_are_kept(folder):
    case = load_case(folder / "cases/generate-chats.case")
    rows = [row[mask.bool()] for row, mask in zip(case.inputs["input_ids"], case.inputs["attention_mask"], strict=True)]
    assert [bytes(int(token) - 3 for token in row).decode() for row in rows] == PROMPTS


def test_the_card_states_size_perplexity_divergence_and_tokens(folder):
    stated = json.loads((folder / "yobx_flatten.json").read_text())["quality"]["model.onnx"]
    card = (folder / "README.md").read_text()
    assert f"{stated['perplexity'] / stated['model_perplexity']:.4f} of the model's" in card
    assert f"tokens of prompts.txt | {stated['perplexity'] / stated['model_perplexity']:.4f}" in card
    assert f"{stated['text_divergence']:.4f} nats" in card
    assert "the same greedy token, 3 chats, " in card
    assert f"{(folder / 'model.onnx').stat().st_size / 1e6:.1f} MB, int8" in card


REFUSED = {
    "no quantisation": ({"quantize": None}, "needs quantize="),
    "scores of the last token": ({"logits": "last"}, "or with logits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_text_that_measures_nothing_is_refused(prompts, tmp_path, name):
    options, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        export_folder(trained_model(), tmp_path / "out", **{"quantize": "int8", "calibration": prompts, **options})
    assert not (tmp_path / "out").exists()


def test_a_model_that_writes_nothing_takes_no_prompts(prompts, tmp_path):
    encoder = small_model("bert").base_model
    with pytest.raises(InvalidArgumentError, match="is for models that generate text, not for feature-extraction"):
        export_folder(encoder, tmp_path / "out", task="feature-extraction", quantize="int8", calibration=prompts)


@pytest.mark.parametrize(
    ("contents", "message"), [(b"\n \n", "contains no prompts"), (b"\xff\xfe", "not a text in UTF-8")]
)
def test_a_file_without_prompts_is_an_error_of_one_line(tmp_path, contents, message):
    file = tmp_path / "p.txt"
    file.write_bytes(contents)
    with pytest.raises(ModelSourceError, match=message):
        export_folder(trained_model(), tmp_path / "out", quantize="int8", calibration=file)
    assert not (tmp_path / "out").exists()
