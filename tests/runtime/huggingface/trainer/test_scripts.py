"""Ordinary fine-tuning scripts run as they are, and with three lines changed: the same curves, the same files."""

import difflib
import json
import pathlib
import runpy
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
pytest.importorskip("tokenizers", reason="the scripts read text")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.runtime.huggingface.trainer.trainer_runs import TOLERANCE, make_model

pytestmark = pytest.mark.slow

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
MODELS = {"causal_lm": "llama", "classification": "bert", "seq2seq": "t5"}


def save_tokenizer(folder):
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet())[:255]:
        vocabulary[letter] = len(vocabulary)
    model = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="</s>", bos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    made.save_pretrained(folder)


def changed(script):
    kind = "Seq2SeqTrainer" if "Seq2SeqTrainer(" in script else "Trainer"
    script = script.replace(f"from transformers import {kind}\n", f"from roundpipe_runtime import RoundPipe{kind}\n")
    script = script.replace(f"trainer = {kind}(\n", f"trainer = RoundPipe{kind}(\n")
    return script.replace("    model=model,\n", '    model=model, devices="virtual:2", microbatches=3,\n')


def run(path, *arguments, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)  # transformers 4 leaves it behind
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    return runpy.run_path(str(path))


# transformers 4 says so when it removes checkpoints
@pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_three_lines_are_changed_and_nothing_else(tmp_path, monkeypatch, name):
    folder = tmp_path / "model"
    make_model(MODELS[name]).save_pretrained(folder)
    save_tokenizer(folder)
    plain = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    ours = changed(plain)
    changes = [line for line in difflib.ndiff(plain.splitlines(), ours.splitlines()) if line.startswith("+ ")]
    assert len(changes) == 3
    ends = []
    for number, script in enumerate((plain, ours)):
        path = tmp_path / f"{number}.py"
        path.write_text(script, encoding="utf-8")
        ends.append(run(path, folder, json.decoder.__file__, tmp_path / f"output-{number}", monkeypatch=monkeypatch))
    expected, found = ends
    found["trainer"].pipeline.close()
    assert not found["trainer"].pipeline.cut.report.is_whole
    assert found["metrics"].keys() == expected["metrics"].keys()
    history = found["trainer"].state.log_history
    # the last evaluation is of the best checkpoint, of which some versions load a part (transformers#43701)
    for one, other in zip(history[:-1], expected["trainer"].state.log_history[:-1], strict=True):
        keys = {"loss", "grad_norm", "learning_rate", *(key for key in other if key.startswith("eval_"))}
        for key in keys & {key for key in other if not key.endswith(("runtime", "per_second"))}:
            assert one[key] == pytest.approx(other[key], abs=TOLERANCE), (key, other)
    if found["args"].load_best_model_at_end:
        best = found["trainer"].state.best_global_step
        losses = [entry["eval_loss"] for entry in history if entry["step"] == best and "eval_loss" in entry]
        assert found["metrics"]["eval_loss"] == pytest.approx(losses[0], abs=1e-6)
    files = [{p.name for p in (tmp_path / f"output-{n}").iterdir()} for n in (0, 1)]
    assert files[0] == files[1]
    loaded = type(found["model"]).from_pretrained(tmp_path / "output-1").state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in found["model"].state_dict().items())
