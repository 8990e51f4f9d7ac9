"""A training on conversations: its losses are those of TRL and of the plain model, packed or not, and resumed."""

import importlib.util

import pytest
import torch

from roundpipe_runtime.fine_tune import ChatTokens, FineTuneError, Settings, StepRecord, Training, make_chat_rows
from roundpipe_runtime.fine_tune.data.conversations import Encoder, conversation_of
from roundpipe_runtime.fine_tune.models import FolderTokenizer
from roundpipe_runtime.fine_tune.trainer import Order
from tests.runtime import tiny_training as tiny

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

pytestmark = [
    pytest.mark.slow,
    # TRL sets it itself: https://github.com/huggingface/trl/blob/main/trl/trainer/base_config.py
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]

# before a test begins: its module registers outputs when it is imported
SFT_TRAINER = importlib.import_module("trl").SFTTrainer if importlib.util.find_spec("trl") else None


def words(number, count):
    return " ".join(tiny.WORDS[(number + 3 * place) % 10] for place in range(count))


def conversations(count=30):
    """Of one and two turns, with answers of one to nine words."""
    made = []
    for number in range(count):
        turns = [
            {"role": "user", "content": words(number, 1 + number % 5)},
            {"role": "assistant", "content": words(2 * number, 1 + number % 9)},
        ]
        made.append({"messages": turns * (1 + number % 2)})
    return made


def rows(template=tiny.CHAT, *, data=None, count=30, **options):
    encode = Encoder(FolderTokenizer(tiny.chat_tokenizer(template), "words"))
    found = [encode(conversation_of(row, "a:1")) for row in data or conversations(count)]
    return make_chat_rows(found, length=64, **options)


def settings(**options):
    chosen = {"batch": 4, "microbatches": 3, "steps": 6, "lr": 5e-3, "warmup": 0, "devices": "virtual:2"}
    return Settings(**{**chosen, "check": False, **options})


def model():
    return tiny.source(vocab_size=40).load()


def total_loss(alone, ids, labels):
    """The sum of the losses of the tokens that count, by the plain model, and their number."""
    with torch.no_grad():
        logits = alone(input_ids=ids.long()[None]).logits[0, :-1]
    total = torch.nn.functional.cross_entropy(logits, labels[1:].long(), reduction="sum").item()
    return total, int((labels[1:] != -100).sum())


def losses(made, chosen):
    learner = model()
    with Training(learner, made, chosen) as training:
        found = tiny.records_of(training)
    state = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    return [record.loss for record in found if isinstance(record, StepRecord)], state


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("form", ["marked messages", "prompts"])
def test_losses_are_those_of_trl(tmp_path, form, accumulate):
    """Six steps of SFTTrainer on the same rows: answers that the template marks, and completions of prompts."""
    trl = pytest.importorskip("trl", reason="it is compared with")
    from datasets import Dataset

    data = conversations()
    if form == "prompts":
        data = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in data]
    template = tiny.CHAT_WITH_MARKS if form == "marked messages" else tiny.CHAT
    made = rows(template, data=data)
    chosen = settings(schedule="constant", accumulate=accumulate)

    class InOurOrder(SFT_TRAINER):
        def _get_train_sampler(self, *args):
            count = 6 * 4 * accumulate
            return Order(made.training, seed=0, count=count, lengths=made.lengths, batch=4)

    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=accumulate,
        learning_rate=5e-3, lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=1.0, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, max_length=64, gradient_checkpointing=False, bf16=False,
        disable_tqdm=True, assistant_only_loss=form == "marked messages", dataloader_pin_memory=False,
    )  # fmt: skip
    plain = model()
    trainer = InOurOrder(
        model=plain, args=args, train_dataset=Dataset.from_list(data), processing_class=tiny.chat_tokenizer(template)
    )
    trainer.train()
    expected = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    found, state = losses(made, chosen)
    assert found == pytest.approx(expected, rel=1e-5)
    assert max((state[name] - tensor).abs().max() for name, tensor in plain.state_dict().items()) < 1e-4


def test_packed_rows_have_the_loss_of_the_conversations_alone():
    """Of the first step: the mean over the answers of all conversations in its rows, each run by the plain model."""
    made = rows(packed=True)
    order, alone = Order(made.training, seed=0, lengths=made.lengths, batch=4), model()
    found = []
    for row in [order[place] for place in range(4)]:
        starts = (made.positions[row] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], len(made.ids[row])], strict=True):
            found.append(total_loss(alone, made.ids[row][start:stop], made.labels[row][start:stop]))
    total, count = map(sum, zip(*found, strict=True))
    (first, *_), _ = losses(made, settings(steps=1))
    assert first == pytest.approx(total / count, rel=1e-6)


def test_held_out_conversations_are_weighed_by_their_answers():
    """Answers of one and of nine words; the reference is the plain model, one conversation at a time."""
    made, plain = rows(eval_share=0.3), model()
    with Training(plain, made, settings()) as training:
        found = training.evaluate()
    alone = [total_loss(plain, made.ids[row], made.labels[row]) for row in made.held_out.tolist()]
    total, count = map(sum, zip(*alone, strict=True))
    assert found.eval_loss == pytest.approx(total / count, rel=1e-5)
    assert found.eval_tokens == made.tokens_in(made.held_out.tolist())


@pytest.mark.parametrize("packed", [False, True])
def test_a_resumed_training_goes_on_to_the_same_bits(tmp_path, packed):
    """On other devices, in the middle of an epoch; other conversations are refused."""
    made = rows(packed=packed, count=60)
    expected = losses(made, settings())
    with Training(model(), made, settings()) as first:
        seen = tiny.records_of(first, stop=3, checkpoints=tmp_path)
    learner = model()
    with Training(learner, made, settings(devices="virtual:1")) as second:
        assert second.restore(tmp_path)
        seen += tiny.records_of(second)
    assert [record.loss for record in seen] == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in learner.state_dict().items())
    with (
        Training(model(), rows(packed=packed, count=59), settings()) as other,
        pytest.raises(FineTuneError, match="was trained with another --chat"),
    ):
        other.restore(tmp_path)


def test_groups_of_rows_learn_what_the_batch_learns():
    """All rows are padded alike, so that the numbers of a group do not depend on the other groups."""
    expected, _ = losses(rows(), settings())
    with Training(model(), rows(), settings(replicas=2, microbatches=2)) as training:
        lengths = {len(row) for row in training.blocks.collate([training.blocks[0]])["input_ids"]}
        found = [record.loss for record in tiny.records_of(training) if isinstance(record, StepRecord)]
    assert lengths == {max(map(len, rows().ids))}
    assert found == pytest.approx(expected, rel=1e-4)


def test_tokens_of_a_step_are_those_of_its_rows():
    """Without padding: rows of two lengths."""
    chats = [ChatTokens([5] * size, [False] + [True] * (size - 1)) for size in (3, 9) * 4]
    made = make_chat_rows(chats, length=16)
    with Training(model(), made, settings(steps=2)) as training:
        records = tiny.records_of(training)
    assert sum(record.tokens for record in records) == sum(map(len, made.ids))
