"""A cache that code of AOTInductor writes in place: buffers, proven, rewound and reordered next to the eager model."""

import os
import shutil
from typing import ClassVar

import pytest

if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("AOTInductor needs a C++ compiler", allow_module_level=True)


from tests.flatten.export.rewound_rows import WritesIntoBuffers, small_llama, small_mistral
from yobx_flatten import DecodeSizes, decode_inputs, export_folder, export_program
from yobx_flatten.export.runtimes import write as runtimes

pytestmark = pytest.mark.slow  # each package is compiled for half a minute


@pytest.fixture(scope="module")
def model():
    return small_llama()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("aotinductor") / "llama"
    return export_folder(model, place, target="aotinductor", proof="sample")


@pytest.mark.extended
class TestPackage(WritesIntoBuffers):
    file = "model.pt2"
    opened: ClassVar = {"trust": True}


def test_layers_that_slide_keep_a_cache_that_is_returned(tmp_path):
    """Nothing is compiled twice for it: the program itself shows that such a layer returns something else."""
    found = export_folder(small_mistral(), tmp_path / "mistral", target="aotinductor", proof="sample")
    report = found.reports["model.pt2"]
    notes = [note for note in report.remarks if "the cache is copied by each call" in note]
    assert any("layers have a sliding window" in note for note in notes)
    assert (report.in_place, found.verified.manifest.cache) == ([], "growing")


def test_a_package_that_computes_something_else_is_left_out(model, tmp_path, monkeypatch):
    exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])

    compiled = runtimes.write_package

    def stops(traced, path, *, in_place=False):
        if in_place:
            raise RuntimeError("no such kernel")
        return compiled(traced, path)

    monkeypatch.setattr(runtimes, "write_package", stops)
    report = exported.to_aotinductor(tmp_path / "model.pt2")
    reason = "a file that writes it in place was left out: RuntimeError: no such kernel"
    assert f"the cache is copied by each call: {reason}" in report.remarks
    assert (report.ok, report.in_place) == (True, [])
    asked = exported.to_aotinductor(tmp_path / "asked.pt2", cache="returned")
    assert not any("cache" in note for note in asked.remarks)
