"""Everything that runs exported files does the same; files are checked first, machine code is loaded on trust."""

import functools
import json
import os
import platform
import shutil
import sys
import zipfile
from types import SimpleNamespace

import numpy
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests import fresh_process
from tests.cache_words import WORD, cache_of
from tests.flatten.export.exported_files import exported_file
from tests.flatten.model_folder.exported_folders import exported
from tests.models import make_model
from yobx_flatten import DamagedFileError, DecodeSizes, decode_inputs, export_onnx, open_model, verify_folder
from yobx_flatten.errors import (
    ForeignFileError,
    GenerationError,
    InvalidArgumentError,
    MissingDependencyError,
    ReplayError,
    UntrustedFileError,
)
from yobx_flatten.runners.in_place import TensorBuffers
from yobx_flatten.runners.onnx_session import CPU, check_runs_on, choose_providers, is_on_cpu, only_for_onnxruntime
from yobx_flatten.runners.open import open_runner, runtime_of
from yobx_flatten.runners.signature import KEY, Signature, as_tensor

HERE = {"torch": torch.__version__.split("+")[0]}
IDS = Signature([("input_ids", torch.int64, ({"s0": 1}, {"s1": 1, "": 2}))], ["logits"], {"s0": 4}, {}, HERE)


def package(path, **metadata):
    about = {"AOTI_PLATFORM": sys.platform, "AOTI_MACHINE": platform.machine(), **metadata}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data/aotinductor/model/c.wrapper_metadata.json", json.dumps(about))
        archive.writestr("m/data/aotinductor/model/c.wrapper.so", b"no library")
    return path


def test_a_package_is_loaded_for_a_caller_that_trusts_it_and_whole(tmp_path):
    path = package(tmp_path / "m.pt2", **{KEY: IDS.to_json()})
    assert runtime_of(path) == "aotinductor"
    with pytest.raises(UntrustedFileError, match="trust=True"):
        open_runner(path)
    with pytest.raises(GenerationError, match=r"torch cannot load .*m\.pt2"):
        open_runner(path, trust=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(GenerationError, match="cannot load"):
        open_runner(path, trust=True)
    path.write_bytes(whole.replace(b"no library", b"a library "))
    with pytest.raises(DamagedFileError, match=r"m.pt2 is damaged: m/.*wrapper.so. Copy the file again"):
        open_runner(path, trust=True)
    path.write_text("no archive", encoding="utf-8")
    with pytest.raises(DamagedFileError, match=r"m\.pt2 cannot be read: File is not a zip file"):
        open_runner(path, runtime="aotinductor", trust=True)
    with pytest.raises(GenerationError, match=r"There is no file .*none.pt2"):
        open_runner(tmp_path / "none.pt2", runtime="aotinductor", trust=True)


OTHERS = {
    "without a signature": ({}, "was not written by to_aotinductor"),
    "for another system": ({KEY: IDS.to_json(), "AOTI_PLATFORM": "plan9"}, "compiled for the system plan9"),
    "for another processor": ({KEY: IDS.to_json(), "AOTI_MACHINE": "vax"}, "compiled for the processor vax"),
    # such code would end the process
    "for other registers": ({KEY: IDS.to_json(), "AOTI_CPU_ISA": "AVX512 AVX512_VNNI"}, "one without AVX512"),
    "of another torch": (
        {KEY: Signature(IDS.inputs, IDS.outputs, versions={"torch": "1.0"}).to_json()},
        "compiled for torch 1.0",
    ),
    "of a newer version": (
        {KEY: IDS.to_json().replace('"format": 1', '"format": 9')},
        "(?s)is for a newer yobx-flatten:.*pip install --upgrade yobx-flatten",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_package_of_another_place_is_refused_before_it_is_loaded(tmp_path, what, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    metadata, message = OTHERS[what]
    with pytest.raises(ForeignFileError, match=message):
        open_runner(package(tmp_path / "m.pt2", **metadata), trust=True)


RELATION = IDS.to_json()[:-1] + ', "relations": [%s]}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 1, "inputs": [["x", "save", []]]}',
        RELATION % '["**", "s0", 9]',
        RELATION % '["==", "s0"]',
        RELATION % '["+", "s0", 1]',
        RELATION % '["==", "s0", ["//", 1.5, 2]]',
    ],
)
def test_a_damaged_signature_is_refused(tmp_path, text):
    with pytest.raises(DamagedFileError, match="signature"):
        open_runner(package(tmp_path / "m.pt2", **{KEY: text}), trust=True)


def test_an_input_has_the_type_of_the_file():
    as_int = functools.partial(as_tensor, "count", torch.int64, failure=GenerationError, where="m.pt2")
    assert as_int(value=3).equal(torch.tensor(3))
    assert as_int(value=np.arange(6).reshape(2, 3).T).equal(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    with pytest.raises(GenerationError, match=r"m.pt2 needs count as int64, but it is float32"):
        as_int(value=torch.ones(2))
    with pytest.raises(GenerationError, match=r"m.pt2 needs count, which is missing"):
        as_int(value=None)


def test_a_foreign_file_of_executorch_is_refused(tmp_path):
    pytest.importorskip("executorch")
    (tmp_path / "m.pte").write_bytes(b"PK\x03\x04 no program at all")
    with pytest.raises(ForeignFileError, match="not a file of ExecuTorch"):
        open_runner(tmp_path / "m.pte")
    (tmp_path / "t.pte").write_bytes(b"\x10\x00\x00\x00ET12" + bytes(64))
    with pytest.raises(DamagedFileError, match="damaged"):
        open_runner(tmp_path / "t.pte")
    with pytest.raises(GenerationError, match="There is no file"):
        open_runner(tmp_path / "none.pte")


def test_a_damaged_file_of_openvino_is_refused(tmp_path):
    pytest.importorskip("openvino")
    (tmp_path / "m.xml").write_text("<net name='m' version='11'><layers>", encoding="utf-8")
    with pytest.raises(DamagedFileError, match="OpenVINO cannot read"):
        open_runner(tmp_path / "m.xml")
    with pytest.raises(GenerationError, match="There is no file"):
        open_runner(tmp_path / "none.xml")


def test_an_unknown_runtime_or_suffix_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="Choose from onnxruntime, torch, aotinductor, executorch, openvino"):
        open_runner(tmp_path / "m.onnx", runtime="tflite")
    with pytest.raises(InvalidArgumentError, match=r"executorch runs files with the suffix \.pte"):
        open_runner(tmp_path / "m.onnx", runtime="executorch")
    with pytest.raises(InvalidArgumentError, match=r"its suffix must be one of \.onnx, \.pt2"):
        open_runner(tmp_path / "m.bin")


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("way", ["absolute", "upwards", "link"])
def test_weights_of_another_folder_are_not_read(tmp_path, runtime, way):
    pytest.importorskip(runtime)
    folder, secret = tmp_path / "folder", tmp_path / "secret.bin"
    folder.mkdir()
    secret.write_bytes(np.ones(4, np.float32).tobytes())
    (folder / "link.bin").symlink_to(secret)
    location = {"absolute": str(secret), "upwards": "../secret.bin", "link": "link.bin"}[way]
    weight = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": "16"}.items():
        weight.external_data.add(key=key, value=value)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [4]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    path = folder / "m.onnx"
    version = onnx.helper.make_opsetid("", 18)
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=[version], ir_version=10).SerializeToString())
    with pytest.raises((DamagedFileError, GenerationError), match=r"outside|validation failed"):
        open_runner(path, runtime=runtime)


OPENS = """
import sys
forks = []
sys.addaudithook(lambda event, args: forks.append(event) if event == "os.fork" else None)
from yobx_flatten.runners.openvino_runner import import_openvino
import_openvino().Core()
import threading
for thread in threading.enumerate():
    if thread is not threading.main_thread() and not thread.daemon:
        thread.join(5)
print(forks, "openvino_telemetry" in sys.modules)
"""


def test_openvino_is_imported_without_its_reports_of_use():
    """In a fresh process: nothing is sent, nothing forks, and the name of what sends is as it was."""
    pytest.importorskip("openvino")
    assert fresh_process.run("-c", OPENS, env={**os.environ, "CI": ""}).stdout.split() == ["[]", "False"]


def test_a_call_that_openvino_refuses_states_the_reason(tmp_path):
    """It stands after the places in OpenVINO's sources, which are the first lines of its message."""
    openvino = pytest.importorskip("openvino")
    from openvino import opset13

    given = opset13.parameter([-1, -1], np.float32)
    shaped = opset13.reshape(given, opset13.constant(np.array([2, 3])), False)
    for node, name in ((given, "given"), (shaped, "shaped")):
        node.output(0).get_tensor().set_names({name})
    openvino.save_model(openvino.Model([shaped], [given], "file"), tmp_path / "file.xml")
    with pytest.raises(ReplayError, match=r"these inputs: .*the shape of input data \(5.2\) conflicts with .*\(2.3\)$"):
        open_runner(tmp_path / "file.xml").run({"given": torch.ones(5, 2)})


SUFFIXES = [".onnx", ".pt2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    exported, folder = exported_file("llama"), tmp_path_factory.mktemp("runners")
    shutil.copy(exported.path, folder / "model.onnx")
    exported.save(folder / "model.pt2")
    return make_model("llama"), folder


def _by_name(model):
    inputs = decode_inputs(model, DecodeSizes(batch=3, past=4, new=1), seed=1)
    named = {name: inputs[name].clone() for name in ("input_ids", "attention_mask")}
    for number, layer in enumerate(cache_of(inputs).layers):
        named[f"past_key_values.{number}.key"] = layer.keys.clone()
        named[f"past_key_values.{number}.value"] = layer.values.clone()
    with torch.no_grad():
        found = model(**inputs)
    expected = {"logits": found.logits}
    for number, layer in enumerate(cache_of(found).layers):
        expected |= {f"present.{number}.key": layer.keys, f"present.{number}.value": layer.values}
    return named, expected


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_call_returns_what_the_model_returns_and_a_step_hands_its_cache_to_the_next(files, suffix):
    model, folder = files
    named, expected = _by_name(model)
    runner = open_runner(folder / f"model{suffix}", trust=True)
    assert list(runner.ports) == list(named)
    assert list(runner.outputs) == list(expected)
    torch.testing.assert_close(runner.run({**named, "other": None}), expected, atol=1e-4, rtol=0)
    slots = {slot.port.name for slot in runner.slots}
    assert slots == {name for name in named if name.startswith("past_key_values.")}
    feeds = {name: value for name, value in named.items() if name not in slots}
    outputs, cache = runner.step(feeds, runner.cache({name: named[name] for name in slots}))
    torch.testing.assert_close(outputs, {"logits": expected["logits"]}, atol=1e-4, rtol=0)
    token = torch.tensor([[5], [6], [7]])
    feeds = {"input_ids": token, "attention_mask": torch.cat([feeds["attention_mask"], torch.ones_like(token)], dim=1)}
    again, _ = runner.step(feeds, cache)
    with torch.no_grad():
        past = cache_of(model(**decode_inputs(model, DecodeSizes(batch=3, past=4, new=1), seed=1)))
        wanted = model(**feeds, **{WORD: past}).logits
    torch.testing.assert_close(again["logits"], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_a_file_refuses_is_an_error_of_ours_and_one_that_cannot_be_opened_is_named(files, suffix, tmp_path):
    model, folder = files
    named, _ = _by_name(model)
    runner = open_runner(folder / f"model{suffix}", trust=True)
    slots = {slot.port.name for slot in runner.slots}
    wrong = {**named, "input_ids": torch.full((3, 1), 1000)}
    with pytest.raises(ReplayError, match="fails on these inputs"):
        runner.run(wrong)
    feeds = {name: value for name, value in wrong.items() if name not in slots}
    with pytest.raises(GenerationError, match=f"model{suffix} stopped"):
        runner.step(feeds, runner.cache({name: named[name] for name in slots}))
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
    with pytest.raises(ReplayError, match="Input input must be float32, found float64"):
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
    ("device", "providers", "expected"),
    [
        (None, None, [CPU]),
        ("cpu", None, [CPU]),
        ("cuda", None, ["CUDAExecutionProvider", CPU]),
        ("cuda:1", None, [("CUDAExecutionProvider", {"device_id": "1"}), CPU]),
        ("openvino:GPU", None, [("OpenVINOExecutionProvider", {"device_type": "GPU"}), CPU]),
        ("directml", None, ["DmlExecutionProvider", CPU]),
        (None, [("CUDAExecutionProvider", {"device_id": 3})], [("CUDAExecutionProvider", {"device_id": 3}), CPU]),
        (None, [CPU], [CPU]),
    ],
)
def test_a_device_stands_for_a_provider_with_the_cpu_behind_it(device, providers, expected):
    assert choose_providers(device, providers) == expected
    assert is_on_cpu(expected) == (expected == [CPU])


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
    with pytest.raises(InvalidArgumentError, match="openvino runs these files"):
        only_for_onnxruntime("openvino", "cuda", None)
    only_for_onnxruntime("openvino", "cpu", None)


def test_a_provider_that_is_not_installed_or_did_not_start_is_an_error(monkeypatch):
    """onnxruntime goes on with the CPU, and says so in its log only."""
    session = SimpleNamespace(get_providers=lambda: [CPU])
    with pytest.raises(GenerationError, match=r"CUDAExecutionProvider did not start for model\.onnx"):
        check_runs_on(session, ["CUDAExecutionProvider", CPU], "model.onnx")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(MissingDependencyError, match=r"no CUDAExecutionProvider[\s\S]+pip install onnxruntime-gpu"):
        choose_providers("cuda", None)


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
