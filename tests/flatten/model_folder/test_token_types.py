"""Folders of encoders take the types of tokens that a tokenizer returns for a pair, where the model has types."""

import json

import onnxruntime
import pytest
import torch
import transformers

from tests.flatten.model_folder.words import restate, word_tokenizer
from yobx_flatten import export_folder
from yobx_flatten.model_folder.pieces.tasks import has_types
from yobx_flatten.model_folder.source.configuration import small_config


def _model(name, kind="ForSequenceClassification", **entries):
    config = small_config(name)
    for key, value in {"initializer_range": 0.2, "num_labels": 2, "pad_token_id": 0, **entries}.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    head = {"ForSequenceClassification": "AutoModelForSequenceClassification", "Model": "AutoModel"}
    auto = getattr(transformers, head.get(kind, f"AutoModel{kind}"))
    return auto.from_config(config).eval()


PAIRS = ["word1 word2 word3", "word4"], ["word5 word6 word7 word8 word9", "word6 word7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert", "ForSequenceClassification"),
        ("electra", "ForSequenceClassification"),
        ("deberta-v2", "ForSequenceClassification"),
        ("albert", "ForQuestionAnswering"),
        ("bert", "ForTokenClassification"),
    ],
)
def test_what_a_tokenizer_returns_for_pairs_is_fed_as_it_is(name, kind, tmp_path):
    entries = {"type_vocab_size": 2} if name == "deberta-v2" else {}
    model = _model(name, kind, **entries)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    export_folder(tmp_path / "model", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    fed = tokenizer(*PAIRS, padding=True, return_tensors="np")
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx", providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, dict(fed))[0])
    given = {name: torch.from_numpy(value) for name, value in fed.items()}
    assert given["token_type_ids"].max() == 1
    with torch.no_grad():
        expected = model(**given).to_tuple()[0]
        without = model(**{**given, "token_type_ids": None}).to_tuple()[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (without - expected).abs().max() > 0.01


@pytest.mark.slow
def test_a_model_without_types_takes_none_and_its_tokenizer_returns_none(tmp_path):
    """DeBERTa's tokenizer returns types also for models that ignore them; that of the folder does not."""
    model = _model("deberta-v2", type_vocab_size=0)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    restate(tmp_path / "model/tokenizer_config.json", model_input_names=names)
    export_folder(tmp_path / "model", tmp_path / "out")
    fed = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(*PAIRS, padding=True, return_tensors="np")
    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx", providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, dict(fed))[0])
    types = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")(*PAIRS, padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(found, model(**types).logits, atol=1e-4, rtol=1e-4)
    assert "token_type_ids" in types
    stated = json.loads((tmp_path / "out/tokenizer_config.json").read_text("utf-8"))
    assert stated["model_input_names"] == ["input_ids", "attention_mask"]


@pytest.mark.parametrize(
    ("name", "entries", "expected"),
    [
        ("bert", {}, True),
        ("bert", {"type_vocab_size": 1}, False),
        ("roberta", {"type_vocab_size": 1}, False),
        ("roberta", {"type_vocab_size": 2}, False),  # its tokenizer gives both texts the type 0
        ("roberta", {"type_vocab_size": 2, "tokenizer_class": "BertTokenizer"}, True),
        ("deberta", {"type_vocab_size": 0}, False),
        ("deberta", {"type_vocab_size": 2}, True),
        ("distilbert", {}, False),
        ("fnet", {}, True),
        ("tapas", {}, True),
        ("gpt2", {}, False),  # its types are words, and its tokenizer returns none
    ],
)
def test_whether_a_model_has_types_is_found_by_calling_it(name, entries, expected):
    """A configuration may state types that no layer reads, or have another word for them."""
    model = _model(name, **entries)
    assert has_types(model, torch.arange(12).reshape(2, 6) + 3) is expected
