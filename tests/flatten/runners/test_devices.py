"""Devices of onnxruntime by name, and what is refused: the CPU never stands in for another one silently."""

from types import SimpleNamespace

import onnxruntime
import pytest
import torch

from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import open_model, verify_folder
from yobx_flatten.errors import GenerationError, InvalidArgumentError, MissingDependencyError
from yobx_flatten.runners.onnx_session import CPU, check_runs_on, choose_providers, is_on_cpu, only_for_onnxruntime


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
