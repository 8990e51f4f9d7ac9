"""Tests of roundpipe_runtime.huggingface.trainer.classes: a run of the Trainer, and the same run of the plain one."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

import transformers
from transformers import Seq2SeqTrainingArguments, Trainer

import roundpipe_runtime
from matrix.cut_cases import batch_of
from matrix.models import make_model as make_small
from roundpipe_runtime import ConfigError, wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.loss.call_options import SmoothedLoss
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeSeq2SeqTrainer, RoundPipeTrainer
from tests.cases import cases
from tests.runtime.huggingface.trainer import trainer_runs
from tests.runtime.huggingface.trainer.trainer_runs import arguments, collate, history, make_model, make_trainer
from tests.runtime.tiny_training import same_bits

pytestmark = pytest.mark.slow

SHORT = {"eval_strategy": "no"}


trainers = functools.partial(make_trainer, kind=RoundPipeTrainer)


def both(folder, name="llama", steps=3, script=None, **changes):
    """The same script with either Trainer, run; ``script`` changes options of the trainers."""
    pair = []
    for kind in (Trainer, RoundPipeTrainer):
        options = script() if script else {}
        trainer = trainers(name, arguments(folder / kind.__name__, steps, **changes), kind=kind, **options)
        trainer.train()
        pair.append(trainer)
    return pair


def assert_same_curves(plain, ours, keys=("loss", "eval_loss", "grad_norm", "learning_rate")):
    for key in keys:
        expected = history(plain, key)
        assert expected, key
        assert history(ours, key) == pytest.approx(expected, abs=trainer_runs.TOLERANCE), key


@pytest.mark.parametrize("name", cases(trainer_runs.MODELS, quick=["bert"]))
def test_curves_are_those_of_the_plain_trainer(tmp_path, name):
    """Later norms differ by what rounding makes of the weights. A decoder and T5 are trained until rounding adds up."""
    steps = 50 if name in ("llama", "t5") else 24
    # T5 has elements with next to no gradient, whose sign Adam with epsilon 1e-8 takes from rounding: after 50 steps
    # the plain Trainer differs by 4e-4 from itself with the rows of each batch reversed
    plain, ours = both(tmp_path, name, steps, **({"adam_epsilon": 1e-6} if name == "t5" else {}))
    assert len(history(plain, "loss")) == steps
    assert_same_curves(plain, ours, ("loss", "eval_loss", "learning_rate"))
    norms = history(plain, "grad_norm")
    assert history(ours, "grad_norm")[:6] == pytest.approx(norms[:6], abs=trainer_runs.TOLERANCE)
    assert max(norms[:6]) > 0.5  # what they were clipped to
    assert history(plain, "loss")[-1] < 0.8 * history(plain, "loss")[0]  # it learned something
    assert len(ours.pipeline.cut.report.pieces) >= 5


class Stream(torch.utils.data.IterableDataset):
    """Rows one by one: nobody can ask for a row by its number, nor how many there are."""

    def __iter__(self):
        yield from trainer_runs.make_rows("llama", 37)


@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"example": collate(trainer_runs.make_rows("llama", 2))}])
def test_rows_that_come_one_by_one_are_those_of_the_plain_trainer(tmp_path, options):
    plain = trainers("llama", arguments(tmp_path, 4, **SHORT), kind=Trainer)
    ours = trainers("llama", arguments(tmp_path, 4, **SHORT), **options)
    for trainer in (plain, ours):
        trainer.train_dataset = Stream()
        trainer.train()
    assert_same_curves(plain, ours, ("loss", "grad_norm"))


def test_a_model_that_has_not_trained_is_saved_as_it_is(tmp_path):
    ours = trainers("llama", arguments(tmp_path, 2, **SHORT))
    ours.save_model()
    assert ours._rp_pipeline is None
    loaded = type(ours.model).from_pretrained(tmp_path)
    assert same_bits(loaded.state_dict(), ours.model.state_dict())


@pytest.mark.parametrize("name", cases(trainer_runs.MODELS, quick=["llama", "bert"]))
def test_resumed_run_ends_with_the_same_bits(tmp_path, name):
    options = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
    whole = trainers(name, arguments(tmp_path, 6, **options), model=make_model(name, dropout=0.1))
    whole.train()
    again = trainers(
        name, arguments(tmp_path, 6, **options), model=make_model(name, dropout=0.1, seed=1), devices="virtual:3"
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert history(again, "loss") == history(whole, "loss")
    assert same_bits(again.model.state_dict(), whole.model.state_dict())


def test_checkpoint_of_a_plain_trainer_is_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    plain = trainers("llama", arguments(tmp_path, 4, **options), kind=Trainer)
    plain.train()
    ours = trainers("llama", arguments(tmp_path, 4, **options))
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), abs=1e-5)


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_smoothed_labels(tmp_path, name, monkeypatch):
    def collate_for_decoder(rows):
        batch = collate(rows)
        start = torch.zeros_like(batch["labels"][:, :1])
        batch["decoder_input_ids"] = torch.cat([start, batch["labels"][:, :-1].clamp(min=0)], 1)
        return batch

    smoothed = []
    of_logits = SmoothedLoss.of_logits
    monkeypatch.setattr(SmoothedLoss, "of_logits", lambda *args: smoothed.append(1) or of_logits(*args))
    script = {"data_collator": collate_for_decoder if name == "t5" else collate}
    assert_same_curves(*both(tmp_path, name, script=lambda: script, label_smoothing_factor=0.1))
    assert len(smoothed) == 3 * 2 * 3  # steps, batches, microbatches: never of all logits


def focal(outputs, labels, num_items_in_batch=None):
    log_p = outputs.logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    chosen = log_p.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    count = (wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return (-((1 - chosen.exp()) ** 2) * chosen * (wanted != -100)).sum() / count


def half_frozen():
    model = make_model("llama")
    for layer in model.model.layers[:2]:
        nn.Module.requires_grad_(layer, False)
    return {"model": model}


EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3, "eval_strategy": "epoch"}


@pytest.mark.parametrize(
    ("script", "changes"),
    [(lambda: {"compute_loss_func": focal}, {}), (None, EPOCHS), (half_frozen, {})],
    ids=["a loss of the user", "last batches of an epoch", "frozen layers"],
)
def test_scripts_learn_what_they_learn_with_the_plain_trainer(tmp_path, script, changes):
    plain, ours = both(tmp_path, script=script, **changes)
    assert_same_curves(plain, ours)
    if script is half_frozen:
        frozen, before = ours.model.model.layers[0].mlp.up_proj.weight, half_frozen()["model"]
        assert torch.equal(frozen, before.model.layers[0].mlp.up_proj.weight)


class AddsSquares:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def _with_first_token(step, model, inputs, num_items_in_batch=None):
    first = torch.tensor([0])
    return step(model, {**inputs, "input_ids": inputs["input_ids"].index_fill(1, first, 7)}, num_items_in_batch)


class FirstTokens(Trainer):
    def training_step(self, *args, **kwargs):
        return _with_first_token(super().training_step, *args, **kwargs)


class FirstTokensOfPipelines(RoundPipeTrainer):
    def training_step(self, *args, **kwargs):
        return _with_first_token(super().training_step, *args, **kwargs)


class Behind(RoundPipeTrainer, FirstTokens):
    """Combined, as the guide has it."""


class FurtherBehind(RoundPipeTrainer, type("Other", (FirstTokens,), {})):
    """With a class between both."""


def test_loss_of_a_subclass(tmp_path):
    kinds = (type("Own", (AddsSquares, base), {}) for base in (Trainer, RoundPipeTrainer))
    pair = [trainers("gpt2", arguments(tmp_path, 3), kind=kind) for kind in kinds]
    for trainer in pair:
        trainer.train()
    assert_same_curves(*pair)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("kind", [Behind, FurtherBehind, FirstTokensOfPipelines, RoundPipeTrainer])
def test_step_of_a_subclass(tmp_path, name, kind):
    pair = [trainers(name, arguments(tmp_path / one.__name__, 3), kind=one) for one in (FirstTokens, kind)]
    if kind is RoundPipeTrainer:
        pair[1].training_step = functools.partial(_with_first_token, pair[1].training_step)
    for trainer in pair:
        trainer.train()
    assert_same_curves(*pair)


def test_model_init_makes_a_model_for_each_training(tmp_path):
    ours = trainers("gpt2", arguments(tmp_path, 2, eval_strategy="no"), model_init=lambda: make_model("gpt2"))
    ours.train()
    first, pipeline = history(ours, "loss"), ours.pipeline
    ours.train()
    assert ours.pipeline is not pipeline
    assert history(ours, "loss") == first


def test_trainer_is_usable_after_an_error(tmp_path):
    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyError("half-way")

    ours = trainers("gpt2", arguments(tmp_path, 2, eval_strategy="no"))
    ours.add_callback(Interrupt)
    with pytest.raises(KeyError, match="half-way"):
        ours.train()
    ours.remove_callback(Interrupt)
    assert ours.train().global_step == 2
    assert [id(p) for p in ours.pipeline.parameters()] == [id(p) for p in ours.model.parameters()]


def test_wrapped_model_is_taken_as_it_is(tmp_path):
    model = make_model("llama")
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:1")
    optimizer = torch.optim.SGD(pipeline.optim_parameters(), lr=0.1)
    before = model.lm_head.weight.detach().clone()
    ours = trainers(
        "llama", arguments(tmp_path, 3, **SHORT), model=pipeline, devices=None, microbatches=None,
        optimizers=(optimizer, None),
    )  # fmt: skip
    ours.train()
    assert ours.pipeline is pipeline
    assert ours.model is model
    assert not torch.equal(model.lm_head.weight, before)


# transformers 4 enters a block that torch has renamed
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")
def test_bfloat16_autocast(tmp_path):
    plain, ours = both(tmp_path, "llama", bf16=True)
    exact = trainers("llama", arguments(tmp_path, 3), kind=Trainer)
    exact.train()
    assert history(ours, "loss") == pytest.approx(history(plain, "loss"), abs=2e-3)
    assert history(ours, "loss") != pytest.approx(history(exact, "loss"), abs=1e-5)
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}


def test_activation_checkpointing_is_left_to_the_pipeline(tmp_path):
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    name = "activation" if "activation_checkpointing" in known else "gradient"  # before transformers 5.18
    plain, ours = both(tmp_path, "llama", **{f"{name}_checkpointing": True})
    assert_same_curves(plain, ours)
    assert getattr(plain.model, f"is_{name}_checkpointing")
    assert not getattr(ours.model, f"is_{name}_checkpointing")


def test_sequences_are_generated_for_evaluation(tmp_path):
    outputs = []
    for kind in (transformers.Seq2SeqTrainer, RoundPipeSeq2SeqTrainer):
        changes = {"predict_with_generate": True, "generation_max_length": 6}
        trainer = trainers("t5", arguments(tmp_path, 2, kind=Seq2SeqTrainingArguments, **changes), kind=kind)
        trainer.train()
        outputs.append(trainer.predict(trainer_runs.make_rows("t5", 4)))
    assert outputs[1].metrics["test_loss"] == pytest.approx(outputs[0].metrics["test_loss"], abs=1e-5)
    assert (outputs[1].predictions == outputs[0].predictions).all()


def test_options_beside_a_wrapped_model_are_refused(tmp_path):
    """They would be ignored: the pipeline has devices, microbatches and its pieces."""
    pipeline = wrap_model_to_roundpipe(make_model("gpt2"), devices="virtual:1")
    with pytest.raises(ConfigError, match="pass devices, microbatches to wrap_model_to_roundpipe"):
        make_trainer("gpt2", arguments(tmp_path, 1), RoundPipeTrainer, model=pipeline)
    with pytest.raises(ConfigError, match="pass use_sequential_preset to wrap_model_to_roundpipe"):
        RoundPipeTrainer(model=pipeline, args=arguments(tmp_path, 1), use_sequential_preset=False)


def test_the_trainer_is_a_name_of_the_package_and_a_near_name_is_not():
    assert "RoundPipeTrainer" in dir(roundpipe_runtime)
    assert roundpipe_runtime.RoundPipeTrainer is RoundPipeTrainer
    with pytest.raises(AttributeError, match="has no attribute 'RoundPipeTraner'"):
        roundpipe_runtime.RoundPipeTraner  # noqa: B018 # the attribute is what is tested


def test_model_without_a_loss_says_so(tmp_path):
    ours = trainers("llama", arguments(tmp_path, 3, **SHORT))
    ours.data_collator = lambda rows: {k: v for k, v in collate(rows).items() if k != "labels"}
    with pytest.raises(ValueError, match="did not return a loss"):
        ours.train()


@pytest.mark.parametrize("name", ["bert", "mixtral"])
def test_best_model_has_the_weights_of_its_checkpoint(tmp_path, name):
    """Also where names in the file are not those in memory: the Trainer itself leaves out the experts of Mixtral."""
    changes = {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
               "learning_rate": 0.5, "lr_scheduler_type": "constant", "warmup_steps": 0}  # fmt: skip
    ours = trainers(name, arguments(tmp_path, 3, **changes))
    ours.train()
    expected = min(history(ours, "eval_loss"))
    assert expected < history(ours, "eval_loss")[-1]
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)


def test_adapters_are_trained_saved_and_resumed(tmp_path):
    """The curve is the plain Trainer's, the checkpoint PEFT's; the resumed run keeps the weights on the devices."""
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")

    def adapted():
        torch.manual_seed(3)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return {"model": peft.get_peft_model(make_model("llama"), lora)}

    options = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.03, "label_smoothing_factor": 0.1}
    plain, ours = both(tmp_path, steps=4, script=adapted, **options)
    assert_same_curves(plain, ours)
    assert (tmp_path / "RoundPipeTrainer" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    again = trainers(
        "llama", arguments(tmp_path / "RoundPipeTrainer", 4, **options), keep_parameters="auto", **adapted()
    )
    again.train(resume_from_checkpoint=str(tmp_path / "RoundPipeTrainer" / "checkpoint-2"))
    assert history(again, "loss") == history(ours, "loss")
    assert same_bits(again.model.state_dict(), ours.model.state_dict())
    traffic = [trainer.pipeline.parameter_traffic for trainer in (ours, again)]
    assert [one.reused > 0 for one in traffic] == [False, True]  # frozen weights stay where they are asked to


def test_model_has_the_weights_of_the_last_step_when_it_is_evaluated(tmp_path):
    """With copies for the optimizer, too: generation for an evaluation reads the model on the host."""
    seen = []

    class Looks(RoundPipeTrainer):
        def prediction_step(self, *args, **kwargs):
            copies = dict(self.pipeline.optim_named_parameters())
            seen.extend(torch.equal(p, copies[n].to(p.dtype)) for n, p in self.model.named_parameters())
            return super().prediction_step(*args, **kwargs)

    model = make_model("gpt2").to(torch.bfloat16)
    trainers("gpt2", arguments(tmp_path, 2, eval_steps=1), kind=Looks, model=model, optim_dtype=torch.float32).train()
    assert seen
    assert all(seen)


def test_model_and_batches_stay_on_the_host(tmp_path):
    args = arguments(tmp_path, 1)
    for name in ("_setup_devices", "__cached__setup_devices"):  # the second is where transformers 4 looks
        args.__dict__[name] = torch.device("meta")
    args._n_gpu = 2
    ours = trainers("gpt2", args)
    assert ours.args.train_batch_size == 5  # and not 5 for each of two devices
    batch = collate(trainer_runs.make_rows("gpt2", 5))
    ours.current_gradient_accumulation_steps = 1
    assert ours.training_step(ours.pipeline, batch).device.type == "meta"
    assert batch["input_ids"].device.type == "cpu"
    assert {p.grad.device.type for p in ours.model.parameters()} == {"cpu"}
    assert next(iter(ours.get_train_dataloader()))["input_ids"].device.type == "cpu"


def pictures_beside_text():
    model = make_small("image:llava")
    numbered = [batch_of("image:llava", model, 1, number) for number in range(8)]
    return model, [{name: value[0] for name, value in batch.items()} for batch in numbered]


def choices_of_texts():
    config = transformers.BertConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 250, (4, 12), generator=generator), "labels": n % 4} for n in range(12)]
    return transformers.BertForMultipleChoice(config), rows


@pytest.mark.parametrize("make", [pictures_beside_text, choices_of_texts])
def test_a_model_that_does_not_run_on_a_row_of_tokens_is_cut_with_its_data(tmp_path, make):
    def script():
        torch.manual_seed(0)
        model, rows = make()
        collator = transformers.default_data_collator
        return {"model": model, "train_dataset": rows, "eval_dataset": rows, "data_collator": collator}

    plain, ours = both(tmp_path, script=script)
    assert_same_curves(plain, ours, keys=("loss", "eval_loss"))
    assert not ours.pipeline.cut.report.is_whole


def test_checkpoint_of_another_model_is_refused(tmp_path):
    trainers("gpt2", arguments(tmp_path, 1, save_strategy="steps", save_steps=1, eval_strategy="no")).train()
    ours = trainers("llama", arguments(tmp_path, 2, eval_strategy="no"))
    with pytest.raises(ConfigError, match=r"checkpoint-1 is for a different model: it lacks \d+ weights of LlamaFor"):
        ours.train(resume_from_checkpoint=True)


def test_noise_on_embeddings_comes_and_goes(tmp_path):
    model = make_model("gpt2")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:1")
    losses = []
    for alpha in (None, 20.0, None):
        model.load_state_dict(start)
        args = arguments(tmp_path, 2, eval_strategy="no", neftune_noise_alpha=alpha)
        ours = trainers("gpt2", args, model=pipeline, devices=None, microbatches=None)
        ours.train()
        losses.append(history(ours, "loss"))
    assert losses[2] == losses[0]
    assert losses[1] != pytest.approx(losses[0], abs=1e-3)


@pytest.fixture
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiles(test):
    """Torch's own compiler asks inputs that are no leaves for `.grad`, also without a pipeline."""
    ignored = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    return ignored(pytest.mark.usefixtures("nothing_compiled")(test))


@compiles
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_layers_learn_what_a_plain_trainer_learns(tmp_path, name):
    plain = make_trainer(name, arguments(tmp_path / "plain", 6))
    plain.train()
    args = arguments(tmp_path / "ours", 6, torch_compile=True, torch_compile_backend="aot_eager")
    ours = make_trainer(name, args, RoundPipeTrainer)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        ours.train()
    assert not ours.pipeline._rp_engine._options.compiled.is_empty
    for key in ("loss", "eval_loss", "grad_norm"):
        assert history(ours, key) == pytest.approx(history(plain, key), rel=10 * trainer_runs.TOLERANCE)


def test_a_model_that_is_wrapped_already_or_in_one_piece_is_not_compiled(tmp_path):
    """Its pipeline is made, so the argument would do nothing; one piece has no layers, and would run as it is."""
    with pytest.raises(ConfigError, match="runs as one module, so it has no layers to compile"):
        wrap_model_to_roundpipe(make_model("llama"), use_sequential_preset=False, compile=True)
    pipeline = wrap_model_to_roundpipe(make_model("llama"), devices="virtual:1", lower_threshold=0, check=False)
    args = arguments(tmp_path, 1, torch_compile=True)
    with pytest.raises(ConfigError, match=r"wrap_model_to_roundpipe\(model, compile=True\)"):
        RoundPipeTrainer(model=pipeline, args=args)


@compiles
def test_hidden_states_and_attentions_of_compiled_layers_are_handed_out():
    model = make_model("llama")
    model.set_attn_implementation("eager")
    ids = torch.arange(40).reshape(4, 10) + 5
    plain = model(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
    plain.loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    options = {"lower_threshold": 0, "check": False, "compile": {"backend": "aot_eager"}}
    pipeline = wrap_model_to_roundpipe(model, devices="virtual:2", **options)
    found = pipeline(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
    found.loss.backward()
    for one, other in zip(
        (*found.hidden_states, *found.attentions), (*plain.hidden_states, *plain.attentions), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)
    assert all(torch.allclose(p.grad, expected[name], atol=1e-6) for name, p in model.named_parameters())
