"""Everything that runs exported files does the same: inputs by name in, outputs by name out, the cache fed back."""

import shutil

import numpy
import onnxruntime
import pytest
import torch

from tests.cache_words import WORD, cache_of
from tests.flatten.export.exported_files import exported_file
from tests.models import make_model
from yobx_flatten import (
    DecodeSizes,
    GenerationError,
    ReplayError,
    decode_inputs,
    export_onnx,
)
from yobx_flatten.runners.open import open_runner

pytestmark = pytest.mark.slow

SUFFIXES = [".onnx", ".pt2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    exported, folder = exported_file("llama"), tmp_path_factory.mktemp("runners")
    shutil.copy(exported.path, folder / "model.onnx")
    exported.save(folder / "model.pt2")
    return make_model("llama"), folder


def _by_name(model):
    inputs = decode_inputs(model, DecodeSizes(batch=3, past=4, new=1), seed=1)
    layers = cache_of(inputs).layers
    named = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    for number, layer in enumerate(layers):
        named |= {f"past_key_values.{number}.key": layer.keys, f"past_key_values.{number}.value": layer.values}
    named = {name: tensor.clone() for name, tensor in named.items()}
    with torch.no_grad():
        found = model(**inputs)
    expected = {"logits": found.logits}
    for number, layer in enumerate(cache_of(found).layers):
        expected |= {f"present.{number}.key": layer.keys, f"present.{number}.value": layer.values}
    return named, expected


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_call_returns_what_the_model_returns(files, suffix):
    model, folder = files
    named, expected = _by_name(model)
    runner = open_runner(folder / f"model{suffix}", trust=True)
    assert list(runner.ports) == list(named)
    assert list(runner.outputs) == list(expected)
    torch.testing.assert_close(runner.run({**named, "other": None}), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_step_hands_its_cache_to_the_next(files, suffix):
    model, folder = files
    named, expected = _by_name(model)
    runner = open_runner(folder / f"model{suffix}", trust=True)
    slots = {slot.port.name for slot in runner.slots}
    assert slots == {name for name in named if name.startswith("past_key_values.")}
    feeds = {name: value for name, value in named.items() if name not in slots}
    outputs, cache = runner.step(feeds, runner.cache({name: named[name] for name in slots}))
    torch.testing.assert_close(outputs, {"logits": expected["logits"]}, atol=1e-4, rtol=0)
    token = torch.tensor([[5], [6], [7]])
    feeds = {"input_ids": token, "attention_mask": torch.cat([feeds["attention_mask"], torch.ones_like(token)], dim=1)}
    again, _ = runner.step(feeds, cache)
    inputs = decode_inputs(model, DecodeSizes(batch=3, past=4, new=1), seed=1)
    with torch.no_grad():
        past = cache_of(model(**inputs))
        wanted = model(**feeds, **{WORD: past}).logits
    torch.testing.assert_close(again["logits"], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_file_refuses_is_an_error_of_ours(files, suffix):
    model, folder = files
    named, _ = _by_name(model)
    runner = open_runner(folder / f"model{suffix}", trust=True)
    slots = {slot.port.name for slot in runner.slots}
    wrong = {**named, "input_ids": torch.full((3, 1), 1000)}
    with pytest.raises(ReplayError, match="fails on the inputs of the case"):
        runner.run(wrong)
    feeds = {name: value for name, value in wrong.items() if name not in slots}
    with pytest.raises(GenerationError, match=f"model{suffix} stopped"):
        runner.step(feeds, runner.cache({name: named[name] for name in slots}))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_cannot_be_opened_is_named(tmp_path, suffix):
    with pytest.raises(GenerationError, match=f"There is no file .*none{suffix}"):
        open_runner(tmp_path / f"none{suffix}")
    (tmp_path / f"bad{suffix}").write_bytes(b"no model")
    with pytest.raises(ReplayError, match=f"cannot load .*bad{suffix}"):
        open_runner(tmp_path / f"bad{suffix}", failure=ReplayError, trust=True)


def test_an_array_of_another_type_is_refused(tmp_path):
    """NumPy's float64 is not made smaller in silence; a number of Python, which has no type, is."""
    model = torch.nn.Linear(3, 2)
    export_onnx(model, (), {"input": torch.ones(2, 3)}, tmp_path / "m.onnx", cases=[])
    runner = open_runner(tmp_path / "m.onnx")
    x = numpy.arange(6.0).reshape(2, 3)
    with pytest.raises(ReplayError, match="takes input as float32, but its value is of float64"):
        runner.run({"input": x})
    (found,) = runner.run({"input": x.astype(numpy.float32)}).values()
    torch.testing.assert_close(torch.as_tensor(found), model(torch.as_tensor(x).float()))


def test_a_session_gets_the_caller_s_options_and_providers(files):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model, folder = files
    named, expected = _by_name(model)
    runner = open_runner(folder / "model.onnx", options=options, providers=["CPUExecutionProvider"])
    assert runner._session.get_session_options().intra_op_num_threads == 1
    assert runner._session.get_providers() == ["CPUExecutionProvider"]
    torch.testing.assert_close(runner.run(named)["logits"], expected["logits"], atol=1e-4, rtol=0)
