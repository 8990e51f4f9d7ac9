"""Tokens of conversations, which of them count, and rows of one length or of their own."""

import os

import pytest
import torch

from roundpipe_runtime.fine_tune import ByteTokenizer, ChatTokens, FineTuneError, make_chat_rows
from roundpipe_runtime.fine_tune.data.chat_rows import check_packing
from roundpipe_runtime.fine_tune.data.conversations import Encoder, conversation_of
from roundpipe_runtime.fine_tune.models import FolderTokenizer
from roundpipe_runtime.fine_tune.trainer import Order
from tests.runtime import tiny_training as tiny
from yobx_flatten.core.files import limited

pytest.importorskip("transformers")

# Two turns, of which the template with marks counts the answers up to `</s>`.
TURNS = [
    {"role": "user", "content": "the pipe holds"},
    {"role": "assistant", "content": "a layer"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "then another"},
]


def encoder(template=tiny.CHAT):
    return Encoder(FolderTokenizer(tiny.chat_tokenizer(template), "words"))


def skipping(condition, template=tiny.CHAT):
    """A template that leaves out messages for which the condition does not hold."""
    begun = template.replace("<{{", f"{{% if {condition} %}}<{{{{", 1)
    return begun.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)


def spelled(encode, conversation):
    found = encode(conversation)
    names = encode._inner.convert_ids_to_tokens(found.ids)
    return " ".join(name + "*" * counts for name, counts in zip(names, found.counts, strict=True))


@pytest.mark.parametrize("template", [tiny.CHAT, tiny.CHAT_WITH_MARKS])
@pytest.mark.parametrize(
    ("row", "first"),
    [({"messages": TURNS}, "a* layer* </s>*"), ({"prompt": TURNS[:3], "completion": TURNS[3:]}, "a layer </s>")],
    ids=["messages", "an answer in the prompt"],
)
def test_the_answers_count_and_nothing_else(row, first, template):
    """Found by prefix, or marked by the template; an answer in the prompt does not count."""
    assert spelled(encoder(template), conversation_of(row, "a:1")) == (
        f"<user> the pipe holds </s> <assistant> {first} <user> again </s> <assistant> then* another* </s>*"
    )


def test_a_template_that_trl_knows_has_the_marks_of_trl():
    """Qwen 3 leaves out what earlier answers thought; in TRL's template answers are as they were given."""
    from trl.chat_template_utils import qwen3_chat_template

    shown = spelled(encoder(qwen3_chat_template), conversation_of({"messages": TURNS}, "a:1"))
    assert all(f" {word} " in shown for word in ("a*", "layer*", "then*", "another*", "pipe", "again"))


GREETED = [{"role": "assistant", "content": "the pipe"}, *TURNS[:2]]
STARTS = {
    "messages": {"messages": GREETED},
    "ShareGPT": {"conversations": [{"from": one["role"], "value": one["content"]} for one in GREETED]},
    "no prompt": {"prompt": [], "completion": GREETED},
    "system": {"messages": GREETED, "system": "again"},
}


@pytest.mark.parametrize("template", [tiny.CHAT, tiny.CHAT_WITH_MARKS, "<s>" + tiny.CHAT])
@pytest.mark.parametrize("start", STARTS)
def test_an_assistant_that_begins_is_learnt(start, template):
    """All that is its own counts, from the first word on, and the end; in text without a template, from the second."""
    shown = spelled(encoder(template), conversation_of(STARTS[start], "a:1"))
    assert shown.endswith("<assistant> the* pipe* </s>* <user> the pipe holds </s> <assistant> a* layer* </s>*")
    assert shown.startswith("<assistant>") == (start != "system" and not template.startswith("<s>"))
    for prompt, tokens in (("", "the* pipe* </s>*"), ("the pipe", "the pipe the* pipe* </s>*")):
        made = conversation_of({"prompt": prompt, "completion": " the pipe"}, "a:1")
        assert spelled(encoder(template), made) == spelled(encoder(None), made) == tokens


STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}" + tiny.CHAT
REFUSED = {
    "none": (None, TURNS, r"words has no chat template, which a:1 needs. Give a template: --chat-template"),
    "an error": ("{{ raise_exception('no') }}", TURNS, "a:1: the chat template of words rejects it: no"),
    "roles": (STRICT, GREETED, r"a:1: .* roles must alternate. The assistant speaks first: put a "),
    # as those that leave out what a model thought before: the answer that is learnt would be another one
    "earlier messages that change": (
        tiny.CHAT.replace("message['content']", "(message['content'] if loop.last else 'a')"),
        TURNS,
        r"a:1: the chat template of words formats earlier messages .*generation",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_template_does_not_take_is_one_line(name):
    template, turns, words = REFUSED[name]
    with pytest.raises(FineTuneError, match=words):
        encoder(template)(conversation_of({"messages": turns}, "a:1"))
    with pytest.raises(FineTuneError, match=r"the byte tokenizer has none for roles.*--tokenizer DIR"):
        Encoder(ByteTokenizer())


READING = (
    "{% if tools %}{{ tools[0].name }} {% endif %}{% if short %}one {% endif %}{% for m in messages %}<{{ m.role }}> "
    "{% if m.get('thought') and not loop.first %}{{ m.thought }} {% endif %}{% if 'called' in m %}{{ m['called'] }} "
    "{% endif %}{{ m.content | trim }} </s> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
# What a row may have beside its messages, and whether the template above reads it
FIELDS = {
    "tools": ({"tools": [{"name": "pipe"}]}, True),
    "tools as text": ({"tools": '[{"name": "pipe"}]'}, True),
    "a setting": ({"chat_template_kwargs": {"short": True}}, True),
    "a variable": ({"short": True}, True),
    "another setting": ({"chat_template_kwargs": {"long": True}}, False),
    "images": ({"images": ["a.png"]}, False),
    "an option of the tokenizer": ({"max_length": 2}, False),
    "another template": ({"chat_template_kwargs": {"chat_template": "{{ 7 }}"}}, False),
    "the messages": ({"chat_template_kwargs": {"messages": []}}, False),
    "a special token": ({"eos_token": "the"}, False),
    "a field of messages": ({"messages": [TURNS[0], {**TURNS[1], "called": "holds"}]}, True),
    "one of later messages": ({"messages": [{**one, "thought": "holds"} for one in TURNS[:2]]}, True),
    "one of other messages": ({"messages": [{**TURNS[0], "thought": "holds"}, TURNS[1]]}, False),
    "another of messages": ({"messages": [{**TURNS[0], "image": "a.png"}, TURNS[1]]}, False),
    "one of tools only": ({"messages": [{**TURNS[0], "name": "holds"}, TURNS[1]], "tools": [{"name": "pipe"}]}, False),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_read_by_the_template_or_refused(field):
    """With the option that leaves it out, which makes the row what it is without the field."""
    beside, is_read = FIELDS[field]
    row = {"messages": TURNS[:2], **beside}
    if is_read:
        found = spelled(encoder(READING), conversation_of(row, "a:1"))
        assert found != spelled(encoder(READING), conversation_of({"messages": TURNS[:2]}, "a:1")) or "later" in field
        return
    with pytest.raises(
        FineTuneError, match=r"a:1.* does not use, so the model would not see them.*--ignore-fields"
    ) as caught:
        encoder(READING)(conversation_of(row, "a:1"))
    ignored = str(caught.value).partition("--ignore-fields ")[2].split(",")
    if "chat_template_kwargs" in beside:
        ignored = ["chat_template_kwargs"]
    found = spelled(encoder(READING), conversation_of(row, "a:1", ignored))
    assert found.endswith("<user> the pipe holds </s> <assistant> a* layer* </s>*")


def test_a_template_that_writes_messages_as_they_are_reads_all_their_fields():
    whole = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    row = {"messages": [{**TURNS[0], "name": "layer"}, TURNS[1]]}
    marked = whole.replace("{{ m", "{% generation %}{{ m").replace("tojson }}", "tojson }}{% endgeneration %}")
    assert encoder(marked)(conversation_of(row, "a:1")).ids


@pytest.mark.parametrize("template", [tiny.CHAT, tiny.CHAT_WITH_MARKS])
@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_message_that_the_template_leaves_out_is_refused(role, template):
    """A template without content learns nothing, and a longer row would not help."""
    turns = [TURNS[0], {"role": role, "content": "again"}, *TURNS[1:]]
    with pytest.raises(FineTuneError, match=rf"a:1, message \d \({role}\): the chat template of words omits this "):
        encoder(skipping(f"message['role'] != '{role}'", template))(conversation_of({"messages": turns}, "a:1"))
    empty = encoder("{% for message in messages %}<{{ message['role'] }}> {% endfor %}")
    with pytest.raises(FineTuneError, match=r"a:1, message 1 \(user\): the chat template of words omits this "):
        empty(conversation_of({"messages": TURNS}, "a:1"))


def test_a_message_that_is_left_out_is_refused_where_a_check_could_overlook_it(monkeypatch):
    """A long one whose text another message has; one that TRL's template, by which is trained, leaves out."""
    text = "the pipe holds a layer again then another"
    turns = [{"role": "user", "content": text}, TURNS[1], {"role": "user", "content": text}, TURNS[3]]
    refused = pytest.raises(FineTuneError, match=r"a:1, message 1 \(user\): the chat template of words omits this ")
    with refused:
        encoder(skipping("loop.index != 1"))(conversation_of({"messages": turns}, "a:1"))
    marked = skipping("message['role'] != 'user'", tiny.CHAT_WITH_MARKS)
    monkeypatch.setattr("trl.chat_template_utils.get_training_chat_template", lambda tokenizer: marked)
    with refused:
        encoder()(conversation_of({"messages": TURNS}, "a:1"))


def chats(*lengths):
    return [ChatTokens(list(range(3, 3 + size)), [False, *[True] * (size - 1)]) for size in lengths]


def test_rows_are_padded_on_the_right_where_nothing_counts():
    rows = make_chat_rows(chats(2, 4), length=8)
    batch = rows.collate([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [[3, 4, 0, 0], [3, 4, 5, 6]]
    assert batch["labels"].tolist() == [[-100, 4, -100, -100], [-100, 4, 5, 6]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_packed_rows_hold_every_conversation_once_and_none_in_parts():
    """Six conversations in three rows of eight: longest first, where they fit closest."""
    rows = make_chat_rows(chats(5, 3, 8, 2, 4, 2), length=8, packed=True)
    assert [row["position_ids"].tolist() for row in (rows[n] for n in range(len(rows)))] == [
        [*range(8)],
        [*range(5), *range(3)],
        [*range(4), *range(2), *range(2)],
    ]
    assert rows.counted == 5 + 3 + 8 + 2 + 4 + 2 - 6


def test_a_conversation_without_an_answer_in_its_row_is_left_out():
    """It is cut first; the number of both is known."""
    late = ChatTokens([1] * 9, [False] * 8 + [True])
    rows = make_chat_rows([*chats(3, 9), late], length=6)
    assert (len(rows), rows.left_out, rows.cut) == (2, 1, 2)
    with pytest.raises(FineTuneError, match=r"None of 1 conversations has an answer in its first 6 tokens.*--length 9"):
        make_chat_rows([late], length=6)
    unmarked = ChatTokens([1] * 4, [False] * 4)
    with pytest.raises(FineTuneError, match=r"None of 1 conversations .*: the chat template marks no tokens"):
        make_chat_rows([unmarked], length=6)


def test_neighbours_in_the_order_have_similar_lengths():
    """Padding is at most a tenth here, where unsorted batches would be half of it; each row comes once."""
    lengths = torch.randint(1, 100, (400,), generator=torch.Generator().manual_seed(0))
    order = Order(torch.arange(400), seed=0, lengths=lengths, batch=4)
    batches = torch.tensor(list(order)).view(-1, 4)
    assert sorted(order) == list(range(400))
    padded = (lengths[batches].max(1).values * 4).sum()
    assert padded < 1.1 * lengths.sum()
    plain = torch.tensor(list(Order(torch.arange(400), seed=0))).view(-1, 4)
    assert (lengths[plain].max(1).values * 4).sum() > 1.4 * lengths.sum()
    assert not torch.equal(lengths[batches].max(1).values, lengths[batches].max(1).values.sort().values)


def test_a_model_whose_conversations_see_each_other_is_not_packed():
    """GPT-2 with positions, and a state-space model, whose state goes on over the whole row."""
    from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

    check_packing(tiny.source().load())
    check_packing(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2)))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(FineTuneError, match=r"MambaForCausalLM may mix packed conversations, .* Leave --pack out"):
        check_packing(mamba)


ENDLESS = {
    "loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}x",
    "a wide number": "{{ '%9999999999d' % 1 }}",
    "a doubled text": "{% set n = namespace(t='x') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no limits")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_takes_too_much_is_an_error_of_its_row(name, monkeypatch):
    """A stranger's template is a program: it hung, or took all memory."""
    monkeypatch.setattr(limited, "_CPU_SECONDS", 1)
    made = conversation_of({"messages": TURNS}, "a:1")
    with pytest.raises(FineTuneError, match=r"chat template of words .*(CPU seconds|memory)"):
        encoder(ENDLESS[name])(made)
