"""SmolLM2-135M-Instruct in 4 bits, where a folder with it is named: the most wanted file is written, and is near it."""

import os
import pathlib

import pytest

from yobx_flatten import export_folder

FOLDER = os.environ.get("SMOLLM2_FOLDER", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="SMOLLM2_FOLDER names no folder; docs/guide/quantize.md has the package"),
]


def test_smollm2_is_written_in_4_bits_by_default(tmp_path):
    """Rounded again it is 1.26 times as perplexed; these weights are integers already, those of the head in 8 bits."""
    done = export_folder(FOLDER, tmp_path / "out", quantize="int4", optimize="onnxruntime", proof="sample")
    report = done.reports["model.onnx"]
    assert done.verified.ok
    assert report.quality.perplexity_ratio <= 1.01
    assert report.onnx_bytes < 106e6
    assert pathlib.Path(tmp_path / "out/model.onnx").stat().st_size <= report.onnx_bytes
    (note,) = [remark for remark in report.remarks if remark.startswith("stored in int8")]
    assert "lm_head" in note
