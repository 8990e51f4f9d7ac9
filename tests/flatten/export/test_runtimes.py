"""One export, every runtime: a file for each, replayed with the same cases before it has its name."""

import os
import shutil

import pytest
import torch

from tests.flatten.export.small_step import cases, inputs, make_step, shapes, strided
from yobx_flatten import DynamicShapesError, InvalidArgumentError, MissingDependencyError, ReplayError, export_program
from yobx_flatten.errors import dependencies
from yobx_flatten.runners.open import open_runner

SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "aotinductor": ".pt2", "executorch": ".pte"}
NAMES = {"onnx": "onnxruntime"}


def _needs(runtime):
    if runtime in ("openvino", "executorch"):
        pytest.importorskip(runtime)
    if runtime == "aotinductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("AOTInductor needs a C++ compiler")


@pytest.fixture(scope="module")
def exported():
    return export_program(make_step(), (), inputs(2, 3, 2), dynamic_shapes=shapes(), cases=cases())


@pytest.fixture(
    scope="module",
    params=[
        "openvino",
        # both compile for several seconds
        pytest.param("aotinductor", marks=pytest.mark.slow),
        pytest.param("executorch", marks=pytest.mark.slow),
        "onnx",
    ],
)
def written(request, exported, tmp_path_factory):
    """The runtime, the report of its file, and the file, open."""
    runtime = request.param
    _needs(runtime)
    path = tmp_path_factory.mktemp("runtimes") / f"step{SUFFIX[runtime]}"
    report = getattr(exported, f"to_{runtime}")(path)
    options = {"trust": True} if runtime == "aotinductor" else {}
    return NAMES.get(runtime, runtime), report, open_runner(path, **options)


def _named(kwargs):
    return {**{k: kwargs[k] for k in ("input_ids", "attention_mask")}, "past_key_values.0.key": _key(kwargs)}


def _key(kwargs):
    return kwargs["past_key_values"][0]["key"]


def test_every_case_is_replayed_in_the_runtime(written):
    runtime, report, runner = written
    names = ["the example", "one row, one token", "two tokens", "as long as can be", "padded", "strided"]
    assert [(case.case, case.runtime, case.error) for case in report.cases] == [(n, runtime, None) for n in names]
    assert report.ok
    assert runner.runtime == runtime
    assert (list(runner.ports), list(runner.outputs)) == (report.input_names, report.output_names)


def test_strided_inputs_give_the_numbers_of_the_module(written):
    """Compiled code takes every input for contiguous; a slice and a transposed tensor are made so."""
    _, _, runner = written
    given = inputs(3, 5, 4, padded=1, seed=9)
    with torch.no_grad():
        expected = make_step()(**given)
    found = runner.run(_named(strided(given)))
    torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["present.0.key"], expected["present"][0]["key"], atol=1e-5, rtol=0)


def test_what_a_step_returns_is_kept_by_the_next(written):
    _, _, runner = written
    given = inputs(2, 3, 2, seed=3)
    feeds = {name: given[name] for name in ("input_ids", "attention_mask")}
    first, cache = runner.step(feeds, runner.cache({"past_key_values.0.key": _key(given)}))
    kept = first["logits"].clone()
    longer = {**feeds, "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    second, _ = runner.step(longer, cache)
    with torch.no_grad():
        eager = make_step()
        wanted = eager(**longer, past_key_values=eager(**given)["present"])["logits"]
    torch.testing.assert_close(second["logits"], wanted, atol=1e-5, rtol=0)
    assert torch.equal(first["logits"], kept)


WRONG = {
    "another number of rows": lambda n: n | {"past_key_values.0.key": torch.randn(3, 4, 8)},
    "another width": lambda n: n | {"past_key_values.0.key": torch.randn(2, 4, 9)},
    "another type": lambda n: n | {"input_ids": n["input_ids"].int()},
    "a token that is not there": lambda n: n | {"input_ids": torch.full((2, 2), 16)},
    "a token below 0": lambda n: n | {"input_ids": torch.full((2, 2), -1)},
    "another number of axes": lambda n: n | {"input_ids": n["input_ids"][0]},
}


@pytest.mark.parametrize("what", WRONG)
def test_inputs_that_do_not_fit_are_refused(written, what):
    """Compiled code would read other memory and return numbers."""
    runtime, _, runner = written
    if (runtime, what) == ("onnxruntime", "a token below 0"):
        pytest.skip("ONNX counts from the end then")
    with pytest.raises(ReplayError):
        runner.run(WRONG[what](_named(inputs(2, 4, 2))))


def test_a_length_above_the_bound_is_refused(written):
    runtime, _, runner = written
    if runtime == "onnxruntime":
        pytest.skip("an ONNX file takes any length")
    with pytest.raises(ReplayError, match=r"attention_mask has size 20 in axis 1.* at most 12"):
        runner.run(_named(inputs(2, 18, 2)))


def test_a_file_that_differs_is_not_left(tmp_path):
    pytest.importorskip("openvino")
    module = make_step()
    exported = export_program(module, (), inputs(2, 3, 2), dynamic_shapes=shapes(), cases=[])
    frozen = export_program(make_step(), (), inputs(2, 3, 2), dynamic_shapes=shapes(), cases=[])
    other = type(frozen._source)(**{**vars(frozen._source), "example": exported._source.example})
    frozen._source = other
    with torch.no_grad():
        module.keys.weight += 1.0
    with pytest.raises(ReplayError, match="differs from the eager model") as caught:
        frozen.to_openvino(tmp_path / "step.xml")
    assert [case.runtime for case in caught.value.report.cases] == ["openvino"]
    assert list(tmp_path.iterdir()) == []


def test_a_size_without_a_bound_is_refused_for_executorch(tmp_path, monkeypatch):
    monkeypatch.setattr("yobx_flatten.export.runtimes.write.require_executorch", lambda caller: None)
    free = export_program(make_step(), (), inputs(2, 3, 2), dynamic_shapes=shapes(bounded=False), cases=[])
    with pytest.raises(DynamicShapesError, match="input_ids axis 0, input_ids axis 1, attention_mask axis 0"):
        free.to_executorch(tmp_path / "step.pte")


def test_another_suffix_is_refused(exported, tmp_path):
    for runtime, suffix in SUFFIX.items():
        with pytest.raises(InvalidArgumentError, match=rf"to_{runtime} writes files with the suffix \{suffix}"):
            getattr(exported, f"to_{runtime}")(tmp_path / "step.bin")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("runtime", "extra"), [("openvino", "openvino"), ("executorch", "executorch"), ("onnx", "onnx")]
)
def test_a_missing_library_is_named(exported, tmp_path, monkeypatch, runtime, extra):
    monkeypatch.setattr(dependencies, "is_installed", lambda library: False)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{extra}\]'"):
        getattr(exported, f"to_{runtime}")(tmp_path / f"step{SUFFIX[runtime]}")


def test_a_missing_compiler_is_named(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="apt install"):
        exported.to_aotinductor(tmp_path / "step.pt2")
