"""Files that other exporters and runtimes really wrote, next to their model: right ones, and each planted fault."""

import shutil

import numpy
import onnx
import pytest
import torch
from onnx import numpy_helper

from yobx_flatten import Case, export_program
from yobx_flatten.verify import verify_file

from .peer_files import WRITTEN, llama, mistral, t5
from .test_planted_faults import (
    clipped_tokens,
    first_row_for_all,
    permuted_head,
    renamed,
    small_linear,
    small_mistral,
    stale_cache,
    stale_mask,
    written,
    wrong_axis,
    wrong_position,
)


def changed(model):
    with torch.no_grad():
        next(model.parameters())[5] += 0.2
    return model


def test_files_of_optimum_are_right_and_are_found_in_folders(tmp_path):
    """optimum's encoder, and its two decoders in one file: a cache is read, and none is.

    mobius writes one folder for each component, as here.
    """
    for part in ("encoder_model", "decoder_model_merged"):
        (tmp_path / part).mkdir()
        shutil.copy(WRITTEN / "optimum" / f"{part}.onnx", tmp_path / part / "model.onnx")
    report = verify_file(tmp_path, t5())
    assert sorted(report.files) == ["decoder_model_merged/model.onnx", "encoder_model/model.onnx"]
    assert report.ok is True, str(report)
    merged = report.files["decoder_model_merged/model.onnx"]
    assert merged.report.input_names[-1] == "use_cache_branch"
    assert merged.call == "decoder_model, decoder_with_past_model", "both branches"
    assert len(merged.report.cases) >= 6
    assert [case.steps for case in merged.report.cases] == [1, 1, 1, 3, 3, 3], "a loop over the file's own cache"


def test_a_folder_of_optimum_with_another_weight_is_wrong():
    report = verify_file(WRITTEN / "optimum", changed(t5()), explain=False)
    assert report.ok is False
    assert all(one.ok is False for one in report.files.values()), str(report)


def test_a_file_of_genai_is_right_where_it_runs():
    """The builder's attention reads one row where several tokens follow a cache; those cases are errors."""
    (one,) = verify_file(WRITTEN / "genai", llama(), explain=False).files.values()
    assert one.ok is False, "other cases do not run"
    ran = [case for case in one.report.cases if case.error is None]
    assert [case.case for case in ran] == ["batch 3, past 6, new 1", "batch 1, past 9, new 3"], str(one)
    assert all(case.within(one.report.tolerance) and case.steps == 3 for case in ran), str(one)
    assert all("batch_size must be 1" in case.error for case in one.report.failed()), str(one)
    (other,) = verify_file(WRITTEN / "genai", changed(llama()), explain=False).files.values()
    assert not any(case.within(other.report.tolerance) for case in other.report.cases)


def test_a_file_of_openvino_is_compared(tmp_path):
    openvino = pytest.importorskip("openvino")
    model, path = small_mistral(), tmp_path / "model.onnx"
    written(model, path)
    (tmp_path / "openvino").mkdir()
    openvino.save_model(openvino.convert_model(path), tmp_path / "openvino" / "model.xml", compress_to_fp16=False)
    (one,) = verify_file(tmp_path / "openvino", model).files.values()
    assert one.ok is True, str(one)
    assert {case.runtime for case in one.report.cases} == {"openvino"}
    assert verify_file(tmp_path / "openvino", small_mistral(window=None)).ok is False


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*TracerWarning")
@pytest.mark.parametrize("compressed", [False, True])
def test_a_module_that_openvino_converted_is_compared(compressed, tmp_path):
    openvino = pytest.importorskip("openvino")
    linear, x = small_linear()
    converted = openvino.convert_model(linear, example_input=x)
    openvino.save_model(converted, tmp_path / "model.xml", compress_to_fp16=compressed)
    cases = [Case("the example", (x,)), Case("seven rows", (torch.randn(7, 3),))]
    (one,) = verify_file(tmp_path / "model.xml", linear, cases=cases).files.values()
    assert one.ok is True, str(one)
    assert [case.case for case in one.report.cases] == ["the example", "seven rows"]
    assert one.report.tolerance == (6e-2 if compressed else 1e-4)
    with torch.no_grad():
        linear[0].weight[1, 1] += 0.02
    assert verify_file(tmp_path / "model.xml", linear, cases=cases).ok is False


def test_a_file_of_executorch_is_compared(tmp_path):
    pytest.importorskip("executorch", reason="ExecuTorch is not installed: make executorch runs this test")
    linear, x = small_linear()
    program = export_program(linear, (x,), dynamic_shapes=None)
    program.to_executorch(tmp_path / "model.pte", backend="portable")
    cases = [Case("the example", (x,)), Case("other values", (torch.randn(4, 3),))]
    (one,) = verify_file(tmp_path / "model.pte", linear, cases=cases).files.values()
    assert one.ok is True, str(one)
    assert {case.runtime for case in one.report.cases} == {"executorch"}
    torch.nn.init.ones_(linear[0].weight)
    assert verify_file(tmp_path / "model.pte", linear, cases=cases).ok is False


@pytest.mark.filterwarnings("ignore:.*read_binary:DeprecationWarning")  # its exporter reads files of its own so
def test_a_file_that_executorch_wrote_by_itself_is_compared(tmp_path):
    pytest.importorskip("executorch", reason="ExecuTorch is not installed: make executorch runs this test")
    from executorch.exir import to_edge

    linear, x = small_linear()
    program = to_edge(torch.export.export(linear, (x,))).to_executorch()
    (tmp_path / "model.pte").write_bytes(program.buffer)
    cases = [Case("the example", (x,)), Case("seven rows", (torch.randn(7, 3),))]
    (one,) = verify_file(tmp_path / "model.pte", linear, cases=cases).files.values()
    assert one.ok is True, str(one)
    assert "the file fixes axis 0 of input at 4" in str(one)
    torch.nn.init.ones_(linear[0].weight)
    assert verify_file(tmp_path / "model.pte", linear, cases=cases).ok is False
    (tmp_path / "model.pte").write_bytes(b"no program")
    assert "is not a file of ExecuTorch" in str(verify_file(tmp_path / "model.pte", linear, cases=cases))


FILES = {
    "optimum/encoder_model": t5,
    "optimum/decoder_model_merged": t5,
    "genai/model": llama,
    "torch/model": llama,
    "mobius/model": llama,
    "transformers/prefill": mistral,
    "transformers/decode": mistral,
}


def changed_constant(proto, name, change):
    (held,) = (tensor for tensor in proto.graph.initializer if tensor.name == name)
    held.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(held).copy()), name))


def larger_epsilon(proto):
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = 1e-3


def exchanged_columns(values):
    return values[:, [*range(16, 32), *range(16), *range(32, values.shape[1])]]


SWAPPED = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}

FAULTS = {
    "features turned round": ("optimum/encoder_model", lambda proto: wrong_axis(proto, "last_hidden_state", 1)),
    "stale mask": ("optimum/encoder_model", stale_mask),
    "rounded weight": (
        "optimum/decoder_model_merged",
        lambda proto: changed_constant(proto, "onnx::MatMul_574_merged_0", lambda values: values.round(2)),
    ),
    "stale cache": ("optimum/decoder_model_merged", lambda proto: stale_cache(proto, "present.0.decoder.value")),
    "permuted head of the cache": ("genai/model", permuted_head),
    "keys for values": ("genai/model", lambda proto: renamed(proto, SWAPPED)),
    "positions off by one": (
        "genai/model",
        lambda proto: changed_constant(proto, "cos_cache", lambda values: numpy.roll(values, 1, axis=0)),
    ),
    "clipped tokens": ("torch/model", lambda proto: clipped_tokens(proto, 30)),
    "first row for all": ("torch/model", lambda proto: first_row_for_all(proto, proto.graph.output[0].name)),
    "stale mask of a decoder": ("torch/model", stale_mask),
    "permuted heads of a weight": (
        "mobius/model",
        lambda proto: changed_constant(proto, "model.layers.0.self_attn.q_proj.weight_t", exchanged_columns),
    ),
    "larger epsilon": ("mobius/model", larger_epsilon),
    "stale keys": ("mobius/model", lambda proto: stale_cache(proto, "present.0.key")),
    "lost window": (
        "transformers/prefill",
        lambda proto: changed_constant(proto, "val_39", lambda values: values * 1000),
    ),
    "positions of zero": ("transformers/decode", wrong_position),
    "scores turned round": ("transformers/decode", lambda proto: wrong_axis(proto, "logits", 2)),
}


def loaded(file):
    return onnx.load(WRITTEN / f"{file}.onnx")


def wrong_values(proto, file, tmp_path):
    onnx.save(proto, tmp_path / "model.onnx")
    (one,) = verify_file(tmp_path / "model.onnx", FILES[file](), explain=False).files.values()
    assert one.report is not None, str(one)
    ran = [case for case in one.report.cases if case.error is None or "expected shape" in case.error]
    assert ran, str(one)
    return [case.case for case in ran if not case.within(one.report.tolerance)]


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_a_peer_is_right(file, tmp_path):
    """Nothing is wrong in what the exporters wrote: a fault that is found below is the planted one."""
    assert wrong_values(loaded(file), file, tmp_path) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_file_of_a_peer_is_found(fault, tmp_path):
    file, plant = FAULTS[fault]
    proto = loaded(file)
    plant(proto)
    assert wrong_values(proto, file, tmp_path) != []
