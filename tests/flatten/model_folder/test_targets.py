"""Folders for every runtime: written, proven, verified again, and opened with the runtime that they name."""

import json
import shutil

import pytest
import torch
import transformers

from tests.flatten.model_folder.exported_folders import made
from tests.flatten.runtimes import needs_runtime
from yobx_flatten import DamagedFileError, DynamicShapesError, errors, export_folder, open_generator, verify_folder
from yobx_flatten.__main__ import main
from yobx_flatten.errors import GenerationError, InvalidArgumentError, MissingDependencyError, UntrustedFileError
from yobx_flatten.model_folder.manifest import read_manifest

BOUNDS = {"batch": 4, "length": 64}


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 259}
    tokens = {"eos_token_id": None, "bos_token_id": 2}
    config = transformers.LlamaConfig(**sizes, **tokens, num_hidden_layers=1, initializer_range=0.3)
    return made(transformers.LlamaForCausalLM, config)


@pytest.fixture(
    scope="module",
    # an export of a model, and two of them compile
    params=[
        pytest.param("openvino", marks=pytest.mark.slow),
        pytest.param("aotinductor", marks=(pytest.mark.slow, pytest.mark.extended)),
        pytest.param("executorch", marks=(pytest.mark.slow, pytest.mark.extended)),
    ],
)
def exported(request, model, tmp_path_factory):
    runtime = request.param
    needs_runtime(runtime)
    folder = tmp_path_factory.mktemp("targets") / runtime
    bounds = BOUNDS if runtime == "executorch" else None
    done = export_folder(model, folder, target=runtime, bounds=bounds)
    return runtime, folder, done


def prompts():
    ids = torch.randint(3, 259, (2, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_a_folder_names_its_runtime_generates_the_tokens_of_the_model_and_refuses_another_runtime(exported, model):
    runtime, folder, done = exported
    manifest = read_manifest(folder)
    assert (manifest.runtime, manifest.format) == (runtime, runtime)
    assert set(manifest.files) <= set(manifest.sha256)
    (report,) = done.reports.values()
    assert {case.runtime for case in report.cases} == {runtime}
    assert len(report.cases) == 4
    assert done.verified.ok
    assert [check.file for check in done.verified.checks][-1] == "generate"
    assert (report.planned_bytes is not None) == (runtime == "executorch")
    generator = open_generator(folder, trust=True)
    assert generator.parts.decoder.runtime == runtime
    expected = model.generate(**prompts(), max_new_tokens=12, do_sample=False)
    assert torch.equal(generator.generate(**prompts(), max_new_tokens=12), expected)
    with pytest.raises(GenerationError, match="has none of the files"):
        open_generator(folder, runtime="onnxruntime")
    with pytest.raises(InvalidArgumentError, match="There is no runtime 'tflite'"):
        open_generator(folder, runtime="tflite")


def test_the_command_line_verifies_and_generates(exported, model, capsys):
    _, folder, _ = exported
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(folder)  # the model is from no folder, and has none
    assert main(["verify", str(folder), "--trust"]) == 0
    assert "ok   generate" in capsys.readouterr().out
    command = ["generate", str(folder), "--prompt", "Hello", "--prompt", "Hi", "--tokens", "8", "--json", "--trust"]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0, padding_side="left")
    given = tokenizer(["Hello", "Hi"], padding=True, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=8, do_sample=False)[:, given["input_ids"].shape[1] :]
    assert [row["text"] for row in rows] == tokenizer.batch_decode(made, skip_special_tokens=True)


def test_machine_code_needs_trust(exported):
    runtime, folder, _ = exported
    if runtime == "aotinductor":
        for read in (open_generator, verify_folder):
            with pytest.raises(UntrustedFileError, match="trust=True"):
                read(folder)
    else:
        assert open_generator(folder).parts.decoder.runtime == runtime
    assert verify_folder(folder, trust=True).ok


def test_a_file_that_was_changed_is_refused(exported, tmp_path):
    _, folder, done = exported
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (name,) = done.reports
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    for read in (open_generator, verify_folder):
        with pytest.raises(DamagedFileError, match="changed after the export"):
            read(copy, trust=True)
    (copy / name).unlink()
    with pytest.raises(DamagedFileError, match=r"names the file .* which does not exist"):
        open_generator(copy, trust=True)


REFUSED = {
    "no bounds": ({"target": "executorch"}, "--max-batch 4 --max-length 512"),
    "bounds of another name": ({"target": "executorch", "bounds": {"rows": 4}}, "bounds: expected a dict of ints"),
    "bounds that hold no case": ({"target": "executorch", "bounds": {"length": 8}}, "length=8 is too small"),
    "bounds for onnxruntime": ({"bounds": BOUNDS}, "leave bounds= out for onnxruntime"),
    "two rows": (
        {"to": "program", "bounds": {"batch": 2, "length": 64}},
        r"batch size to 1: batch=1 \(--max-batch 1\)",
    ),
    "bounds without a length": ({"target": "executorch", "bounds": {"batch": 4}}, 'bounds= has no "length"'),
    "bounds above the positions": ({"to": "program", "bounds": {"length": 4096}}, "above the 2048 positions of Llama"),
    "weights in fewer bits": ({"to": "program", "quantize": "int8"}, 'not of torch. Leave .*\n.*target="onnxr'),
    "a type that is not there": ({"target": "openvino", "quantize": "int2"}, "found 'int2'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_traced(model, tmp_path, what):
    options, message = REFUSED[what]
    if options.get("target") == "openvino":
        pytest.importorskip("openvino")
    with pytest.raises((InvalidArgumentError, DynamicShapesError), match=message):
        export_folder(model, tmp_path / "folder", **options)
    assert list(tmp_path.iterdir()) == []


def test_bounds_of_one_row_are_a_folder_for_one_row(model, tmp_path):
    done = export_folder(model, tmp_path / "folder", to="program", bounds={"batch": 1, "length": 64})
    assert done.verified.ok
    generator = open_generator(tmp_path / "folder", trust=True)
    assert generator.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)


def test_a_missing_runtime_is_named(model, tmp_path, monkeypatch):
    found = errors.is_installed
    monkeypatch.setattr(errors, "is_installed", lambda library: library != "executorch" and found(library))
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[executorch\]'"):
        export_folder(model, tmp_path / "folder", target="executorch", bounds=BOUNDS)
