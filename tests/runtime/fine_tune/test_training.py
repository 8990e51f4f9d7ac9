"""A training through the pipeline beside a plain loop, on any number of devices, and across a checkpoint."""

import importlib.util
import math
import threading

import pytest
import torch

from roundpipe_runtime import CheckpointError, fine_tune, save_checkpoint
from roundpipe_runtime.fine_tune import EvalRecord, FineTuneError, Lora, Settings, StepRecord, Training, add_lora
from roundpipe_runtime.fine_tune import training as training_file
from tests.cases import cases
from tests.runtime import tiny_training as tiny
from tests.runtime.tiny_training import same_bits
from yobx_flatten.errors import MissingDependencyError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

pytestmark = pytest.mark.slow


def settings(**options) -> Settings:
    options.setdefault("devices", "virtual:2")
    return Settings(**{"batch": 4, "microbatches": 3, "steps": 6, "lr": 5e-3, "warmup": 2, **options})


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def trained(model, made, chosen):
    with Training(model, made, chosen) as training:
        records = tiny.records_of(training)
    return records, copied(model)


def losses(records):
    return [record.loss for record in records if isinstance(record, StepRecord)]


@pytest.mark.parametrize("size", [{"batch": 6}, {"batch": 3, "accumulate": 2}], ids=str)
def test_it_learns_what_a_plain_loop_learns(size):
    """Thirty steps of the same rows, within 0.05 %; accumulated batches of three rows learn what one of six does."""
    made = tiny.blocks(length=24, rows=80)
    chosen = settings(steps=30, check=False, **size)
    plain = tiny.source().load()
    expected = tiny.train_plainly(plain, made, chosen)
    records, _ = trained(tiny.source().load(), made, chosen)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.loss for record in steps] == pytest.approx([loss for loss, _ in expected], rel=5e-4)
    assert [record.grad_norm for record in steps] == pytest.approx([norm for _, norm in expected], rel=5e-3)
    assert steps[-1].loss < 0.6 * steps[0].loss
    assert steps[0].tokens == 6 * 24
    held_out = made.tokens[made.held_out].long()
    with torch.no_grad():
        loss = plain.eval()(input_ids=held_out, labels=held_out).loss.item()
    assert records[-1] == EvalRecord(30, pytest.approx(loss, rel=5e-4), held_out.numel(), records[-1].seconds)


def test_parameters_that_stay_change_no_bit():
    """Adapters on weights that stay on two devices: the same losses and weights, and weights go up once."""
    made, states = tiny.blocks(), []
    for keep in (0, "auto"):
        torch.manual_seed(0)
        model = add_lora(tiny.source().load(), Lora.parse("4"))
        frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
        with Training(model, made, settings(keep_parameters=keep)) as training:
            records = tiny.records_of(training)
        states.append((losses(records), copied(model), training.pipeline.parameter_traffic))
    (plain, weights, moved), (found, bits, kept) = states
    assert found == plain
    assert same_bits(bits, weights)
    assert moved.reused == 0
    assert moved.uploaded - kept.uploaded >= 4 * frozen


def test_weights_of_16_bits_learn_through_masters():
    made = tiny.blocks()
    chosen = settings(lr=1e-5, warmup=0, schedule="constant", steps=4)
    model = tiny.source().load().bfloat16()
    with Training(model, made, chosen) as training:
        before = [p.detach().clone() for p in training.pipeline.optim_parameters()]
        training.train()
        after = list(training.pipeline.optim_parameters())
    assert all(p.dtype == torch.float32 for p in after)
    moved = [(new - old).abs().max().item() for new, old in zip(after, before, strict=True)]
    assert all(0 < size < 1e-4 for size in moved)


def test_only_adapters_learn_and_are_restored(tmp_path):
    pytest.importorskip("peft", reason="LoRA is PEFT's")
    made, chosen = tiny.blocks(), settings(lr=5e-2, steps=8)
    model, again = (add_lora(tiny.source().load(), Lora.parse("4")) for _ in range(2))
    before = copied(model)
    with Training(model, made, chosen) as training:
        assert sum(len(group["params"]) for group in training.optimizer.param_groups) == 2 * 21
        records = tiny.records_of(training, checkpoints=tmp_path, every=6)
    assert losses(records)[-1] < losses(records)[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    with Training(again, made, chosen) as second:
        assert second.restore(tmp_path)
        assert second.step == 6
        second.train()
    assert same_bits(again.state_dict(), model.state_dict())


def test_evaluation_comes_when_it_is_due_and_changes_nothing():
    """After every second step; the weights are those of a training that was never evaluated."""
    made = tiny.blocks()
    records, state = trained(tiny.source().load(), made, settings(eval_every=2, steps=5))
    steps, evaluations = [(StepRecord, step) for step in range(1, 6)], [(EvalRecord, step) for step in (2, 4, 5)]
    expected = [*steps[:2], evaluations[0], *steps[2:4], evaluations[1], steps[4], evaluations[2]]
    assert [(type(record), record.step) for record in records] == expected
    never = tiny.blocks(eval_share=0.0)
    never = type(made)(never.tokens, made.training, never.held_out, never.left_over, never.digest)
    plain_records, plain_state = trained(tiny.source().load(), never, settings(steps=5))
    assert losses(plain_records) == losses(records)
    assert same_bits(plain_state, state)


@pytest.mark.parametrize("count", cases([12, 13], quick=[13]))
def test_an_evaluation_of_a_large_vocabulary_is_that_of_the_plain_model(count):
    """32,000 words, rows of 512: logits of two rows are too large to be computed at once, and those of one are not."""
    made = tiny.source(vocab_size=32000, max_position_embeddings=512, hidden_size=16, num_hidden_layers=2).load()
    tokens = torch.randint(32000, ((count + 8) * 512,), dtype=torch.int32)
    rows = fine_tune.make_blocks(tokens, length=512, eval_share=count / (count + 8))
    assert len(rows.held_out) == count
    with torch.no_grad():
        ids = rows.tokens[rows.held_out].long()
        expected = sum(made.eval()(input_ids=row[None], labels=row[None]).loss.item() for row in ids) / count
    with Training(made.train(), rows, settings(batch=8, microbatches=None, check=False)) as training:
        assert training.evaluate().eval_loss == pytest.approx(expected, rel=1e-6)


def test_clipping_scales_the_gradient_down():
    """The norm that is told is the one before; with 0 nothing is scaled."""
    made = tiny.blocks()
    ends = {}
    for clip in (0.0, 1e-3, 1e9):
        records, ends[clip] = trained(tiny.source().load(), made, settings(clip=clip, steps=2, weight_decay=0.0))
        assert records[0].grad_norm > 0.1
    assert same_bits(ends[0.0], ends[1e9])
    assert not same_bits(ends[0.0], ends[1e-3])


def test_a_loss_that_is_not_finite_ends_it_before_it_is_learnt_from(monkeypatch):
    model, before = tiny.source().load(), {}
    with Training(model, tiny.blocks(), settings()) as training:

        def spoil(record):
            before.update(copied(model))
            nan = torch.tensor(math.nan)
            monkeypatch.setattr(type(training.pipeline), "forward_backward", lambda *args, **kwargs: nan)

        with pytest.raises(FineTuneError, match=r"Step 2: the loss is nan. .*--lr 0.0005"):
            fine_tune.run(training, show=spoil)
        assert same_bits(before, model.state_dict())


def test_a_gradient_that_is_not_finite_is_not_stepped(monkeypatch):
    """The loss may still be a number."""
    model = tiny.source().load()
    with Training(model, tiny.blocks(), settings()) as training:
        before = copied(model)
        forward_backward = type(training.pipeline).forward_backward

        def spoilt(pipeline, **options):
            loss = forward_backward(pipeline, **options)
            model.model.norm.weight.grad[0] = math.inf
            return loss

        monkeypatch.setattr(type(training.pipeline), "forward_backward", spoilt)
        with pytest.raises(FineTuneError, match="Step 1: the norm of the gradients is inf"):
            training.train()
        assert same_bits(before, model.state_dict())


def test_a_model_that_sees_what_comes_is_refused_and_so_is_a_missing_accelerate(monkeypatch):
    """An encoder's loss would fall to nothing, and mean nothing. Both before the model is cut."""
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(FineTuneError, match="BertLMHeadModel sees the token that it should predict"):
        Training(BertLMHeadModel(BertConfig(vocab_size=259, **sizes)), tiny.blocks(), settings())
    decoder = BertLMHeadModel(BertConfig(vocab_size=259, is_decoder=True, **sizes))
    Training(decoder, tiny.blocks(), settings(check=True, steps=1)).close()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name))
    with pytest.raises(MissingDependencyError, match=r"needs accelerate.*\n.*pip install .*\[transformers,train\]'"):
        Training(decoder, tiny.blocks(), settings())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a training that got Ctrl-C after its second step."""
    folder = tmp_path_factory.mktemp("stopped")
    with Training(tiny.source().load(), tiny.blocks(), settings()) as training:
        assert not training.restore(folder)
        tiny.records_of(training, stop=2, checkpoints=folder)
    return folder


class TestCheckpoints:
    @pytest.mark.parametrize("stop", cases([1, 3, 5], quick=[3]))
    def test_a_restored_training_goes_on_to_the_same_bits(self, tmp_path, stop):
        """On another number of devices, with another object for everything; the evaluation is part of it."""
        made, options = tiny.blocks(), {"eval_every": 2, "accumulate": 2, "steps": 6}
        dropout = {"attention_dropout": 0.1}
        expected = trained(tiny.source(**dropout).load(), made, settings(**options))
        with Training(tiny.source(**dropout).load(), made, settings(**options)) as first:
            seen = tiny.records_of(first, stop=stop, checkpoints=tmp_path)
        model = tiny.source(**dropout).load(seed=9)
        with Training(model, made, settings(devices="virtual:3", check=False, **options)) as second:
            assert second.restore(tmp_path)
            assert second.step == stop
            seen += tiny.records_of(second)
        assert losses(seen) == losses(expected[0])
        assert [type(record) for record in seen] == [type(record) for record in expected[0]]
        assert same_bits(model.state_dict(), expected[1])

    def test_the_number_of_microbatches_is_gone_on_with(self, tmp_path):
        """Nobody named it: three for two devices, and three still where another number would be taken."""
        made, chosen = tiny.blocks(), {"microbatches": None, "check": False}
        _, expected = trained(tiny.source().load(), made, settings(**chosen))
        with Training(tiny.source().load(), made, settings(**chosen)) as first:
            tiny.records_of(first, stop=1, checkpoints=tmp_path)
        model = tiny.source().load(seed=9)
        with Training(model, made, settings(devices="virtual:1", **chosen)) as second:
            assert second.microbatches == 2
            second.restore(tmp_path)
            assert second.microbatches == 3
            second.train()
        assert same_bits(model.state_dict(), expected)
        with Training(model, made, settings(**{**chosen, "microbatches": 4})) as other:
            other.restore(tmp_path)
            assert other.microbatches == 4

    @pytest.mark.parametrize(
        ("change", "text", "layers", "words"),
        [
            ({"batch": 6}, {}, 3, "was trained with --batch 4"),
            ({"accumulate": 2}, {}, 3, "was trained with --accumulate 1"),
            ({"seed": 1}, {}, 3, "was trained with --seed 0"),
            ({"steps": 1}, {}, 3, "is at step 2, but --steps is only 1"),
            ({}, {"rows": 59}, 3, "was trained with another --text"),
            ({}, {"length": 12}, 3, "was trained with --length 16"),
            ({}, {}, 2, "The checkpoint is for a different model. Names or shapes"),
        ],
    )
    def test_other_batches_and_another_model_are_refused(self, stopped, change, text, layers, words):
        """The place in the data would be another one."""
        with (
            Training(tiny.source(num_hidden_layers=layers).load(), tiny.blocks(**text), settings(**change)) as other,
            pytest.raises(FineTuneError if layers == 3 else CheckpointError) as caught,
        ):
            other.restore(stopped)
        assert words in str(caught.value)

    def test_a_checkpoint_of_something_else_is_refused(self, tmp_path):
        with Training(tiny.source().load(), tiny.blocks(), settings()) as training:
            save_checkpoint(tmp_path, training.pipeline, optimizer=training.optimizer, data={"step": 1})
            with pytest.raises(FineTuneError, match="or a new folder: --checkpoint"):
                training.restore(tmp_path)


def test_a_training_may_end_before_its_last_step(tmp_path):
    """Threads end, there is no second beginning, and the checkpoint is a model with the weights of its step."""
    model, made = tiny.source().load(), tiny.blocks()
    threads = set(threading.enumerate())
    with Training(model, made, settings(schedule="constant")) as training:
        tiny.records_of(training, stop=2, checkpoints=tmp_path)
        with pytest.raises(FineTuneError, match=r"was stopped after step 2, .*\n.*\n.*training\.restore\(folder\)"):
            training.train()
    assert set(threading.enumerate()) <= threads
    expected = tiny.source().load()
    with Training(expected, made, settings(schedule="constant", steps=2)) as training:
        training.train()
        training.train()  # nothing is left to do
    assert same_bits(model.state_dict(), expected.state_dict())
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert same_bits(saved.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("change", "rate"),
    [({"lr": 1e-3}, 1e-3 * (1 + math.cos(math.pi / 4)) / 2), ({"steps": 12}, 5e-3 * (1 + math.cos(math.pi / 10)) / 2)],
)
def test_a_schedule_given_at_the_restore_counts(tmp_path, change, rate):
    """Not the rate or the number of steps of the checkpoint: what the optimizer steps with is the new one."""
    with Training(tiny.source().load(), tiny.blocks(), settings()) as first:
        tiny.records_of(first, stop=3, checkpoints=tmp_path)
    rates = []
    with Training(tiny.source().load(), tiny.blocks(), settings(**change)) as second:
        second.restore(tmp_path)
        second.optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
        step, *_ = tiny.records_of(second)
    assert rates[0] == pytest.approx(rate)
    assert step.lr == rates[0]


def test_the_causal_check_costs_two_rows_of_four_tokens(monkeypatch):
    model = tiny.source().load()
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **kwargs: calls.append(kwargs["input_ids"].shape) or forward(**kwargs))
    for mode in (True, False):
        model.train(mode)
        training_file._check_causal(model)
        assert model.training is mode
    assert calls == [(1, 4)] * 4
