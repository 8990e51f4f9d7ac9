"""One test per row of the list of what the runtime does otherwise than the one whose interface it has."""

import copy
import pickle
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

from roundpipe_runtime import (
    JoinError,
    ModelExecutePlan,
    OptimizerCtx,
    PlanError,
    Replicate,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
    SplitError,
    TensorChunkSpec,
    UnevenSplitWarning,
    UnregisteredObjectError,
    WeightedLoss,
    optim,
)
from tests.runtime.small import batch, gradients, relative_error, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=4)

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


@pytest.fixture
def pipe():
    """Makes pipelines, and closes them."""
    made = []

    def make(model, *args, devices="virtual:2:check", **options):
        made.append(RoundPipe(model, *args, devices=devices, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def plain(model, inputs, labels, loss_fn=F.mse_loss):
    """Gradients of one backward over the whole batch, in float64."""
    model = copy.deepcopy(model).double()
    loss_fn(model(inputs.double()), labels.double()).backward()
    return gradients(model)


def assert_gradients(model, expected):
    for name, gradient in expected.items():
        assert relative_error(model.get_parameter(name).grad, gradient) < 1e-6, name


def test_the_import_needs_no_accelerator_and_starts_nothing():
    """In a fresh process: no thread, no accelerator, no library besides torch; a wrapped model starts none."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    libraries = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    assert libraries == {"roundpipe_runtime", "yobx_flatten"}


@pytest.mark.parametrize("where", ["layer", "loss", "step", "split"])
def test_an_error_is_an_exception_where_the_user_called(pipe, where):
    """An exception in a layer, loss, step or split comes out of the call, and the pipeline works afterwards."""

    def fail(*args):
        raise ZeroDivisionError("on purpose")

    model = small_model()
    inputs, labels = batch(6)
    wrapped = pipe(model)
    handle = model[3].register_forward_pre_hook(fail) if where == "layer" else None
    config = RoundPipeRunConfig(split_input=fail) if where == "split" else MEAN
    loss_fn = fail if where == "loss" else F.mse_loss

    def call():
        if where == "step":
            wrapped.step(fail)
        else:
            wrapped.forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=config)

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        call()
    if where == "layer":
        (note,) = caught.value.__notes__
        assert "layer 3 (Tied)" in note
        assert "microbatch 0 of 4" in note
        assert any(f"on {device.name}" in note for device in wrapped.devices)
        assert "float32(2, 6)" in note
        handle.remove()
    wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert_gradients(model, plain(model, inputs, labels))


@pytest.mark.parametrize("rows", [10, 2])
def test_uneven_batches_have_exact_gradients(pipe, rows):
    """10 rows in 4 microbatches, and 2 rows in 4: the mean over rows and (sum, weight) are exact."""
    inputs, labels = batch(rows)
    for loss_fn, reduction in (
        (F.mse_loss, "mean"),
        (lambda o, t: WeightedLoss(((o - t) ** 2).sum(), t.numel()), "sum"),
    ):
        model = small_model()
        config = RoundPipeRunConfig(loss_reduction=reduction, num_microbatch=4)
        pipe(model).forward_backward((inputs,), label=labels, loss_fn=loss_fn, run_config=config)
        assert_gradients(model, plain(model, inputs, labels))


def test_the_documented_quotient_warns_when_it_is_no_mean(pipe):
    """Dividing by the number of microbatches is documented; for an uneven split a warning says what is exact."""
    inputs, labels = batch(10)
    config = RoundPipeRunConfig(num_microbatch=4, loss_reduction="sum")
    wrapped = pipe(small_model())
    with pytest.warns(UnevenSplitWarning, match="WeightedLoss") as seen:
        wrapped.forward_backward((inputs,), label=labels, loss_fn=lambda o, t: F.mse_loss(o, t) / 4, run_config=config)
    assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.forward_backward(
            (inputs[:8],), label=labels[:8], loss_fn=lambda o, t: F.mse_loss(o, t) / 4, run_config=config
        )


class Masked(nn.Module):
    """A layer with a second input that every row shares."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.linear(x * mask)


def test_a_broadcast_tensor_goes_to_every_microbatch(pipe):
    """(1, S) beside (B, S): four microbatches, and the loss of the whole batch."""
    model = Masked()
    inputs, labels = batch(8)
    mask = torch.tensor([[1.0, 0.0, 1.0, 2.0]])
    expected = F.mse_loss(model(inputs, mask), labels)
    sizes = []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    loss = pipe(model).forward_backward((inputs, mask), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert sizes == [2, 2, 2, 2]
    assert relative_error(loss, expected) < 1e-6


def test_class_weights_are_not_cut(pipe):
    """A (3,) tensor of class weights beside 9 rows goes whole to every microbatch."""
    model = nn.Sequential(nn.Linear(4, 3))
    inputs, _ = batch(9)
    classes, weights = torch.arange(9) % 3, torch.tensor([1.0, 2.0, 0.5])

    def loss_fn(outputs, labels):
        classes, weights = labels
        return WeightedLoss(
            F.cross_entropy(outputs, classes, weight=weights, reduction="sum"), weights[classes].sum().item()
        )

    expected = F.cross_entropy(model(inputs), classes, weight=weights)
    loss = pipe(model).forward_backward((inputs,), label=(classes, weights), loss_fn=loss_fn, run_config=MEAN)
    assert relative_error(loss, expected) < 1e-6


def test_what_could_be_cut_two_ways_is_an_error_that_names_both(pipe):
    """Two tensors whose axes 0 differ: nobody guesses."""
    with pytest.raises(SplitError, match=r"args\[0\][\s\S]*args\[1\]"):
        pipe(Masked())(torch.zeros(8, 4), torch.zeros(3, 4))


def test_a_call_without_anything_to_cut_is_one_microbatch(pipe):
    """None, numbers and strings, or no argument at all: once, and not as often as microbatches were asked for."""

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


def test_an_output_that_was_handed_on_whole_is_there_once(pipe):
    """A (6, 5) table beside 12 rows in 3 microbatches comes out as (6, 5), and not three times below itself."""

    class Both(nn.Module):
        def forward(self, x, table):
            return x, table

    x, table = torch.arange(24.0).reshape(12, 2), torch.arange(30.0).reshape(6, 5)
    config = RoundPipeRunConfig(num_microbatch=3, split_input={"args[1]": Replicate})
    with torch.no_grad():
        found = pipe(Both())(x, table, roundpipe_run_config=config)
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], table)


def test_packed_data_of_different_numbers_of_microbatches_is_refused(pipe):
    """Three entries beside four: rows would be left out."""
    three, four = (RoundPipePackedData([torch.zeros(2, 4)] * count) for count in (3, 4))
    with pytest.raises(SplitError, match=r"different numbers of microbatches: args\[0\] into 3, args\[1\] into 4"):
        pipe(Masked())(three, four)


def test_scalar_outputs_are_averaged_by_weight(pipe):
    """A 0-d output of 7 rows in 4 microbatches is the mean over rows, not over microbatches."""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    inputs, _ = batch(7)
    with torch.no_grad():
        found = pipe(Mean())(inputs, roundpipe_run_config=MEAN)
    assert relative_error(found, inputs.mean()) < 1e-6


def test_a_microbatch_that_counts_nothing_is_no_nan(pipe):
    """Labels that are all -100 in one microbatch, or in all of them: no NaN in loss or gradients."""
    model = nn.Sequential(nn.Linear(4, 3))
    inputs, _ = batch(8)
    classes = torch.tensor([0, 1, 2, 0, -100, -100, 1, 2])

    def loss_fn(outputs, labels):
        return WeightedLoss(F.cross_entropy(outputs, labels, reduction="sum"), (labels != -100).sum())

    wrapped = pipe(model)
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(inputs), classes).backward()
    wrapped.forward_backward((inputs,), label=classes, loss_fn=loss_fn, run_config=MEAN)
    assert_gradients(model, gradients(reference))
    wrapped.zero_grad()
    loss = wrapped.forward_backward((inputs,), label=torch.full((8,), -100), loss_fn=loss_fn, run_config=MEAN)
    assert loss == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


class Hidden:
    """Holds a tensor, and nobody registered it."""

    def __init__(self, tensor):
        self.tensor = tensor


def test_an_unregistered_object_with_tensors_is_refused(pipe):
    """It is not handed whole to every microbatch: as input and between layers, the error says where it is."""

    class Take(nn.Module):
        def forward(self, x):
            return Hidden(x)

    with pytest.raises(UnregisteredObjectError, match=r"args\[0\][\s\S]*Hidden"):
        pipe(nn.Identity())(Hidden(torch.zeros(4)))
    with pytest.raises(UnregisteredObjectError, match=r"layer 0 \(Take\)[\s\S]*Hidden"):
        pipe(nn.Sequential(Take(), nn.Identity()))(torch.zeros(4, 2))


def test_outputs_with_different_keys_are_an_error_with_the_path(pipe):
    """Keys that differ between microbatches are not merged by position."""

    class Keys(nn.Module):
        def forward(self, x):
            return {"low" if x.sum() < 0 else "high": x}

    inputs = torch.cat([-torch.ones(2, 2), torch.ones(2, 2)])
    with pytest.raises(JoinError, match="low"), torch.no_grad():
        pipe(Keys())(inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))


def test_tied_weights_in_one_stage_have_one_gradient(pipe):
    """Two layers with one weight in one backward stage: the gradient of the plain model, not twice of it."""
    model = small_model(tied=True)
    inputs, labels = batch(8)
    plan = ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    config = RoundPipeRunConfig(loss_reduction="mean", execute_plan=plan)
    pipe(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
    assert_gradients(model, plain(model, inputs, labels))


def test_a_fused_plan_without_the_last_layers_is_refused(pipe):
    """The error names the layer that the plan misses."""
    plan = ModelExecutePlan([range(3)], [range(3, 6), range(3)])
    inputs, labels = batch(4)
    with pytest.raises(PlanError, match="misses layer 6"):
        pipe(small_model()).forward_backward(
            (inputs,), label=labels, loss_fn=F.mse_loss, run_config=RoundPipeRunConfig(execute_plan=plan)
        )


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_loaded_state_survives_the_next_step(pipe, dtype):
    """After load_state_dict a step starts from the loaded weights."""
    model = small_model()
    wrapped = pipe(model, optim_dtype=dtype)
    loaded = small_model(seed=5).state_dict()
    inputs, labels = batch(6)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for state_dict in (None, loaded):
        if state_dict is not None:
            wrapped.load_state_dict(state_dict)
        wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    reference = small_model(seed=5).double()
    F.mse_loss(reference(inputs.double()), labels.double()).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_error(parameter.detach(), (expected - 0.1 * expected.grad).detach()) < 1e-6


def test_eval_reaches_the_model_and_the_wrapper(pipe):
    """eval() turns `training` off on the wrapper, the model and its layers; dropout passes everything."""
    wrapped = pipe(small_model(dropout=0.9))
    inputs, _ = batch(6)
    wrapped.eval()
    assert not any([wrapped.training, wrapped.model.training, *(layer.training for layer in wrapped)])
    with torch.no_grad():
        assert torch.equal(wrapped(inputs), wrapped(inputs))
    assert wrapped.train().training


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_dropout_is_replayed_the_same_on_any_device_count(pipe, grain):
    """The recomputed mask is that of the forward, whatever the number of devices and the order."""
    found = []
    for devices, plan in (
        ("virtual:1", None),
        ("virtual:3", ModelExecutePlan([range(2), range(2, 5)], [range(5, 8), range(3, 5), range(3)])),
        ("virtual:4", ModelExecutePlan([range(7)], [range(7, 8), range(7)])),
    ):
        torch.manual_seed(3)
        model = small_model(dropout=0.5)
        wrapped = pipe(model, devices=devices)
        config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan, recompute_grain=grain)
        inputs, labels = batch(6)
        loss = wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        found.append([loss, *state(model)])
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_hooks_on_layers_run_with_the_layer_itself(pipe):
    """Forward hooks, pre-hooks and full backward hooks are called once per microbatch, with the user's module."""
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
        twin.close()


def test_a_step_is_exact_by_default(pipe):
    """step() without is_async: the next run uses the new weights, and the whole training is the plain one."""
    inputs, labels = batch(6)
    model = small_model()
    reference = copy.deepcopy(model).double()
    wrapped = pipe(model)
    optimizer, expected = optim.Adam(wrapped.optim_parameters()), torch.optim.Adam(reference.parameters())
    for _ in range(4):
        loss = wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        expected.zero_grad()
        exact = F.mse_loss(reference(inputs.double()), labels.double())
        exact.backward()
        expected.step()
        assert relative_error(loss, exact.detach()) < 1e-5


def test_positions_of_three_kinds_are_cut_along_the_batch(pipe):
    """(3, B, S) positions beside (B, S): cut along B when a rule says so, and an error or the right cut without."""

    class Positions(nn.Module):
        def forward(self, x, positions):
            assert positions.shape[:2] == (3, len(x))
            return x + positions.sum(0)

    inputs, positions = torch.zeros(8, 4), torch.arange(96.0).reshape(3, 8, 4)
    config = RoundPipeRunConfig(num_microbatch=4, split_input=((TensorChunkSpec(0), TensorChunkSpec(1)), None))
    with torch.no_grad():
        assert torch.equal(pipe(Positions())(inputs, positions, roundpipe_run_config=config), positions.sum(0))


def test_no_thread_outlives_its_pipeline():
    """close() ends the threads that the first run started."""
    before = set(threading.enumerate())
    wrapped = RoundPipe(small_model(), devices="virtual:3")
    with torch.no_grad():
        wrapped(batch(6)[0])
    assert set(threading.enumerate()) - before
    wrapped.close()
    assert set(threading.enumerate()) <= before


class ReadsCache(nn.Module):
    """Adds what the cache holds of each row."""

    def forward(self, x, cache):
        return x + cache.layers[0].keys.sum(dim=(1, 2, 3), keepdim=True)[:, :, 0, 0]


def test_a_dynamic_cache_is_split_when_registered_and_refused_when_not(pipe):
    """Registered, each microbatch gets the rows of the cache that are its own; unregistered, the diagnosis says how."""
    pytest.importorskip("transformers", reason="DynamicCache is a class of transformers")
    from yobx_flatten import make_dynamic_cache, register_flattening_functions

    inputs, _ = batch(8)
    keys = torch.arange(8.0 * 2 * 3 * 4).reshape(8, 2, 3, 4)
    cache = make_dynamic_cache([(keys, keys)])
    wrapped = pipe(ReadsCache())
    config = RoundPipeRunConfig(num_microbatch=4)
    with (
        torch.no_grad(),
        pytest.raises(UnregisteredObjectError, match=r"DynamicCache[\s\S]*register_flattening_functions"),
    ):
        wrapped(inputs, cache, roundpipe_run_config=config)
    with torch.no_grad(), register_flattening_functions(patch_transformers=True):
        found = wrapped(inputs, cache, roundpipe_run_config=config)
    assert torch.equal(found, inputs + keys.sum(dim=(1, 2, 3))[:, None])


def test_save_pretrained_works_through_the_wrapper(pipe, tmp_path):
    """A method of the wrapped model, with the names and values of the model."""
    transformers = pytest.importorskip("transformers", reason="save_pretrained is a method of its models")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    pipe(model).save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert same_bits(list(loaded.state_dict().values()), list(model.state_dict().values()))


def test_training_goes_on_from_a_saved_pipeline():
    """Pipeline and optimizer, saved after two steps and loaded: the third step is the same to the last bit."""
    inputs, labels = batch(6)

    def third_step(wrapped, optimizer):
        torch.manual_seed(9)
        loss = wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(optimizer.step)
        wrapped.close()
        return [loss, *(p.detach() for p in wrapped.parameters())]

    wrapped = RoundPipe(small_model(dropout=0.4), devices="virtual:2")
    optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        wrapped.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    loaded = pickle.loads(pickle.dumps((wrapped, optimizer)))
    assert same_bits(third_step(wrapped, optimizer), third_step(*loaded))
