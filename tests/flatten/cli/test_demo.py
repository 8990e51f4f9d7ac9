"""The demo as a user meets it: one run of it, and every way to ask for what is not there."""

import importlib.util
import json

import pytest
import torch

from tests.cache_words import cache_of
from tests.models import make_model
from yobx_flatten import DecodeSizes, FlattenError, decode_inputs, export_program
from yobx_flatten.__main__ import main
from yobx_flatten.cli import demo
from yobx_flatten.diagnose import comparison
from yobx_flatten.errors import install_line

pytestmark = pytest.mark.slow


def test_the_demo_exports_replays_and_prints_one_table(tmp_path, capsys):
    assert main(["demo", "--models", "mistral", "--output", str(tmp_path / "made")]) == 0
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["mistral.onnx"]
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    row = next(line.split() for line in shown.out.splitlines() if line.strip().startswith("mistral "))
    assert row[:4] == ["mistral", "2x", "W8", "4"]  # two layers of keys and values
    assert "W8 the last 8 tokens" in shown.out  # what the letters mean
    assert row[7] == str(1 + len(demo.CASES))
    assert "converting MistralForCausalLM to ONNX" in shown.err
    assert "mistral.onnx" in shown.out.split("Load:")[1]
    assert "past_key_values.0.key ... past_key_values.1.value" in shown.out.split("Feed:")[1]


def test_the_demo_prints_json_and_its_stages_elsewhere(tmp_path, capsys):
    assert main(["demo", "--models", "t5", "--output", str(tmp_path / "made"), "--json"]) == 0
    shown = capsys.readouterr()
    (row,) = json.loads(shown.out)
    assert row["model"] == "t5"
    assert "cross 2x D" in str(row)
    assert "converting T5ForConditionalGeneration to ONNX" in shown.err


def test_a_program_that_differs_ends_the_demo_with_1_and_its_report(tmp_path, capsys, monkeypatch):
    # without the conversion to ONNX, which this is not about
    monkeypatch.setattr(
        demo, "export_onnx", lambda model, args, kwargs, path, **how: export_program(model, args, kwargs, **how)
    )
    monkeypatch.setattr(comparison, "largest_difference", lambda expected, found: 0.25)
    assert main(["demo", "--models", "llama", "--output", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS" in shown
    assert "llama: The exported LlamaForCausalLM differs from the eager model" in shown
    assert "a padded row" in shown
    assert "Load:" not in shown


def test_a_missing_library_and_an_output_that_cannot_be_a_folder_are_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "taken").touch()
    assert main(["demo", "--output", str(tmp_path / "taken")]) == 2
    assert f"{tmp_path / 'taken'}: it cannot be written: taken is not a folder" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else name)
    assert main(["demo", "--output", str(tmp_path / "made")]) == 2
    shown = capsys.readouterr().err
    line = install_line("transformers,onnx")
    assert f"the demo needs onnx, onnxscript and onnxruntime, which are not installed: {line}" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("made", "left"), [(0, "nothing was written"), (1, "llama.onnx in {} is complete")])
def test_ctrl_c_says_what_is_there(made, left, tmp_path, capsys, monkeypatch):
    calls = []

    def export(name, text, output):
        if len(calls) == made:
            raise KeyboardInterrupt
        calls.append(name)
        (output / f"{name}.onnx").touch()
        return demo._Row(name, "", 0, output / f"{name}.onnx", None)

    monkeypatch.setattr(demo, "_export", export)
    output = tmp_path / "made"
    assert main(["demo", "--models", "llama,mistral", "--output", str(output)]) == 130
    shown = capsys.readouterr().err.splitlines()[-1]
    separator = "; " if made else ", "
    assert shown == "yobx-flatten: interrupted" + separator + left.format(output)
    assert output.exists() == bool(made)


def test_decode_inputs_are_made_of_the_tokens_given():
    model, tokens, sizes = make_model("mistral"), torch.arange(10).reshape(2, 5), DecodeSizes(batch=2, past=3, new=2)
    made = decode_inputs(model, sizes, tokens=tokens)
    assert made["input_ids"].tolist() == [[3, 4], [8, 9]]
    with torch.no_grad():
        expected = cache_of(model(input_ids=tokens[:, :3], use_cache=True))
    torch.testing.assert_close(cache_of(made).layers[1].keys, expected.layers[1].keys)
    with pytest.raises(FlattenError, match=r"tokens has shape \(2, 4\), but batch 2, past 3, new 2 needs \(2, 5\)"):
        decode_inputs(model, sizes, tokens=torch.zeros(2, 4))
