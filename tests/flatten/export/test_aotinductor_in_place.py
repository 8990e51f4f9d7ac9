"""A cache that code of AOTInductor writes in place: buffers, proven, rewound and reordered next to the eager model."""

import os
import shutil

import pytest
import torch

if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("AOTInductor needs a C++ compiler", allow_module_level=True)


from tests.flatten.export.rewound_rows import (
    LEAVES,
    OPTIONS,
    assert_a_call_is_right_without_a_loop,
    assert_rows_go_on_after_a_rewind,
    padded_prompt,
    small_llama,
    small_mistral,
)
from yobx_flatten import DecodeSizes, decode_inputs, export_folder, export_program, open_generator
from yobx_flatten.export.runtimes import write as runtimes
from yobx_flatten.runners.open import open_runner

pytestmark = pytest.mark.slow  # each package is compiled for half a minute


@pytest.fixture(scope="module")
def model():
    return small_llama()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("aotinductor") / "llama"
    return export_folder(model, place, target="aotinductor", proof="sample")


def test_the_report_names_what_is_written_in_place(folder):
    """Each case is a loop over the buffers, next to the model; the manifest states the form of the cache."""
    report = folder.reports["model.pt2"]
    assert report.in_place == LEAVES
    assert report.ok
    assert max(case.steps for case in report.cases) == 3
    assert folder.verified.manifest.cache == "in_place"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_with_padding_generate_what_the_model_does(model, folder, options):
    """Greedily, with a prompt in pieces, and with beams, whose rows change places."""
    asked = {**padded_prompt(), "max_new_tokens": 20, **options}
    found = open_generator(folder.path, trust=True).generate(**asked)
    assert torch.equal(found, model.generate(**asked, do_sample=False))


def test_refused_drafts_are_written_over(model, folder):
    """A draft of another model is refused at most places; what lies after the tokens that stay is written again."""
    ids, generator = torch.tensor([[5, 6, 7, 8] * 6]), open_generator(folder.path, trust=True)
    found = generator.generate(ids, max_new_tokens=20, assistant_model=small_llama(seed=1))
    assert torch.equal(found, model.generate(ids, do_sample=False, max_new_tokens=20))


def test_buffers_grow_are_cut_and_have_other_rows(model, folder):
    """Past 256 tokens the first buffers are full; then two tokens fewer, and rows 1, 0 and 1, as in the model."""
    runner = open_runner(folder.path / "model.pt2", trust=True)
    assert_rows_go_on_after_a_rewind(model, runner, [100, 200])


def test_each_number_of_tokens_fits_into_a_buffer(model, folder):
    """Token by token past 256, and past 514, where the buffers are as long as the text; next to the model itself."""
    asked = {**padded_prompt(), "max_new_tokens": 520}
    found = open_generator(folder.path, trust=True).generate(**asked)
    assert torch.equal(found, model.generate(**asked, do_sample=False))


def test_a_call_without_a_loop_leaves_its_inputs_as_they_are(model, folder):
    """The tensors of the caller are copied into buffers; other rows are refused before the code sees them."""
    assert_a_call_is_right_without_a_loop(model, open_runner(folder.path / "model.pt2", trust=True), "model.pt2")


def test_layers_that_slide_keep_a_cache_that_is_returned(tmp_path):
    """Nothing is compiled twice for it: the program itself shows that such a layer returns something else."""
    found = export_folder(small_mistral(), tmp_path / "mistral", target="aotinductor", proof="sample")
    report = found.reports["model.pt2"]
    notes = [note for note in report.remarks if "the cache is copied by each call" in note]
    assert any("layers have a sliding window" in note for note in notes)
    assert (report.in_place, found.verified.manifest.cache) == ([], "growing")


def test_a_package_that_computes_something_else_is_left_out(model, tmp_path, monkeypatch):
    """The one that takes and returns the cache is written in its place, and the report states why; or on request."""
    exported = export_program(model, kwargs=decode_inputs(model, DecodeSizes()), cases=[])

    def stops(traced, path):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(runtimes, "write_package_in_place", stops)
    report = exported.to_aotinductor(tmp_path / "model.pt2")
    reason = "a file that writes it in place was left out: RuntimeError: no such kernel"
    assert f"the cache is copied by each call: {reason}" in report.remarks
    assert (report.ok, report.in_place) == (True, [])
    asked = exported.to_aotinductor(tmp_path / "asked.pt2", cache="returned")
    assert not any("cache" in note for note in asked.remarks)
