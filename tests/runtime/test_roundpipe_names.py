"""Names, signatures and loops of RoundPipe, and what the page on other programs says of it."""

import contextlib
import copy
import functools
import inspect
import operator
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe_runtime
from roundpipe_runtime import GradScaler, ModelExecutePlan, RoundPipe, RoundPipePackedData, RoundPipeRunConfig
from roundpipe_runtime.errors import PlanError, UnevenSplitWarning, UnregisteredObjectError
from roundpipe_runtime.optim import Adam
from tests.runtime.documents import ModelOutput
from tests.runtime.small import batch, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)
PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "coming_from.md").read_text(encoding="utf-8")

REQUIRED = inspect.Parameter.empty
# Defaults: an empty container or configuration (`None` and `()` say the same here), and what devices determine.
EMPTY, DEVICES = "empty", "devices"

# name -> the parameters that the reference gives it, in order, with their defaults
CONTRACT = {
    "RoundPipe": "model, optim_dtype=None, name=None, model_run_config=EMPTY, pin_model='alloc'",
    "RoundPipe.forward": "args, roundpipe_run_config=EMPTY, kwargs",
    "RoundPipe.forward_backward": "input_args=EMPTY, input_kwargs=EMPTY, label=None, loss_fn='the outputs', "
    "return_outputs=False, run_config=EMPTY",
    "RoundPipe.optim_parameters": "",
    "RoundPipe.optim_named_parameters": "prefix='', remove_duplicate=True",
    "RoundPipe.step": "step_fn, is_async=True, args, kwargs",
    "RoundPipe.synchronize": "",
    "RoundPipe.set_original_model": "original_model",
    "wrap_model_to_roundpipe": "model, use_sequential_preset=None, lower_threshold=16384, upper_threshold=None, "
    "skip_modules=EMPTY, override_config=EMPTY, model_run_config=EMPTY, name=None, roundpipe_kwargs",
    "RoundPipeRunConfig": "requires_grad=None, output_device=None, preserve_rng_state=None, recompute_grain=None, "
    "num_microbatch=None, split_input=None, split_label=None, merge_output=None, execute_plan=None",
    "ModelExecutePlan.auto": "run_type, models, min_stages=DEVICES, upper_threshold=1.1, model_memory_limit=DEVICES",
    "RoundPipePackedData.synchronize": "",
    "save_for_recompute": "data",
    "doing_recompute": "",
    "get_recompute_data": "",
    "OptimizerCtx": "",
    "optim.Adam": "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, foreach=None, "
    "maximize=False, capturable=False, differentiable=False, fused=None, decoupled_weight_decay=False",
    "GradScaler": "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True",
    "GradScaler.scale": "outputs",
    "GradScaler.unscale_": "optimizer",
    "GradScaler.step": "optimizer, args, kwargs",
    "GradScaler.update": "new_scale=None, is_async=True",
    "GradScaler.get_scale": "",
    "GradScaler.get_growth_factor": "up_to_date=False",
    "GradScaler.set_growth_factor": "new_factor",
    "GradScaler.get_backoff_factor": "up_to_date=False",
    "GradScaler.set_backoff_factor": "new_factor",
    "GradScaler.get_growth_interval": "up_to_date=False",
    "GradScaler.set_growth_interval": "new_interval",
}

# What is otherwise on purpose: the default here, and words of the line in `coming_from.md` that says so.
OTHERWISE = {("RoundPipe.step", "is_async"): (False, "`step` is asynchronous by default")}
# What is new stands behind all that is old, and in the table of that page.
ADDED = {
    "RoundPipe": [
        *("devices", "mesh", "replicas", "reduce_dtype", "gradient_dtype", "compile"),
        *("large_tables", "host", "update"),
    ],
    "wrap_model_to_roundpipe": ["example", "check"],
    "RoundPipeRunConfig": ["loss_reduction", "last_stage_copies", "keep_parameters", "upload_experts"],
    "ModelExecutePlan.auto": ["previous", "last_stage_copies", "num_microbatch"],
}


@pytest.fixture
def pipe():
    return functools.partial(RoundPipe, devices="virtual:2:check")


def signature_of(name):
    parameters = inspect.signature(operator.attrgetter(name)(roundpipe_runtime)).parameters
    return {key: value for key, value in parameters.items() if key != "self"}


@pytest.mark.parametrize("name", CONTRACT)
def test_a_signature_is_the_documented_one(name):
    found, text = signature_of(name), CONTRACT[name]
    documented = inspect.signature(eval(f"lambda {'*, ' if text else ''}{text}: 0")).parameters
    assert [key for key in found if key not in ADDED.get(name, [])] == list(documented)
    for key, parameter in documented.items():
        expected, _ = OTHERWISE.get((name, key), (parameter.default, ""))
        if expected in (EMPTY, DEVICES):
            assert found[key].default in (None, ())
        elif expected == "the outputs":
            assert found[key].default("out", "label") == "out"
        else:
            assert found[key].default == expected


@pytest.mark.parametrize("name", ADDED)
def test_what_is_new_does_not_move_what_is_old(name):
    found = signature_of(name)
    positional = [key for key, value in found.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    added = ADDED[name]
    assert positional == [key for key in positional if key not in added] + [key for key in added if key in positional]
    assert all(found[key].default is not REQUIRED for key in added)


def test_each_difference_is_on_the_page():
    assert [line for _, line in OTHERWISE.values() if line not in PAGE] == []
    assert [f"{name}: {key}" for name, keys in ADDED.items() for key in keys if f"`{key}" not in PAGE] == []
    for name in ("ModelTimer", "AutoRoundPipe"):
        assert not hasattr(roundpipe_runtime, name)
        assert f"`{name}" in PAGE


def test_a_plan_is_checked_for_layers_and_run_in_either_order(pipe):
    """And by a call that runs it. Packed data is a list."""
    plan = ModelExecutePlan([range(4)])
    for arguments, named in (
        ((4, "infer"), {}),
        (("infer", 4), {}),
        ((4,), {"run_type": "infer"}),
        (("infer",), {"num_layers": 4}),
        ((), {"num_layers": 4, "run_type": "infer"}),
    ):
        plan.check_valid(*arguments, **named)
    for arguments in ((5, "infer"), ("infer", 5)):
        with pytest.raises(PlanError, match="misses layer 4"):
            plan.check_valid(*arguments)
    inputs, labels = batch(4)
    config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(3)], [range(3, 6), range(3)]))
    with pytest.raises(PlanError, match="misses layer 6"):
        pipe(small_model()).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    assert isinstance(RoundPipePackedData([1, 2]), list)
    assert RoundPipePackedData([1, 2]).synchronize() == [1, 2]


def images(rows):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def test_the_loop_of_the_first_tutorial_runs_as_it_is_written():
    """Half precision, a scaled loss over the number of microbatches, outputs beside it, a step, an update."""
    model = RoundPipe(network().to(torch.float16), optim_dtype=torch.float32, devices="virtual:2")
    with roundpipe_runtime.OptimizerCtx():
        optimizer = Adam(model.parameters(), lr=1e-2)
    scaler, criterion = GradScaler(), nn.CrossEntropyLoss()
    inputs, labels = images(12)
    losses = []
    for _ in range(8):
        loss, outputs = model.forward_backward(
            input_args=(inputs.to(torch.float16),),
            label=labels,
            loss_fn=lambda outputs, labels: scaler.scale(criterion(outputs.float(), labels)) / 3,
            return_outputs=True,
            run_config=RoundPipeRunConfig(loss_reduction="sum"),  # losses are added, as by RoundPipe
        )
        scale = scaler.get_scale()
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
        scaler.update()
        losses.append(loss.item() / scale)
    model.synchronize()
    assert losses[0] == pytest.approx(criterion(network()(inputs), labels).item(), rel=2e-3)
    assert losses[-1] < losses[0]
    assert outputs.shape == (12, 3)


def test_the_loop_of_the_second_tutorial_runs_as_it_is_written(tmp_path):
    """A wrapped model, its own loss function on labels given apart, a forward in one microbatch, and saving."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, use_cache=False,
    )  # fmt: skip
    raw = transformers.Qwen3ForCausalLM(config)
    ids = torch.randint(1, 64, (10, 9))
    expected = raw(input_ids=ids, labels=ids).loss.item()
    model = roundpipe_runtime.wrap_model_to_roundpipe(
        raw,
        model_run_config=RoundPipeRunConfig(num_microbatch=10, loss_reduction="sum"),
        optim_dtype=torch.float32,
        devices="virtual:2",
    )
    optimizer, scaler = Adam(model.optim_parameters(), lr=1e-3), GradScaler()
    loss = model.forward_backward(
        input_kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        label=ids,
        loss_fn=lambda outputs, labels: scaler.scale(
            model.loss_function(logits=outputs.logits, labels=labels, vocab_size=model.vocab_size) / 10
        ),
    )
    assert loss.item() / scaler.get_scale() == pytest.approx(expected, rel=1e-5)
    model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()))
    scaler.update()
    model.synchronize()
    with torch.no_grad():
        outputs = model.eval()(input_ids=ids[:1], roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert outputs.logits.shape == (1, 9, 64)
    model.save_pretrained(tmp_path)
    again = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, raw.lm_head.weight)


PROGRAM = """
import sys, threading
import torch
before, loaded = threading.active_count(), set(sys.modules)
import roundpipe_runtime
assert threading.active_count() == before, threading.enumerate()
assert not torch.cuda.is_initialized()
print(*{name.partition(".")[0] for name in set(sys.modules) - loaded})
roundpipe_runtime.RoundPipe(torch.nn.Linear(2, 2), devices="virtual:2")
assert threading.active_count() == before, threading.enumerate()
"""


def test_the_import_needs_no_accelerator_and_starts_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    libraries = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    assert libraries == {"roundpipe_runtime", "yobx_flatten"}


def test_the_documented_quotient_warns_when_it_is_no_mean(pipe):
    config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="sum")
    wrapped = pipe(small_model())
    for rows, warns in ((10, pytest.warns(UnevenSplitWarning, match="WeightedLoss")), (8, contextlib.nullcontext([]))):
        inputs, labels = batch(rows)
        how = {"label": labels, "loss_fn": lambda o, t: F.mse_loss(o, t) / 4, "run_config": config}
        with warns as seen:
            wrapped.forward_backward((inputs,), **how)
        assert [warning.filename for warning in seen] == [__file__] * (rows == 10)


def test_a_call_without_anything_to_cut_is_one_microbatch(pipe):
    class Counts(nn.Module):
        calls = 0

        def forward(self, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model = Counts()
    config = RoundPipeRunConfig(num_microbatch=3)
    with torch.no_grad():
        assert pipe(model)(None, 3, name="x", roundpipe_run_config=config) == ((None, 3), {"name": "x"})
        assert model.calls == 1
        assert pipe(model)(roundpipe_run_config=config) == ((), {})
    assert model.calls == 2


def test_an_unregistered_object_with_tensors_is_refused(pipe):
    """It is not handed whole to every microbatch: as input and between layers, the error says where it is."""

    class Take(nn.Module):
        def forward(self, x):
            return ModelOutput(x, x)

    with pytest.raises(UnregisteredObjectError, match=r"args\[0\][\s\S]*ModelOutput"):
        pipe(nn.Identity())(ModelOutput(torch.zeros(4), torch.zeros(4)))
    with pytest.raises(UnregisteredObjectError, match=r"layer 0 \(Take\)[\s\S]*ModelOutput"):
        pipe(nn.Sequential(Take(), nn.Identity()))(torch.zeros(4, 2))


def test_hooks_on_layers_run_with_the_layer_itself(pipe):
    model = small_model()
    calls = []
    model[0].register_forward_pre_hook(lambda module, args: calls.append(("pre", module)))
    model[0].register_forward_hook(lambda module, args, output: calls.append(("post", module)))
    model[2].register_full_backward_hook(lambda module, gi, go: calls.append(("back", module)))
    inputs, labels = batch(4)
    plan = ModelExecutePlan([], [range(7)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=2, execute_plan=plan)
    pipe(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    assert [kind for kind, _ in calls] == ["pre", "post", "back"] * 2
    assert all(module is model[2 if kind == "back" else 0] for kind, module in calls)


def test_the_wrapper_is_pickled_copied_and_saved(pipe):
    """A copy by pickle or deepcopy has the names and values of the model, and trains alike."""
    model = small_model()
    wrapped = pipe(model)
    inputs, labels = batch(6)
    assert list(wrapped.state_dict()) == list(model.state_dict())
    wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    for twin in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert twin[0].weight is not model[0].weight
        twin.zero_grad()
        twin.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        assert same_bits(state(twin), state(model))


def test_training_goes_on_from_a_saved_pipeline():
    inputs, labels = batch(6)

    def third_step(wrapped, optimizer):
        torch.manual_seed(9)
        loss = wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(optimizer.step)
        return [loss, *(p.detach() for p in wrapped.parameters())]

    wrapped = RoundPipe(small_model(dropout=0.4), devices="virtual:2")
    optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    loaded = pickle.loads(pickle.dumps((wrapped, optimizer)))
    assert same_bits(third_step(wrapped, optimizer), third_step(*loaded))
