"""A folder appears when it is proven, holds what tools expect, and says what is in it."""

import errno
import json
import subprocess
import sys
from types import SimpleNamespace

import onnxruntime
import pytest
import torch
import transformers

from tests.flatten.model_folder.exported_folders import exported
from tests.transformers_versions import needs_transformers
from yobx_flatten import DamagedFileError, OnnxGenerator, Quantization, export_folder, verify_folder
from yobx_flatten.__main__ import main
from yobx_flatten.errors import FolderExistsError, ForeignFileError, GenerationError, InvalidArgumentError
from yobx_flatten.export.model_facts import weight_bytes
from yobx_flatten.model_folder import write
from yobx_flatten.model_folder.manifest import read_manifest
from yobx_flatten.model_folder.pieces.vision_language import vision_language_pieces
from yobx_flatten.model_folder.source.configuration import small_config, small_model

pytestmark = pytest.mark.slow


def test_a_folder_holds_what_tools_expect():
    _, folder = exported("mistral")
    assert sorted(path.name for path in folder.glob("**/*.onnx")) == ["model.onnx"]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json", "yobx_flatten.json", "cases"} < names
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["MistralForCausalLM"]
    # keys and values of each layer in turn, and no counter, although every layer slides
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    cache = [f"{index}.{part}" for index in range(2) for part in ("key", "value")]
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in cache)]
    assert [node.name for node in session.get_inputs()] == inputs
    assert [node.name for node in session.get_outputs()] == ["logits", *(f"present.{name}" for name in cache)]


def test_a_folder_that_holds_something_is_replaced_on_demand_only(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine", encoding="utf-8")
    model = small_model("llama")
    with pytest.raises(FolderExistsError, match="overwrite=True"):
        export_folder(model, tmp_path / "out")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write, "export_piece", full)
    with pytest.raises(OSError, match="No space"):
        export_folder(model, tmp_path / "out", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine.txt").read_text(encoding="utf-8") == "mine"
    monkeypatch.undo()
    export_folder(model, tmp_path / "out", overwrite=True, proof="none")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "model.onnx" in {path.name for path in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "mine.txt").exists()


def test_a_fixed_batch_stays_fixed(tmp_path):
    model = small_model("llama")
    export_folder(model, tmp_path / "out", batch=2)
    generator = OnnxGenerator(tmp_path / "out", threads=1)
    ids = torch.randint(4, 259, (3, 5), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(ids[:2], attention_mask=torch.ones(2, 5).long(), max_new_tokens=9, do_sample=False)
    assert generator.generate(ids[:2], max_new_tokens=9).tolist() == wanted.tolist()
    with pytest.raises(Exception, match="exported for 2 rows, found 3"):
        generator.generate(ids, max_new_tokens=9)


def test_a_small_configuration_keeps_the_kinds_of_its_layers():
    config = small_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window == 8
    with pytest.raises(InvalidArgumentError, match="Did you mean llama"):
        small_config("lama")


@needs_transformers("5.17", "there is no Qwen3-VL, or it takes no types of tokens")
def test_image_tokens_that_are_not_masked_as_text_are_refused():
    """A prompt of such a model generates other text with a causal decoder."""
    with pytest.raises(GenerationError, match="token_type_ids to mark image tokens"):
        vision_language_pieces(SimpleNamespace(forward=transformers.Qwen3VLForConditionalGeneration.forward))


def test_what_is_no_exported_folder_is_refused(tmp_path):
    with pytest.raises(ForeignFileError, match="There is no folder"):
        verify_folder(tmp_path / "nowhere")
    with pytest.raises(ForeignFileError, match=r"contains no yobx_flatten\.json"):
        verify_folder(tmp_path)
    for version, error, words in (
        (99, ForeignFileError, "needs a newer yobx-flatten"),
        (1, DamagedFileError, "damaged"),
    ):
        (tmp_path / "yobx_flatten.json").write_text(json.dumps({"format_version": version}), encoding="utf-8")
        with pytest.raises(error, match=words):
            read_manifest(tmp_path)
    earlier = json.loads((exported("llama")[1] / "yobx_flatten.json").read_text(encoding="utf-8"))
    del earlier["proof"]
    (tmp_path / "yobx_flatten.json").write_text(json.dumps({**earlier, "format_version": 1}), encoding="utf-8")
    assert read_manifest(tmp_path).proof == "full"


def test_arguments_that_mean_nothing_are_refused(tmp_path):
    model = small_model("llama")
    scored = Quantization("int8", tokens=torch.ones(2, 5, dtype=torch.int64))
    of_optimize = r'optimize must be None, or "onnxruntime" for to="onnx"; found'
    for wrong, words in [
        ({"to": "tflite"}, 'to must be "onnx" or "program"'),
        ({"model": small_model("llama").bfloat16()}, "no CPU kernels for weights of bfloat16"),
        ({"optimize": "all"}, of_optimize),
        ({"optimize": "onnxruntime", "to": "program"}, of_optimize),
        ({"logits": "last", "quantize": scored}, r"tokens=...\) needs the logits of all tokens"),
        ({"quantize": "int2"}, "found 'int2'"),
        ({"logits": "first"}, "logits must be"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            export_folder(**{"model": model, "folder": tmp_path / "out", **wrong})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    with pytest.raises(FolderExistsError, match=r"out is a file\. Name a folder that is new or empty"):
        export_folder(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "a file"


EXPORTS = """
import os, sys
from yobx_flatten.__main__ import main
for place in sys.argv[1:]:
    print(main(["export", "llama", "-o", f"{place}/out"]), os.listdir(place))
"""


def test_a_disk_that_is_full_leaves_nothing(tmp_path):
    mounts = []
    for name, room in (("small", -4096), ("full", 8192)):
        (tmp_path / name).mkdir()
        size = weight_bytes(small_model("llama")) + room
        mounts.append(f"mount -t tmpfs -o size={size} tmpfs {tmp_path / name}")
    mount = ["unshare", "-rm", "sh", "-c", f'{" && ".join(mounts)} && exec "$@"', "sh"]
    if sys.platform != "linux" or subprocess.run([*mount, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = [*mount, sys.executable, "-c", EXPORTS, str(tmp_path / "small"), str(tmp_path / "full")]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.stdout == "2 []\n2 []\n", shown.stderr
    small, full = (line for line in shown.stderr.splitlines() if line.startswith("yobx-flatten: "))
    assert small.startswith("yobx-flatten: The disk of ")
    assert full.startswith("yobx-flatten: the disk is full")


def test_a_folder_without_proof_is_called_unproven_by_everything(tmp_path):
    folder = tmp_path / "out"
    model = small_model("llama")
    done = export_folder(model, folder, proof="none")
    assert str(done).count("UNPROVEN") == 2
    assert read_manifest(folder).proof == "none"
    assert not verify_folder(folder)
    assert main(["verify", str(folder)]) == 1
    assert not (folder / "cases").exists()
    prompt = torch.tensor([[5, 6, 7]])
    found = OnnxGenerator(folder, pack=False).generate(prompt, max_new_tokens=4)
    assert torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False))


def test_a_sampled_folder_holds_the_sample_as_cases(tmp_path):
    done = export_folder(small_model("mistral"), tmp_path / "out", proof="sample")
    cases = [check.case for check in done.verified.checks]
    assert cases == ["the example", "batch 4, past 19, new 1, 9 padded", "8 tokens, greedily"]
    assert [result.case for result in done.reports["model.onnx"].cases] == cases[:2]
    assert read_manifest(tmp_path / "out").proof == "sample"
