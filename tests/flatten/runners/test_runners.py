"""Everything that runs exported files does the same: devices, buffers and imports of runtimes among it."""

import shutil
from types import SimpleNamespace

import numpy
import onnxruntime
import pytest
import torch

from tests.cache_words import WORD, cache_of
from tests.flatten.export.exported_files import exported_file
from tests.flatten.model_folder.exported_folders import exported
from tests.models import make_model
from yobx_flatten import (
    DecodeSizes,
    GenerationError,
    ReplayError,
    decode_inputs,
    export_onnx,
    open_model,
    verify_folder,
)
from yobx_flatten.errors import InvalidArgumentError, MissingDependencyError
from yobx_flatten.runners.in_place import TensorBuffers
from yobx_flatten.runners.onnx_session import CPU, check_runs_on, choose_providers, is_on_cpu, only_for_onnxruntime
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


@pytest.fixture
def every_provider(monkeypatch):
    names = [CPU, "CUDAExecutionProvider", "OpenVINOExecutionProvider", "DmlExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)


@pytest.mark.usefixtures("every_provider")
@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, [CPU]),
        ("cpu", [CPU]),
        ("cuda", ["CUDAExecutionProvider", CPU]),
        ("cuda:1", [("CUDAExecutionProvider", {"device_id": "1"}), CPU]),
        ("openvino:GPU", [("OpenVINOExecutionProvider", {"device_type": "GPU"}), CPU]),
        ("directml", ["DmlExecutionProvider", CPU]),
    ],
)
def test_a_device_stands_for_a_provider_with_the_cpu_behind_it(device, expected):
    assert choose_providers(device, None) == expected
    assert is_on_cpu(expected) == (expected == [CPU])


@pytest.mark.usefixtures("every_provider")
def test_providers_are_taken_as_they_are():
    options = ("CUDAExecutionProvider", {"device_id": 3})
    assert choose_providers(None, [options]) == [options, CPU]
    assert choose_providers(None, [CPU]) == [CPU]


def test_a_provider_that_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(MissingDependencyError, match=r"no CUDAExecutionProvider[\s\S]+pip install onnxruntime-gpu"):
        choose_providers("cuda", None)


@pytest.mark.usefixtures("every_provider")
def test_unknown_devices_and_two_answers_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"no device 'gpu'\. Choose from cpu, cuda"):
        choose_providers("gpu", None)
    with pytest.raises(InvalidArgumentError, match="cpu has no numbered devices"):
        choose_providers("cpu:1", None)
    with pytest.raises(InvalidArgumentError, match="Pass device= or providers=, not both"):
        choose_providers("cuda", [CPU])
    with pytest.raises(InvalidArgumentError, match="a list of names"):
        choose_providers(None, CPU)
    with pytest.raises(InvalidArgumentError, match="these files run with openvino"):
        only_for_onnxruntime("openvino", "cuda", None)
    only_for_onnxruntime("openvino", "cpu", None)


def test_a_provider_that_did_not_start_is_an_error():
    """onnxruntime goes on with the CPU, and says so in its log only."""
    session = SimpleNamespace(get_providers=lambda: [CPU])
    with pytest.raises(GenerationError, match=r"CUDAExecutionProvider did not start for model\.onnx"):
        check_runs_on(session, ["CUDAExecutionProvider", CPU], "model.onnx")


@pytest.mark.slow
@pytest.mark.skipif("OpenVINOExecutionProvider" not in onnxruntime.get_available_providers(), reason="another build")
def test_a_second_provider_generates_the_tokens_of_the_model():
    """Where onnxruntime-openvino is installed: the cache crosses between calls, and the folder is verified there."""
    model, folder = exported("gemma3_text")
    ids = torch.randint(4, 258, (2, 7), generator=torch.Generator().manual_seed(0))
    found = open_model(folder, device="openvino").generate(ids, max_new_tokens=20, do_sample=False)
    assert found.tolist() == model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    assert verify_folder(folder, device="openvino").ok


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0]], ids=["as many rows", "more rows"])
def test_rows_are_selected_without_a_write_to_the_caller(rows):
    given = {name: torch.randn(2, 3, 4, 5) for name in ("key", "value")}
    before = {name: tensor.clone() for name, tensor in given.items()}
    buffers = TensorBuffers(dict(given), {"key": "present_key", "value": "present_value"})
    buffers.select_rows(torch.tensor(rows))
    found = buffers.tensors()
    buffers.reserve(1)
    for name, tensor in before.items():
        assert torch.equal(found[name], tensor[rows])
        assert torch.equal(buffers.tensors()[name], tensor[rows])
        buffers[name].zero_()
        assert torch.equal(given[name], tensor)
