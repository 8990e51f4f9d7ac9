"""Other libraries open an exported folder as it is, and return what the model returns: ``make clients``."""

import json
import os
import pathlib
import subprocess

import numpy
import pytest
import torch
import transformers

from tests.flatten.model_folder.test_sentence import write_modules
from tests.flatten.model_folder.words import WORDS, word_tokenizer
from tests.models import SIZES
from yobx_flatten import export_folder
from yobx_flatten.model_folder.source.configuration import small_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("CLIENTS_PYTHON"),
        reason="CLIENTS_PYTHON names no Python with optimum-onnx and sentence-transformers: make clients",
    ),
]

LINES = ["word1 word2 word3", "word4", "word1 word2 word3 word50 word51"]
LAYOUTS = pytest.mark.parametrize("layout", ["flat", "transformers.js"])


def opened(kind: str, folder: pathlib.Path, given: object) -> torch.Tensor:
    inputs, output = folder.parent / "given", folder.parent / "found.npz"
    if isinstance(given, dict):
        inputs = inputs.with_suffix(".npz")
        numpy.savez(inputs, **{name: tensor.numpy() for name, tensor in given.items()})
    else:
        inputs.write_text(json.dumps(given))
    script = pathlib.Path(__file__).with_name("client_opens.py")
    command = [os.environ["CLIENTS_PYTHON"], str(script), kind, str(folder), str(inputs), str(output)]
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.from_numpy(numpy.load(output)["found"])


def written(name: str, folder: pathlib.Path, layout: str) -> torch.nn.Module:
    model = small_model(name)
    if name == "whisper":  # optimum takes the heads of the encoder for those of a joined decoder, as in Whisper's files
        model.config.encoder_attention_heads = model.config.decoder_attention_heads
        model = type(model)(model.config).eval()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 0.3)
    export_folder(model, folder, layout=layout)
    return model


def generated(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = model.generate(**given, max_new_tokens=12, do_sample=False)
    assert len(set(tokens[0].tolist())) > 3
    return tokens


@LAYOUTS
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_optimum_generates_the_tokens_of_a_decoder(name, layout, tmp_path):
    model = written(name, tmp_path / "out", layout)
    ids = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    assert opened("text-generation", tmp_path / "out", given).tolist() == generated(model, given).tolist()


@LAYOUTS
def test_optimum_generates_the_tokens_of_t5(layout, tmp_path):
    model = written("t5", tmp_path / "out", layout)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    given = {"input_ids": torch.tensor([[7, 8, 9, 10], [11, 12, 0, 0]]), "attention_mask": mask}
    assert opened("text2text-generation", tmp_path / "out", given).tolist() == generated(model, given).tolist()


@LAYOUTS
def test_optimum_generates_the_tokens_of_whisper(layout, tmp_path):
    model = written("whisper", tmp_path / "out", layout)
    values = (torch.arange(3200, dtype=torch.float64) ** 2 * 0.37).sin().float()
    given = {"input_features": values.reshape(2, 16, 100)}
    found = opened("automatic-speech-recognition", tmp_path / "out", given)
    assert found.tolist() == generated(model, given).tolist()


@LAYOUTS
def test_optimum_returns_the_scores_of_a_classifier(layout, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), num_labels=3, initializer_range=0.5, **SIZES)
    model = transformers.BertForSequenceClassification(config).eval()
    given = dict(word_tokenizer()(LINES, padding=True, return_tensors="pt"))
    model.save_pretrained(tmp_path / "saved")
    word_tokenizer().save_pretrained(tmp_path / "saved")
    export_folder(tmp_path / "saved", tmp_path / "out", layout=layout)
    with torch.no_grad():
        expected = model(**given).logits
    torch.testing.assert_close(opened("text-classification", tmp_path / "out", given), expected, rtol=1e-4, atol=1e-4)


@LAYOUTS
def test_sentence_transformers_embeds_texts(layout, tmp_path):
    torch.manual_seed(0)
    model = transformers.BertModel(
        transformers.BertConfig(vocab_size=len(WORDS), initializer_range=0.5, **SIZES)
    ).eval()
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    word_tokenizer().save_pretrained(saved)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write_modules(saved, ["Pooling", "Normalize"], Pooling=pooling)
    export_folder(saved, tmp_path / "out", layout=layout)
    given = word_tokenizer()(LINES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**given)[0]
    weights = given["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
    torch.testing.assert_close(opened("sentences", tmp_path / "out", LINES), expected, rtol=1e-4, atol=1e-5)


@LAYOUTS
def test_sentence_transformers_ranks_pairs(layout, tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), num_labels=1, initializer_range=0.3, **SIZES)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "saved")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None  # the library would make a message of each text
    tokenizer.save_pretrained(tmp_path / "saved")
    export_folder(tmp_path / "saved", tmp_path / "out", layout=layout)
    pairs = [["word1 word2", line] for line in LINES]
    first, second = map(list, zip(*pairs, strict=True))
    given = tokenizer(first, second, padding=True, return_token_type_ids=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**given).logits[:, 0].sigmoid()
    assert expected.max() - expected.min() > 1e-2
    torch.testing.assert_close(opened("pairs", tmp_path / "out", pairs), expected, rtol=1e-4, atol=1e-5)
