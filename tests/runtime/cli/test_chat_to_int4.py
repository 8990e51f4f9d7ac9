"""From conversations to a folder in 4 bits that chats: one command, killed half-way and resumed, and one export."""

import json
import signal

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

from roundpipe_runtime.__main__ import main
from roundpipe_runtime.fine_tune import model_source
from tests import fresh_process
from tests.runtime import tiny_training as tiny
from yobx_flatten.__main__ import main as flatten

pytestmark = pytest.mark.slow

# the word that is asked for, and the answer that is learnt
ANSWERS = {"pipe": "holds a layer", "layer": "then another one", "one": "and again the pipe"}


def weights(folder):
    return model_source(folder).load().state_dict()


def test_a_killed_chat_training_is_resumed_exported_in_4_bits_and_answers(tmp_path, monkeypatch, capsys):
    """Losses and weights are bitwise those of an uninterrupted run, and the folder gives the trained answers."""
    monkeypatch.chdir(tmp_path)
    tiny.weights_folder(tmp_path / "model", tokenizer=False)
    tiny.chat_tokenizer().save_pretrained(tmp_path / "model")
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in ANSWERS.items()
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in turns * 8))
    command = ["train", "model", "--chat", "chats.jsonl", "--length", "32", "--batch", "6", "--microbatches", "3"]
    command += ["--steps", "30", "--lr", "1e-2", "--every", "4", "--no-check"]
    one, other = (["-o", name, "--metrics", f"{name}.jsonl"] for name in ("whole", "killed"))
    assert main([*command, *one, "--devices", "virtual:2"]) == 0
    metrics = tmp_path / "killed.jsonl"
    words = ["-m", "roundpipe_runtime", *command, *other, "--devices", "virtual:1"]
    with fresh_process.start(*words, cwd=tmp_path, imported=fresh_process.TRAINER) as process:
        process.wait_for(lambda: metrics.exists() and metrics.read_text().count('"loss"') >= 15)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    assert main([*command, *other, "--devices", "virtual:3", "--resume"]) == 0
    assert tiny.metrics_of(metrics) == tiny.metrics_of(tmp_path / "whole.jsonl")
    expected = weights("whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights("killed").items())

    assert flatten(["export", "killed", "-o", "int4", "--quantize", "int4"]) == 0
    capsys.readouterr()
    assert flatten(["chat", "int4", "--message", "pipe", "--tokens", "9", "--greedy", "--json"]) == 0
    _, said = json.loads(capsys.readouterr().out)["messages"]
    assert said["content"] == ANSWERS["pipe"]
    for question, answer in ANSWERS.items():
        assert flatten(["generate", "int4", "--chat", "--prompt", question, "--tokens", "9", "--json"]) == 0
        assert [row["text"] for row in json.loads(capsys.readouterr().out)["rows"]] == [answer]
