"""Other libraries open an exported folder as it is, and return what the model returns: ``make clients``."""

import json
import os
import pathlib
import subprocess

import numpy
import pytest
import torch

from tests.flatten.model_folder.exported_folders import bert_folder, lively, mean_embeddings, word_tokenizer
from tests.flatten.model_folder.test_sentence import MEAN, write_modules
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


@LAYOUTS
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "t5", "whisper"])
def test_optimum_generates_the_tokens_of_the_model(name, layout, tmp_path):
    model, task = small_model(name), "text-generation"
    ids = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]])
    given = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])}
    if name == "t5":  # encoders are padded on the right
        task, given["attention_mask"] = "text2text-generation", given["attention_mask"].flip(1)
    if name == "whisper":  # optimum takes the heads of the encoder for those of a joined decoder, as in Whisper's files
        model.config.encoder_attention_heads = model.config.decoder_attention_heads
        model, task = type(model)(model.config).eval(), "automatic-speech-recognition"
        values = (torch.arange(3200, dtype=torch.float64) ** 2 * 0.37).sin().float()
        given = {"input_features": values.reshape(2, 16, 100)}
    export_folder(lively(model), tmp_path / "out", layout=layout)
    wanted = model.generate(**given, max_new_tokens=12, do_sample=False)
    assert len(set(wanted[0].tolist())) > 3
    assert opened(task, tmp_path / "out", given).tolist() == wanted.tolist()


@LAYOUTS
def test_optimum_returns_the_scores_of_a_classifier(layout, tmp_path):
    kind = "BertForSequenceClassification"
    model = bert_folder(tmp_path / "saved", kind, num_labels=3, initializer_range=0.5)
    given = dict(word_tokenizer()(LINES, padding=True, return_tensors="pt"))
    export_folder(tmp_path / "saved", tmp_path / "out", layout=layout)
    with torch.no_grad():
        expected = model(**given).logits
    torch.testing.assert_close(opened("text-classification", tmp_path / "out", given), expected, rtol=1e-4, atol=1e-4)


@LAYOUTS
def test_sentence_transformers_embeds_texts(layout, tmp_path):
    saved = tmp_path / "saved"
    model = bert_folder(saved, initializer_range=0.5)
    write_modules(saved, ["Pooling", "Normalize"], Pooling=MEAN)
    export_folder(saved, tmp_path / "out", layout=layout)
    expected = mean_embeddings(model, word_tokenizer()(LINES, padding=True, return_tensors="pt"))
    torch.testing.assert_close(opened("sentences", tmp_path / "out", LINES), expected, rtol=1e-4, atol=1e-5)


@LAYOUTS
def test_sentence_transformers_ranks_pairs(layout, tmp_path):
    kind = "BertForSequenceClassification"
    model = bert_folder(tmp_path / "saved", kind, num_labels=1, initializer_range=0.3)
    tokenizer = word_tokenizer()
    (tmp_path / "saved/chat_template.jinja").unlink()  # the library would make a message of each text
    export_folder(tmp_path / "saved", tmp_path / "out", layout=layout)
    pairs = [["word1 word2", line] for line in LINES]
    first, second = map(list, zip(*pairs, strict=True))
    given = tokenizer(first, second, padding=True, return_token_type_ids=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**given).logits[:, 0].sigmoid()
    assert expected.max() - expected.min() > 1e-2
    torch.testing.assert_close(opened("pairs", tmp_path / "out", pairs), expected, rtol=1e-4, atol=1e-5)
