"""One export, every runtime: a file for each, replayed with the same cases, also with weights in fewer bits."""

import importlib
import importlib.util
import logging
import shutil

import pytest
import torch

from tests.flatten.export.small_step import cases, inputs, make_step, shapes, strided
from tests.flatten.runtimes import needs_runtime
from yobx_flatten import Case, DynamicShapesError, Quantization, errors, export_program
from yobx_flatten.errors import InvalidArgumentError, MissingDependencyError, ReplayError
from yobx_flatten.export.runtimes.openvino import blocks_of, quantized_example
from yobx_flatten.runners.open import open_runner

SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "aotinductor": ".pt2", "executorch": ".pte"}


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
    runtime = request.param
    needs_runtime(runtime)
    path = tmp_path_factory.mktemp("runtimes") / f"step{SUFFIX[runtime]}"
    report = getattr(exported, f"to_{runtime}")(path)
    options = {"trust": True} if runtime == "aotinductor" else {}
    return runtime.replace("onnx", "onnxruntime"), report, open_runner(path, **options)


def _named(kwargs):
    cache = {"past_key_values.0.key": kwargs["past_key_values"][0]["key"]}
    return {"input_ids": kwargs["input_ids"], "attention_mask": kwargs["attention_mask"], **cache}


def test_every_case_is_replayed_in_the_runtime_and_strided_inputs_give_the_numbers_of_the_module(written):
    """Compiled code takes every input for contiguous; a slice and a transposed tensor are made so."""
    runtime, report, runner = written
    names = ["the example", "one row, one token", "two tokens", "as long as can be", "padded", "strided"]
    assert [(case.case, case.runtime, case.error) for case in report.cases] == [(n, runtime, None) for n in names]
    assert report.ok
    assert runner.runtime == runtime
    assert (list(runner.ports), list(runner.outputs)) == (report.input_names, report.output_names)
    given = inputs(3, 5, 4, padded=1, seed=9)
    with torch.no_grad():
        expected = make_step()(**given)
    found = runner.run(_named(strided(given)))
    torch.testing.assert_close(found["logits"], expected["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(found["present.0.key"], expected["present"][0]["key"], atol=1e-5, rtol=0)


def test_what_a_step_returns_is_kept_by_the_next(written):
    _, _, runner = written
    given = inputs(2, 3, 2, seed=3)
    feeds = _named(given)
    first, cache = runner.step(feeds, runner.cache({"past_key_values.0.key": feeds.pop("past_key_values.0.key")}))
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
    "a length above the bound": lambda n: _named(inputs(2, 18, 2)),
}


@pytest.mark.parametrize("what", WRONG)
def test_inputs_that_do_not_fit_are_refused(written, what):
    """Compiled code would read other memory and return numbers."""
    runtime, _, runner = written
    if runtime == "onnxruntime" and what in ("a token below 0", "a length above the bound"):
        pytest.skip("ONNX counts from the end then, and its file takes any length")
    with pytest.raises(ReplayError, match="has size 20 in axis 1.* at most 12" if "bound" in what else None):
        runner.run(WRONG[what](_named(inputs(2, 4, 2))))


def test_a_file_that_differs_is_not_left(tmp_path):
    pytest.importorskip("openvino")
    module = make_step()
    exported, frozen = (
        export_program(one, (), inputs(2, 3, 2), dynamic_shapes=shapes(), cases=[]) for one in (module, make_step())
    )
    frozen._source = type(frozen._source)(**{**vars(frozen._source), "example": exported._source.example})
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
    ("runtime", "extra", "quantize"),
    [
        ("openvino", "openvino", None),
        ("executorch", "executorch", None),
        ("onnx", "onnx", None),
        ("openvino", "nncf", "int8"),
        ("executorch", "executorch", "int8"),
    ],
)
def test_a_missing_library_or_compiler_is_named(quantized_module, tmp_path, monkeypatch, runtime, extra, quantize):
    if extra == "nncf":
        pytest.importorskip("openvino")
    found, how = errors.is_installed, {"quantize": quantize} if quantize else {}

    def is_installed(library):
        return quantize is not None and library != extra and found(library)

    monkeypatch.setattr(errors, "is_installed", is_installed)
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{extra}\]'"):
        getattr(quantized_module, f"to_{runtime}")(tmp_path / f"scores{SUFFIX[runtime]}", **how)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="apt install"):
        quantized_module.to_aotinductor(tmp_path / "scores.pt2")


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(32, 64)
            self.inner = torch.nn.Linear(64, 128)
            self.head = torch.nn.Linear(128, 32)

    def forward(self, input_ids):
        return {"logits": self.head(self.inner(self.embedding(input_ids)).relu())}


def tokens(*shape):
    return torch.randint(0, 32, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(scope="module")
def quantized_module():
    cases = [Case("three rows", (), {"input_ids": tokens(3, 7)})]
    return export_program(Scores(), (), {"input_ids": tokens(2, 5)}, bounds={"batch": 4, "length": 16}, cases=cases)


@pytest.fixture(
    scope="module",
    params=[
        # the import of NNCF alone takes 3 seconds, and ExecuTorch compiles
        pytest.param((runtime, bits), marks=pytest.mark.slow)
        for runtime in ("openvino", "executorch")
        for bits in ("int8", "int4")
    ],
)
def quantized_file(request, quantized_module, tmp_path_factory):
    runtime, bits = request.param
    if importlib.util.find_spec({"openvino": "nncf", "executorch": "executorch"}[runtime]) is None:
        pytest.skip("a library is not installed")  # its import is what another test looks at
    folder, write = tmp_path_factory.mktemp("quantized"), getattr(quantized_module, f"to_{runtime}")
    path = folder / f"scores{SUFFIX[runtime]}"
    report = write(path, quantize=Quantization(bits, perplexity_ratio=1.2))
    return runtime, bits, report, path, write(folder / f"float{SUFFIX[runtime]}").file_bytes


def test_the_distance_is_that_of_the_file_to_the_module_and_the_file_is_smaller(quantized_file):
    runtime, bits, report, path, size = quantized_file
    runner = open_runner(path)
    found = []
    for given in (tokens(2, 5), tokens(3, 7)):
        with torch.no_grad():
            expected = Scores()(given)["logits"]
        found.append(float((runner.run({"input_ids": given})["logits"] - expected).abs().max()))
    assert report.quality.max_difference == pytest.approx(max(found), rel=1e-3)
    assert 0 < max(found) < {"int8": 0.1, "int4": 0.6}[bits]
    assert report.quality.positions == 2 * 5 + 3 * 7
    assert report.quality.weights == bits
    assert report.ok
    assert report.quality.block_size == {"int8": 0, "int4": 32}[bits]
    shown = str(report)
    assert f"{bits}, {'one scale per output' if bits == 'int8' else 'blocks of 32'}: max difference" in shown
    assert f"{'NNCF' if runtime == 'openvino' else 'torchao'} stored the weights" in shown
    assert "the table shows the file before its weights were quantized" in shown
    stored = sum(file.stat().st_size for file in path.parent.glob("scores.*"))
    assert report.file_bytes == stored
    saved = 3.0 * (64 * 128 + 128 * 32)
    assert size - stored > 0.7 * saved - (12_000 if runtime == "openvino" else 0)  # its .xml states each scale


def test_a_file_of_executorch_computes_what_torchao_does(quantized_file, quantized_module):
    runtime, bits, report, path, _ = quantized_file
    if runtime != "executorch":
        pytest.skip("NNCF has no module in torch")
    module = quantized_example(quantized_module._source.example, Quantization(bits), report).module
    with torch.no_grad():
        expected = module(tokens(3, 7))["logits"]
    found = open_runner(path).run({"input_ids": tokens(3, 7)})["logits"]
    # an activation may be rounded to the next of 256 numbers
    assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())


@pytest.mark.slow  # the import of NNCF takes 3 seconds
def test_a_file_that_is_too_far_is_not_written(quantized_module, tmp_path, capfd):
    if importlib.util.find_spec("nncf") is None:
        pytest.skip("NNCF is not installed")
    with pytest.raises(ReplayError, match="differs more from the eager model than its quantised weights explain"):
        quantized_module.to_openvino(tmp_path / "scores.xml", quantize=Quantization("int4", perplexity_ratio=1.0000001))
    assert list(tmp_path.iterdir()) == []
    assert logging.getLoggerClass() is logging.Logger
    assert capfd.readouterr().out == ""


def test_blocks_are_of_whole_projections_and_have_a_size_that_xnnpack_has(quantized_module, tmp_path, monkeypatch):
    """Eight bits have a scale for each output."""
    assert blocks_of(Quantization("int8", block_size=64)) == 0
    assert blocks_of(Quantization("int4", block_size=64)) == 64
    source = export_program(torch.nn.Sequential(torch.nn.Linear(24, 8)), (torch.randn(2, 24),), proof="none")._source
    with pytest.raises(InvalidArgumentError, match=r"no torch.nn.Linear whose number of inputs is a multiple of 32"):
        quantized_example(source.example, Quantization("int4"), source)
    monkeypatch.setattr("yobx_flatten.export.runtimes.write.require_executorch", lambda caller: None)
    monkeypatch.setattr(errors, "is_installed", lambda library: True)
    with pytest.raises(InvalidArgumentError, match=r'found 16. Pass one:\n    Quantization\("int4", block_size=32\)'):
        quantized_module.to_executorch(tmp_path / "scores.pte", quantize=Quantization("int4", block_size=16))


def test_the_module_stays_as_it_is():
    pytest.importorskip("torchao")
    importlib.import_module("torchao.quantization.quant_api")  # registers classes
    exported = export_program(Scores(), (), {"input_ids": tokens(2, 5)}, proof="none")
    example = exported._source.example
    quantized = quantized_example(example, Quantization("int8"), exported.report).module
    assert type(example.module.head.weight) is torch.nn.Parameter
    assert type(quantized.head.weight) is not torch.nn.Parameter
