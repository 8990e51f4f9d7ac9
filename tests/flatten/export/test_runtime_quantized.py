"""Weights in fewer bits for OpenVINO and ExecuTorch: stored by their own tools, and measured against the module."""

import importlib
import importlib.util
import logging

import pytest
import torch

from yobx_flatten import Case, InvalidArgumentError, MissingDependencyError, Quantization, ReplayError, export_program
from yobx_flatten.errors import dependencies
from yobx_flatten.export.runtimes.openvino import blocks_of, quantized_example
from yobx_flatten.runners.open import open_runner


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


def _needs(library):
    """Skip without importing: the import itself is what a test looks at."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.fixture(scope="module")
def exported():
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
def written(request, exported, tmp_path_factory):
    """The runtime, the bits, the report of the quantised file, its path, and the size of one in float, in bytes."""
    runtime, bits = request.param
    _needs({"openvino": "nncf", "executorch": "executorch"}[runtime])
    folder = tmp_path_factory.mktemp("quantized")
    suffix = {"openvino": ".xml", "executorch": ".pte"}[runtime]
    path = folder / f"scores{suffix}"
    write = getattr(exported, f"to_{runtime}")
    report = write(path, quantize=Quantization(bits, perplexity_ratio=1.2))
    return runtime, bits, report, path, write(folder / f"float{suffix}").file_bytes


def test_the_distance_is_that_of_the_file_to_the_module(written):
    _, bits, report, path, _ = written
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


def test_a_file_of_executorch_computes_what_torchao_does(written, exported):
    runtime, bits, report, path, _ = written
    if runtime != "executorch":
        pytest.skip("NNCF has no module in torch")
    module = quantized_example(exported._source.example, Quantization(bits), report).module
    with torch.no_grad():
        expected = module(tokens(3, 7))["logits"]
    found = open_runner(path).run({"input_ids": tokens(3, 7)})["logits"]
    # an activation may be rounded to the next of 256 numbers
    assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_the_file_is_smaller_than_one_in_float(written):
    runtime, bits, report, path, size = written
    projections = 64 * 128 + 128 * 32
    stored = sum(file.stat().st_size for file in path.parent.glob("scores.*"))
    assert report.file_bytes == stored
    saved = {"int8": 3.0, "int4": 3.0}[bits] * projections
    assert size - stored > 0.7 * saved - (12_000 if runtime == "openvino" else 0)  # its .xml states each scale


def test_a_file_in_blocks_states_them(written):
    runtime, bits, report, _, _ = written
    assert report.quality.block_size == {"int8": 0, "int4": 32}[bits]
    shown = str(report)
    assert f"{bits}, {'one scale per output' if bits == 'int8' else 'blocks of 32'}: max difference" in shown
    assert f"{'NNCF' if runtime == 'openvino' else 'torchao'} stored the weights" in shown
    assert "the table shows the file before its weights were quantized" in shown


@pytest.mark.slow  # the import of NNCF takes 3 seconds
def test_a_file_that_is_too_far_is_not_written(exported, tmp_path, capfd):
    _needs("nncf")
    with pytest.raises(ReplayError, match="differs more from the eager model than its quantised weights explain"):
        exported.to_openvino(tmp_path / "scores.xml", quantize=Quantization("int4", perplexity_ratio=1.0000001))
    assert list(tmp_path.iterdir()) == []
    assert logging.getLoggerClass() is logging.Logger
    assert capfd.readouterr().out == ""


def test_eight_bits_have_a_scale_for_each_output():
    """Blocks are those of four bits."""
    assert blocks_of(Quantization("int8", block_size=64)) == 0
    assert blocks_of(Quantization("int4", block_size=64)) == 64


@pytest.mark.parametrize(("runtime", "missing"), [("openvino", "nncf"), ("executorch", "executorch")])
def test_a_missing_tool_is_named(exported, tmp_path, monkeypatch, runtime, missing):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    found = dependencies.is_installed
    monkeypatch.setattr(dependencies, "is_installed", lambda library: library != missing and found(library))
    suffix = {"openvino": ".xml", "executorch": ".pte"}[runtime]
    with pytest.raises(MissingDependencyError, match=rf"pip install .*\[{missing}\]'"):
        getattr(exported, f"to_{runtime}")(tmp_path / f"scores{suffix}", quantize="int8")


def test_blocks_that_xnnpack_lacks_are_refused(exported, tmp_path, monkeypatch):
    monkeypatch.setattr("yobx_flatten.export.runtimes.write.require_executorch", lambda caller: None)
    monkeypatch.setattr(dependencies, "is_installed", lambda library: True)
    with pytest.raises(InvalidArgumentError, match=r'found 16:\n    Quantization\("int4", block_size=32\)'):
        exported.to_executorch(tmp_path / "scores.pte", quantize=Quantization("int4", block_size=16))


def test_projections_without_whole_blocks_are_refused():
    small = torch.nn.Sequential(torch.nn.Linear(24, 8))
    source = export_program(small, (torch.randn(2, 24),), proof="none")._source
    with pytest.raises(InvalidArgumentError, match=r"no torch.nn.Linear whose number of inputs is a multiple of 32"):
        quantized_example(source.example, Quantization("int4"), source)


@pytest.fixture(scope="module")
def torchao():
    """torchao, which registers classes of its own with torch when it is imported."""
    pytest.importorskip("torchao")
    return importlib.import_module("torchao.quantization.quant_api")


def test_the_module_stays_as_it_is(torchao):
    exported = export_program(Scores(), (), {"input_ids": tokens(2, 5)}, proof="none")
    example = exported._source.example
    quantized = quantized_example(example, Quantization("int8"), exported.report).module
    assert type(example.module.head.weight) is torch.nn.Parameter
    assert type(quantized.head.weight) is not torch.nn.Parameter
