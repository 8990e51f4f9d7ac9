"""A folder with weights in few bits: measured at the export, measured again from what it holds, and it generates."""

import importlib.util
import json
import shutil

import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from tests.flatten.export.trained_model import trained_model
from yobx_flatten import OnnxGenerator, export_folder, verify_folder
from yobx_flatten.model_folder.source.configuration import small_model
from yobx_flatten.model_folder.texts import python_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("quantized") / "out"
    done = export_folder(trained_model(), path, quantize="int4", optimize="onnxruntime")
    report = done.reports["model.onnx"]
    assert report.operators["GroupQueryAttention"] > 0
    assert report.quality.perplexity_ratio < 1.03
    assert report.quality.text_tokens == 8 * 126  # of a row, one token is in the cache, and one more is only read
    assert str(report.quality) in str(done)
    return path


def test_the_quality_is_measured_again_from_the_folder(folder):
    stored = json.loads((folder / "yobx_flatten.json").read_text(encoding="utf-8"))["quality"]["model.onnx"]
    report = verify_folder(folder)
    assert report.ok
    assert [check.file for check in report.checks] == ["model.onnx", "generate"]
    found = report.checks[0].quality
    assert found.perplexity == pytest.approx(stored["perplexity"], rel=1e-6)
    assert found.model_perplexity == pytest.approx(stored["model_perplexity"], rel=1e-6)
    assert found.weights == stored["weights"] == "int4"


def test_a_file_with_other_weights_fails(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    model = onnx.load(broken / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_scales"):
            tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))
    onnx.save(model, broken / "model.onnx")
    report = verify_folder(broken)
    assert not report.checks[0].ok
    assert report.checks[0].quality.perplexity_ratio > 1.1


def test_the_folder_generates(folder):
    ids = torch.tensor([[108, 115, 104, 107, 106]])
    sequence = OnnxGenerator(folder, threads=1).generate(ids, max_new_tokens=12)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    feeds = {"input_ids": sequence[:, :-1].numpy(), "attention_mask": torch.ones_like(sequence[:, :-1]).numpy()}
    for node in session.get_inputs():
        if node.name.startswith("past_key_values"):
            feeds[node.name] = torch.zeros(1, 2, 0, 32).numpy()
        elif node.name == "position_ids":
            feeds[node.name] = torch.arange(sequence.shape[1] - 1)[None].numpy()
    scores = torch.from_numpy(session.run(["logits"], feeds)[0])[0, 4:]
    chosen = scores.gather(1, sequence[0, 5:, None])[:, 0]
    assert sequence.shape[1] == 17
    assert bool((scores.amax(-1) - chosen < 0.05).all())  # activations of one call are rounded in blocks of their own


@pytest.mark.slow  # the import of NNCF alone takes 3 seconds
def test_a_folder_for_openvino_is_measured_in_the_same_way(tmp_path):
    if importlib.util.find_spec("nncf") is None:
        pytest.skip("NNCF is not installed")
    done = export_folder(small_model("llama"), tmp_path / "out", target="openvino", quantize="int8")
    quality = done.reports["model.xml"].quality
    stored = json.loads((tmp_path / "out/yobx_flatten.json").read_text(encoding="utf-8"))
    assert (stored["runtime"], stored["quality"]["model.xml"]["weights"]) == ("openvino", "int8")
    assert quality.text_tokens == 8 * 126
    report = verify_folder(tmp_path / "out")
    assert report.ok
    assert [check.file for check in report.checks] == ["model.xml", "generate"]
    assert report.checks[0].quality.perplexity == pytest.approx(quality.perplexity, rel=1e-4)


def test_a_text_is_in_the_tokens_of_the_model(tmp_path):
    """Rows of 128, or as many as the model has room for; none for a vocabulary that is too small."""
    model = small_model("llama")
    assert python_text(model, None, 8).shape == (8, 128)
    model.config.max_position_embeddings = 40
    text = python_text(model, None, 3)
    assert text.shape == (3, 40)
    assert bytes((text[0, :20] - 3).tolist()) == b'"""Text wrapping and'
    model.config.vocab_size = 50
    assert python_text(model, None, 3) is None
    assert python_text(small_model("llama"), tmp_path, 3) is None  # no tokenizer there
