"""References, reward models and teachers of a Trainer: they run through pipelines, and nothing of them changes."""

import copy
import threading

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
pytest.importorskip("peft", reason="adapters are PEFT's")
pytest.importorskip("trl", reason="these are its trainers")

import peft
import transformers

from roundpipe_runtime import RoundPipe
from tests.runtime.huggingface.trainer.test_trl import (
    KINDS,
    MARKS,
    adapters,
    assert_trains_alike,
    combined,
    config_of,
    curves,
    llama,
    rows,
    tokenizer,
    trained,
)

pytestmark = MARKS
HOST = threading.main_thread().name


class ThreadsOfCalls:
    """A hook that notes the thread a module runs in; a pipeline has one for each device."""

    def __init__(self):
        self.names = []

    def __call__(self, *args):
        self.names.append(threading.current_thread().name)

    def __deepcopy__(self, memo):
        return self


def watched(model):
    """The threads that a norm in the first layer is called in."""
    found = ThreadsOfCalls()
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    inner.model.layers[0].input_layernorm.register_forward_hook(found)
    return found.names


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


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_adapters_as_a_reference_that_is_computed_before(kind, tmp_path):
    """Before the first step, all rows at once: the numbers are those of the plain trainer."""
    assert_trains_alike(kind, tmp_path, of_trainer=adapters, precompute_ref_log_probs=True)


def test_a_reference_follows_the_model(tmp_path):
    assert_trains_alike("DPO", tmp_path, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.7)


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


def test_a_model_in_one_piece_is_called_as_it_is(tmp_path):
    """Its only piece is the model itself, so a call of it is not sent to the pipeline, which would not end."""
    options = {"max_steps": 2, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
    trainer = combined("DPO")(
        model=llama(),
        args=config_of("DPO")(output_dir=str(tmp_path), save_strategy="no", **options),
        train_dataset=rows("DPO"),
        processing_class=tokenizer(),
        devices="virtual:2",
        use_sequential_preset=False,
        **{**adapters(), "ref_model": None},
    )
    trainer.train()
    assert trainer.pipeline.cut.report.is_whole
    assert trainer.state.global_step == 2
    trainer.close()
