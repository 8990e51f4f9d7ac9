"""A Trainer with ``torch_compile=True``: layers are compiled, and losses are those of a plain Trainer."""

import pytest
import torch

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

from roundpipe_runtime import ConfigError
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from tests.runtime.huggingface.trainer.trainer_runs import TOLERANCE, arguments, history, make_model, make_trainer

pytestmark = [
    pytest.mark.slow,
    # torch's own compiler asks inputs that are no leaves for it, also without a pipeline
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh():
    """Nothing that another test has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
        assert history(ours, key) == pytest.approx(history(plain, key), rel=10 * TOLERANCE)
    ours.pipeline.close()


def test_a_model_that_is_wrapped_already_is_compiled_where_it_was_wrapped(tmp_path):
    """Its pipeline is made, so the argument would do nothing."""
    pipeline = wrap_model_to_roundpipe(make_model("llama"), devices="virtual:1", lower_threshold=0, check=False)
    args = arguments(tmp_path, 1, torch_compile=True)
    with pytest.raises(ConfigError, match=r"wrap_model_to_roundpipe\(model, compile=True\)"):
        RoundPipeTrainer(model=pipeline, args=args)


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


def test_a_model_in_one_piece_is_refused():
    """It has no layers that could be compiled, and would run as it is."""
    with pytest.raises(ConfigError, match="runs as one module, so it has no layers to compile"):
        wrap_model_to_roundpipe(make_model("llama"), use_sequential_preset=False, compile=True)
