"""Trainers of TRL on a pipeline, and their reference and reward models."""

import copy
import importlib
import threading

import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from roundpipe_runtime import RoundPipe
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer

pytestmark = [
    pytest.mark.slow,
    # TRL sets it itself: https://github.com/huggingface/trl/blob/main/trl/trainer/base_config.py
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    # the head of TRL divides a sum by the number of labels, and most trainers leave that loss unused
    pytest.mark.filterwarnings(
        "ignore:The loss of .* cannot be computed from the losses:roundpipe_runtime.RoundPipeWarning"
    ),
]

STEPS = 6
# The classes, before a test begins: their modules register outputs when they are imported.
KINDS = {kind: getattr(trl, f"{kind}Trainer") for kind in ("SFT", "Reward", "DPO", "KTO", "GRPO", "RLOO")}
KINDS["ORPO"] = importlib.import_module("trl.experimental.orpo").ORPOTrainer
PADS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


def tokenizer():
    words = {word: place for place, word in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(97))])}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **PADS)


def llama(kind="LlamaForCausalLM", **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=100,
        eos_token_id=2, pad_token_id=0, bos_token_id=1, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def words(count, shift):
    return " ".join(f"w{(7 * i + shift) % 90}" for i in range(count))


def rows(kind):
    pairs = [{"prompt": words(4, i), "chosen": " " + words(5 + i % 3, 2 * i), "rejected": " " + words(6, 3 * i)}
             for i in range(24)]  # fmt: skip
    if kind == "SFT":
        return Dataset.from_list([{"text": words(5 + i % 7, 3 * i)} for i in range(24)])
    if kind == "KTO":
        return Dataset.from_list([{"prompt": p["prompt"], "completion": p["chosen"], "label": i % 2 == 0}
                                  for i, p in enumerate(pairs)])  # fmt: skip
    if kind in ("GRPO", "RLOO"):
        return Dataset.from_list([{"prompt": p["prompt"]} for p in pairs])
    return Dataset.from_list(pairs)


def many_letters(completions, **others):
    return [float(sum(map(ord, text)) % 17) for text in completions]


def config_of(kind):
    return getattr(importlib.import_module(KINDS[kind].__module__), f"{kind}Config")


def trained(kind, folder, trainer_class, of_trainer=dict, **changes):
    """A trainer of TRL after some steps; ``of_trainer`` makes more arguments of it, ``changes`` are in its config."""
    options = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "bf16": False,
    }  # fmt: skip
    more = {"model": llama("LlamaForSequenceClassification", num_labels=1) if kind == "Reward" else llama()}
    if kind in ("GRPO", "RLOO"):  # which make a reference from the files of the model
        more["model"].save_pretrained(folder / "model")
        more["model"].config._name_or_path = str(folder / "model")
        more["reward_funcs"] = many_letters
        options |= {"num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 2}
    else:
        options["max_length"] = 32
    if kind in ("DPO", "KTO"):
        more["ref_model"] = llama()
    if issubclass(trainer_class, RoundPipeTrainer):
        more |= {"devices": "virtual:2", "microbatches": 3}
    more |= {"args": config_of(kind)(**{**options, **changes}), "processing_class": tokenizer()}
    torch.manual_seed(1)
    trainer = trainer_class(train_dataset=rows(kind), **{**more, **of_trainer()})
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    if issubclass(trainer_class, RoundPipeTrainer):
        assert not trainer.pipeline.cut.report.is_whole
        trainer.close()
    return trainer


def combined(kind):
    class Own(RoundPipeTrainer, KINDS[kind]):
        pass

    return Own


def curves(trainer):
    """What is logged in each step, without clocks."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: float(v) for k, v in entry.items() if "time" not in k} for entry in logged]


def assert_trains_alike(kind, folder, **options):
    plain = trained(kind, folder / "plain", KINDS[kind], **options)
    ours = trained(kind, folder / "ours", combined(kind), **options)
    assert len(curves(plain)) == STEPS
    assert any(entry["grad_norm"] > 0 for entry in curves(plain))
    for one, other in zip(curves(ours), curves(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def adapters():
    """Adapters instead of a reference: it is the model without them."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return {"peft_config": config, "ref_model": None}


BEFORE = {"of_trainer": adapters, "precompute_ref_log_probs": True}  # before the first step, all rows at once
FOLLOWING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7}
OPTIONS = {kind: (kind, {}) for kind in KINDS} | {
    "packed texts": ("SFT", {"packing": True, "max_length": 16}),
    "accumulation": ("SFT", {"gradient_accumulation_steps": 2, "loss_type": "dft"}),
    "two losses": ("DPO", {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]}),
    "adapters": ("DPO", {"of_trainer": adapters}),
    "reference computed before": ("DPO", {"precompute_ref_log_probs": True}),
    **{f"{kind} before": (kind, BEFORE) for kind in ("DPO", "KTO")},
    "a reference that follows": ("DPO", FOLLOWING),
    "without KL": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "two iterations": ("GRPO", {"beta": 0.1, "num_iterations": 2}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_trainers_and_options_of_trl_train_as_without_a_pipeline(name, tmp_path):
    kind, options = OPTIONS[name]
    assert_trains_alike(kind, tmp_path, **options)


HOST = threading.main_thread().name


def watched(model):
    """The threads that a norm in the first layer is called in; a pipeline has one for each device."""
    names = []

    class Notes:
        def __call__(self, *args):
            names.append(threading.current_thread().name)

        def __deepcopy__(self, memo):
            return self

    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    inner.model.layers[0].input_layernorm.register_forward_hook(Notes())
    return names


def watching(kind):
    """A trainer that watches its model from the first step on, and its reference from before it is computed with."""

    class Watching(combined(kind)):
        threads = ()

        def _rp_prepare_model(self, model, **options):
            made = super()._rp_prepare_model(model, **options)  # where its cut is compared with the model, on the host
            self.threads_of_reference = watched(model)
            return made

        def training_step(self, *args, **options):
            if not self.threads:
                assert self.pipeline._rp_host_reason is None  # a trial of `generate`, on the host as above
                self.threads = watched(self.model)
            return super().training_step(*args, **options)

    return Watching


def test_a_reference_runs_through_a_pipeline_and_stays_as_it_was(tmp_path):
    reference = llama()
    before = copy.deepcopy(reference.state_dict())
    trainer = trained("DPO", tmp_path, watching("DPO"), of_trainer=lambda: {"ref_model": reference})
    assert isinstance(trainer.ref_model, RoundPipe)
    assert not trainer.ref_model.cut.report.is_whole
    assert trainer.threads_of_reference
    assert HOST not in trainer.threads_of_reference
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize(("kind", "options"), [("DPO", {"of_trainer": adapters}), ("GRPO", {"num_iterations": 2})])
def test_a_reference_with_the_weights_of_the_model_runs_through_the_pipeline_of_the_model(tmp_path, kind, options):
    """DPO switches adapters off, GRPO asks for old probabilities, and generates: no layer runs on the host."""
    trainer = trained(kind, tmp_path, watching(kind), **options)
    assert getattr(trainer, "ref_model", None) is None
    assert trainer.threads
    assert HOST not in trainer.threads


def test_a_reward_model_runs_through_a_pipeline(tmp_path):
    def rewards():
        judge = llama("LlamaForSequenceClassification", num_labels=1)
        return {"reward_funcs": judge, "reward_processing_classes": tokenizer()}

    assert_trains_alike("GRPO", tmp_path, of_trainer=rewards)
    trainer = trained("GRPO", tmp_path, watching("GRPO"), of_trainer=rewards)
    assert isinstance(trainer.reward_funcs[0], RoundPipe)
    assert HOST not in trainer.threads_of_reference


def test_adapters_around_the_layers_are_off_in_the_reference(tmp_path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "v_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(llama(), config)
    tokens = torch.arange(6).reshape(3, 2)
    with torch.no_grad(), model.disable_adapter():
        expected = model(input_ids=tokens).logits

    class Own(combined("ORPO")):
        def training_step(self, *args, **options):
            with torch.no_grad(), self.model.disable_adapter():
                found = self.model(input_ids=tokens).logits
            torch.testing.assert_close(found, expected)
            with torch.no_grad():
                assert not torch.allclose(self.model(input_ids=tokens).logits, expected)
            return super().training_step(*args, **options)

    trained("ORPO", tmp_path, Own, of_trainer=lambda: {"model": model})


def test_sixteen_bits_of_a_reference_are_those_of_the_plain_trainer(tmp_path):
    """With ``bf16=True`` references compute in 16 bits, also where TRL calls them outside of the loss."""
    plain = trained("GRPO", tmp_path / "plain", KINDS["GRPO"], bf16=True, beta=0.1)
    ours = trained("GRPO", tmp_path / "ours", combined("GRPO"), bf16=True, beta=0.1)
    for one, other in zip(curves(ours), curves(plain), strict=True):
        assert one["kl"] == pytest.approx(other["kl"], abs=2e-2)


def test_the_model_has_its_own_forward_after_a_training_that_failed(tmp_path):
    """And a copy that is made meanwhile also has its own: the pipeline has the weights of the model."""
    made = {}

    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **others):
            if state.global_step == 2:
                made["copy"] = copy.deepcopy(model)
            if state.global_step == 3:
                raise KeyError("a callback fails")

    model = llama()
    with pytest.raises(KeyError, match="a callback fails"):
        trained("ORPO", tmp_path, combined("ORPO"), of_trainer=lambda: {"model": model, "callbacks": [Failing()]})
    assert "forward" not in vars(model)
    threads = watched(made["copy"])
    made["copy"](input_ids=torch.arange(6).reshape(2, 3))
    assert threads == [HOST]


def test_a_model_in_one_piece_is_called_as_it_is_and_arguments_have_the_order_of_the_trainer(tmp_path):
    """Its only piece is the model itself: a call of it is not sent to the pipeline. The second one is the reference."""
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
    args = config_of("DPO")(output_dir=str(tmp_path), save_strategy="no", **options)
    reference, more = llama(), {"train_dataset": rows("DPO"), "processing_class": tokenizer()}
    trainer = combined("DPO")(llama(), reference, args, **more)
    assert next(trainer.ref_model.parameters()) is next(reference.parameters())  # in a pipeline of its own
    assert trainer.args is args
    trainer = combined("DPO")(
        llama(), args=args, devices="virtual:2", use_sequential_preset=False, **more, **adapters()
    )
    trainer.train()
    assert trainer.pipeline.cut.report.is_whole
    assert trainer.state.global_step == 2
    trainer.close()
