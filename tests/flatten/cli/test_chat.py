"""`yobx-flatten chat` and `generate --chat`: the prompt is that of the chat template, the reply that of the model."""

import io
import json
import shutil

import pytest
import torch

pytest.importorskip("jinja2")

from transformers import ByT5Tokenizer

from tests.flatten.model_folder.exported_folders import exported
from yobx_flatten import InvalidArgumentError, OnnxForCausalLM
from yobx_flatten.__main__ import main

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    model, source = exported("llama")
    folder = tmp_path_factory.mktemp("chat") / "out"
    shutil.copytree(source, folder)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return model, folder, tokenizer


def reply(talks, text, tokens):
    model, _, tokenizer = talks
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_conversation_of_two_turns_with_a_system_prompt_is_that_of_the_model(talks, capsys):
    _, folder, _ = talks
    asked = ["--system", "S", "--message", "hi", "--message", "yo", "--tokens", "6", "--greedy", "--json"]
    assert main(["chat", str(folder), *asked]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    first = reply(talks, "s:S;u:hi;a:", 6)
    second = reply(talks, f"s:S;u:hi;a:{first};u:yo;a:", 6)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in messages] == ["S", "hi", first, "yo", second]


def test_lines_of_the_input_are_turns_until_an_empty_one(talks, capsys, monkeypatch):
    _, folder, _ = talks
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nnever read\n"))
    assert main(["chat", str(folder), "--tokens", "5", "--greedy"]) == 0
    assert capsys.readouterr().out == reply(talks, "u:hi;a:", 5) + "\n"


def test_one_message_is_answered_by_generate_and_in_python(talks, capsys):
    _, folder, _ = talks
    expected = reply(talks, "u:hi;a:", 5)
    assert main(["generate", str(folder), "--chat", "--prompt", "hi", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"prompt": "hi", "text": expected}]
    model = OnnxForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "hi"}]
    assert model.chat(messages, max_new_tokens=5, do_sample=False) == expected
    with pytest.raises(InvalidArgumentError, match="messages must be a list"):
        model.chat("hi")
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\] is .* without a role"):
        model.chat([{"content": "hi"}])


def test_a_tokenizer_without_a_template_is_named(capsys):
    folder = exported("llama")[1]
    assert main(["chat", str(folder), "--message", "hi"]) == 2
    assert "has no chat template" in capsys.readouterr().err
