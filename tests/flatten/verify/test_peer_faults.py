"""Faults in files that other exporters wrote: each of them is found, and the files themselves are right."""

import numpy
import onnx
import pytest
from onnx import numpy_helper

from yobx_flatten.verify import verify_file

from .peer_files import WRITTEN, llama, mistral, t5
from .test_planted_faults import (
    clipped_tokens,
    first_row_for_all,
    permuted_head,
    renamed,
    stale_cache,
    stale_mask,
    wrong_axis,
    wrong_position,
)

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
