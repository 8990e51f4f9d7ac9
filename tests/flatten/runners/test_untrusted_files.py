"""Files are checked before anything of them runs, and machine code is loaded for a caller that trusts it."""

import functools
import json
import platform
import sys
import zipfile

import numpy as np
import onnx
import pytest
import torch

from yobx_flatten import DamagedFileError, ForeignFileError, GenerationError, InvalidArgumentError
from yobx_flatten.errors import UntrustedFileError
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


def test_a_package_is_loaded_for_a_caller_that_trusts_it(tmp_path):
    path = package(tmp_path / "m.pt2", **{KEY: IDS.to_json()})
    assert runtime_of(path) == "aotinductor"
    with pytest.raises(UntrustedFileError, match="trust=True"):
        open_runner(path)
    with pytest.raises(GenerationError, match=r"torch cannot load .*m\.pt2"):
        open_runner(path, trust=True)


OTHERS = {
    "without a signature": ({}, "was not written by to_aotinductor"),
    "for another system": ({KEY: IDS.to_json(), "AOTI_PLATFORM": "plan9"}, "compiled for the system plan9"),
    "for another processor": ({KEY: IDS.to_json(), "AOTI_MACHINE": "vax"}, "compiled for the processor vax"),
    "of another torch": (
        {KEY: Signature(IDS.inputs, IDS.outputs, versions={"torch": "1.0"}).to_json()},
        "compiled for torch 1.0",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_package_of_another_place_is_refused_before_it_is_loaded(tmp_path, what):
    metadata, message = OTHERS[what]
    with pytest.raises(ForeignFileError, match=message):
        open_runner(package(tmp_path / "m.pt2", **metadata), trust=True)


def test_registers_that_the_processor_lacks_are_refused(tmp_path, monkeypatch):
    """Such code would end the process."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    path = package(tmp_path / "m.pt2", **{KEY: IDS.to_json(), "AOTI_CPU_ISA": "AVX512 AVX512_VNNI"})
    with pytest.raises(ForeignFileError, match="one without AVX512"):
        open_runner(path, trust=True)


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


def test_a_truncated_package_is_refused(tmp_path):
    path = package(tmp_path / "m.pt2", **{KEY: IDS.to_json()})
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(GenerationError, match="cannot load"):
        open_runner(path, trust=True)


def test_a_package_with_changed_bytes_is_refused(tmp_path):
    path = package(tmp_path / "m.pt2", **{KEY: IDS.to_json()})
    path.write_bytes(path.read_bytes().replace(b"no library", b"a library "))
    with pytest.raises(DamagedFileError, match=r"m.pt2 is damaged: m/.*wrapper.so. Copy the file again"):
        open_runner(path, trust=True)


def test_a_signature_of_a_newer_version_says_what_to_do(tmp_path):
    newer = IDS.to_json().replace('"format": 1', '"format": 9')
    with pytest.raises(ForeignFileError, match=r"(?s)is of a newer version:.*pip install --upgrade yobx-flatten"):
        open_runner(package(tmp_path / "m.pt2", **{KEY: newer}), trust=True)


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


def test_a_file_that_is_no_package_or_not_there_is_named(tmp_path):
    (tmp_path / "m.pt2").write_text("no archive", encoding="utf-8")
    with pytest.raises(DamagedFileError, match=r"m\.pt2 cannot be read: File is not a zip file"):
        open_runner(tmp_path / "m.pt2", runtime="aotinductor", trust=True)
    with pytest.raises(GenerationError, match=r"There is no file .*none.pt2"):
        open_runner(tmp_path / "none.pt2", runtime="aotinductor", trust=True)


def test_an_unknown_runtime_or_suffix_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="Choose from onnxruntime, torch, aotinductor, executorch, openvino"):
        open_runner(tmp_path / "m.onnx", runtime="tflite")
    with pytest.raises(InvalidArgumentError, match=r"executorch runs files with the suffix \.pte"):
        open_runner(tmp_path / "m.onnx", runtime="executorch")
    with pytest.raises(InvalidArgumentError, match=r"its suffix is none of \.onnx, \.pt2"):
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
    ports = [onnx.helper.make_tensor_value_info(name, 1, [4]) for name in "xy"]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight]
    )
    path = folder / "m.onnx"
    version = onnx.helper.make_opsetid("", 18)
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=[version], ir_version=10).SerializeToString())
    with pytest.raises((DamagedFileError, GenerationError), match=r"outside|validation failed"):
        open_runner(path, runtime=runtime)
