"""Trainers of TRL combined with ``RoundPipeTrainer``: the numbers of the plain ones, and a model that is cut."""

import importlib

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
pytest.importorskip("peft", reason="adapters are PEFT's")
pytest.importorskip("trl", reason="these are its trainers")

import peft
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer

MARKS = pytestmark = [
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
    """A reward that differs between completions of a prompt."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


def config_of(kind):
    """The configuration of a trainer, from the module of its class."""
    return getattr(importlib.import_module(KINDS[kind].__module__), f"{kind}Config")


def trained(kind, folder, trainer_class, of_trainer=dict, **changes):
    """A trainer of TRL after some steps; ``of_trainer`` makes more arguments of it, ``changes`` are in its config."""
    options = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "bf16": False,
    }  # fmt: skip
    if kind == "Reward":
        more = {"model": llama("LlamaForSequenceClassification", num_labels=1)}
    else:
        more = {"model": llama()}
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
    """The class that a user writes: a trainer of TRL whose model runs through a pipeline."""

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_trl_trains_as_without_a_pipeline(kind, tmp_path):
    assert_trains_alike(kind, tmp_path)


def adapters():
    """Adapters instead of a reference: it is the model without them."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return {"peft_config": config, "ref_model": None}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("SFT", {"packing": True, "max_length": 16}, id="packed texts"),
        pytest.param("SFT", {"gradient_accumulation_steps": 2, "loss_type": "dft"}, id="accumulation"),
        pytest.param("DPO", {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]}, id="two losses"),
        pytest.param("DPO", {"of_trainer": adapters}, id="adapters"),
        pytest.param("DPO", {"precompute_ref_log_probs": True}, id="reference computed before"),
        pytest.param("KTO", {"loss_type": "apo_zero_unpaired"}, id="without KL"),
        pytest.param("GRPO", {"beta": 0.1, "num_iterations": 2}, id="two iterations"),
    ],
)
def test_options_of_trl_change_the_training_as_without_a_pipeline(kind, options, tmp_path):
    assert_trains_alike(kind, tmp_path, **options)


def test_arguments_are_taken_in_the_order_of_the_combined_trainer(tmp_path):
    """The second argument of ``DPOTrainer`` is the reference, and the third one is ``args``."""
    args = trl.DPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    more = {"train_dataset": rows("DPO"), "processing_class": tokenizer()}
    reference = llama()
    trainer = combined("DPO")(llama(), reference, args, **more)
    assert next(trainer.ref_model.parameters()) is next(reference.parameters())  # in a pipeline of its own
    assert trainer.args is args
