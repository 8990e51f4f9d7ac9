"""Conversations of four forms, as people keep them, and the errors for other rows."""

import json

import pytest

from roundpipe_runtime.fine_tune import FineTuneError
from roundpipe_runtime.fine_tune.data.conversations import conversation_of, read_conversations
from roundpipe_runtime.fine_tune.data.text_files import find_texts

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
FORMS = {
    "messages": {"messages": ASKED, "id": 3},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASKED[1]]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "Alpaca": {"instruction": "Hi", "input": "", "output": "Hello"},
    "lists": {"prompt": ASKED[:1], "completion": ASKED[1:]},
}


TOOLS = {"tools": [{"type": "function", "function": {"name": "add"}}]}
NO_THINKING, OTHERS = {"enable_thinking": False}, {"images": ["a.png"], "score": 0}
# Fields beside the messages, and the variables of the template that they become.
BESIDE = {
    "system": ({"system": "Be brief"}, {}),
    "tools": (TOOLS, TOOLS),
    "tools as text": ({"tools": json.dumps(TOOLS["tools"])}, TOOLS),
    "settings": ({"chat_template_kwargs": NO_THINKING, "tools": "", "system": None}, NO_THINKING),
    "others": ({**OTHERS, "empty": [], "none": None, "id": "x"}, OTHERS),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", BESIDE)
def test_fields_beside_the_messages_are_kept_in_each_form(form, beside):
    """As a message of the system, as tools, or for the template, which decides whether it reads them."""
    fields, variables = BESIDE[beside]
    made = conversation_of({**FORMS[form], **fields}, "a:1")
    added = [{"role": "system", "content": "Be brief"}] if beside == "system" else []
    assert list(made.messages) == [*added, *ASKED]
    assert made.variables == variables


def test_fields_of_messages_are_kept_and_those_that_are_ignored_are_not():
    """Numbers that only tell rows or calls apart are neither."""
    call = {"tool_calls": [{"id": "c1", "function": {"name": "add"}}], "content": None, "role": "assistant"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "3", "name": "add", "empty": None}
    row = {"messages": [ASKED[0], call, result, ASKED[1]], "score": 1}
    made = conversation_of(row, "a:1")
    assert made.messages[1] == {**call, "content": ""}
    assert made.messages[2] == {"role": "tool", "content": "3", "name": "add"}
    made = conversation_of(row, "a:1", ["name", "score"])
    assert made.messages[2] == {"role": "tool", "content": "3"}
    assert made.variables == {}
    # a message with the names of both forms: the template must read the second text, or it is refused
    made = conversation_of({"messages": [{**ASKED[0], "value": "Bye", "from": "gpt"}, ASKED[1]]}, "a:1")
    assert made.messages[0] == {**ASKED[0], "value": "Bye", "from": "gpt"}


def test_answers_in_a_prompt_do_not_count():
    """Nor do those of weight 0, as files for OpenAI's fine-tuning state it; two texts are text."""
    made = conversation_of({"prompt": [*ASKED, ASKED[0]], "completion": [ASKED[1]]}, "a:1")
    assert made.counted == {3}
    made = conversation_of({"messages": [ASKED[0], {**ASKED[1], "weight": 0}, *ASKED], "system": "Be brief"}, "a:1")
    assert made.counted == {4}
    assert list(made.messages) == [{"role": "system", "content": "Be brief"}, *ASKED, *ASKED]
    made = conversation_of({"prompt": "1 + 1 =", "completion": " 2"}, "a:1")
    assert (made.prompt, made.completion, made.messages) == ("1 + 1 =", " 2", ())


def test_the_input_of_an_instruction_stands_below_it_and_its_history_before():
    """As Alpaca's own program writes a prompt without its preamble."""
    row = {"instruction": "Add", "input": "1, 2", "output": "3", "history": [["Hi", "Hello"]], "system": "Be brief"}
    found = conversation_of(row, "a:1").messages
    assert [message["role"] for message in found] == ["system", "user", "assistant", "user", "assistant"]
    assert found[3]["content"] == "Add\n\n1, 2"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "list.json"])
def test_lines_and_lists_are_read(tmp_path, name):
    rows = [FORMS["Alpaca"], FORMS["ShareGPT"]]
    (tmp_path / name).write_text(json.dumps(rows) if name == "list.json" else "\n".join(map(json.dumps, rows)))
    found = list(read_conversations(find_texts([tmp_path / name])))
    assert [list(one.messages) for one in found] == [ASKED, ASKED]
    assert found[1].place.endswith("list.json, row 1" if name == "list.json" else f"{name}:2")


def test_a_data_set_is_read(tmp_path):
    """Arrow fills fields that a row does not have with null."""
    datasets = pytest.importorskip("datasets")
    messages = [ASKED, [{"role": "system", "content": "x", "name": "n"}, *ASKED]]
    datasets.Dataset.from_dict({"messages": messages}).save_to_disk(tmp_path / "saved")
    first, second = read_conversations(find_texts([tmp_path / "saved"]))
    assert list(first.messages) == ASKED
    assert second.messages[0] == {"role": "system", "content": "x", "name": "n"}


MISTAKES = {
    "list": ([1], "a:1 is a list. Each row must be one of"),
    "fields": ({"body": "x", "id": 1}, "a:1 is not a conversation: it has 'body' (str), 'id' (int)"),
    "advice": ({"body": "x", "id": 1}, "If 'body' is plain text to learn: --text a --field body"),
    "empty": ({}, "a:1 is not a conversation: it has no field."),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, "a:1, message 1 has the role 'bot'. Write one of system"),
    "text": ({"messages": ["Hi"]}, "a:1, message 1 is a str. Write {"),
    "content": ({"messages": [{"role": "user", "content": 3}]}, "message 1 must have text in 'content', found a int"),
    "no answer": ({"messages": ASKED[:1]}, "a:1 has no answer to learn (roles of its messages: user). Add"),
    "weight": ({"messages": [ASKED[0], {**ASKED[1], "weight": 0.5}]}, "message 2: weight must be 1, or 0"),
    "no weight": ({"messages": [ASKED[0], {**ASKED[1], "weight": 0}]}, "a:1 has no answer to learn"),
    "mixed": ({"prompt": "x", "completion": []}, "a:1 is not a conversation: it has 'prompt' (str), 'completion' (li"),
    "system": ({"messages": ASKED, "system": 3}, "a:1, 'system', must have text in 'content', found a int"),
    "two systems": (
        {"messages": [{**ASKED[0], "role": "system"}, *ASKED], "system": "y"},
        "has a field 'system' and a message of the role 'system'",
    ),
    "tools": ({"conversations": ASKED, "tools": "{"}, "a:1: 'tools' must be a list of objects"),
    "tool": ({**FORMS["Alpaca"], "tools": ["add"]}, "a:1: 'tools' must be a list of objects"),
    "settings": ({"messages": ASKED, "chat_template_kwargs": "x"}, "'chat_template_kwargs' must be an object"),
    "beside text": ({"prompt": "x", "completion": "y", "system": "z"}, "a:1 has 'system', which the model would not"),
    "part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image": "y"}]}, ASKED[1]]},
        "message 1 must have text in 'content', found a list",
    ),
    "history": ({"instruction": "x", "output": "y", "history": ["z"]}, "'history' must be a list of pairs"),
    "a number": ({"instruction": "x", "output": "y", "history": 3}, "'history' must be a list of pairs"),
    "an instruction": ({"instruction": 5, "input": "", "output": "y"}, "a:1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_states_what_was_found_and_what_to_write(name):
    row, words = MISTAKES[name]
    with pytest.raises(FineTuneError) as caught:
        conversation_of(row, "a:1")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "{}\n{", "a.jsonl:1 is not a conversation"),
        ("b.jsonl", "{", "b.jsonl:1 is not JSON. Each row"),
        ("a.json", "[{", "a.json is not JSON"),
        ("c.json", '[{"messages": []}]'.encode("utf-16-be"), "c.json is not UTF-8, but perhaps UTF-16BE"),
        ("a.txt", "Hi", "is not read as conversations: its name does not end in .jsonl, .ndjson, .json"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FineTuneError) as caught:
        list(read_conversations(find_texts([tmp_path / name])))
    assert words in str(caught.value)
