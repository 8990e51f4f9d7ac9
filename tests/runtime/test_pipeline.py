"""RoundPipe beside the plain model: what it wraps, what its calls return, and what it leaves in the model."""

import copy
import gc
import threading
import time
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from roundpipe_runtime import (
    ConfigError,
    DeviceError,
    JoinError,
    ModelExecutePlan,
    OptimizerCtx,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
    StageError,
    Timeline,
    VirtualDevice,
)
from roundpipe_runtime.engine import driver as engine
from tests.runtime.small import batch, checked_devices, gradients, relative_error, same_bits, small_model, state

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


@pytest.fixture(scope="module")
def devices():
    with checked_devices(2) as made:
        yield made


@pytest.fixture
def wrap(devices):
    return lambda model, *args, **options: RoundPipe(model, *args, **{"devices": devices, **options})


def near(found, expected):
    return relative_error(found, expected) < 1e-6


# -- what it wraps -----------------------------------------------------------------------------------------------------


class Reversed(nn.Sequential):
    """A Sequential that does not run like one."""

    def forward(self, x):
        for layer in reversed(list(self)):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        lambda: [nn.Linear(4, 4), nn.Tanh()],
        lambda: nn.ModuleList([nn.Linear(4, 4), nn.Tanh()]),
        lambda: nn.Linear(4, 4),
        lambda: Reversed(nn.Linear(4, 4), nn.Tanh()),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    ],
)
def test_what_can_be_wrapped(wrap, make):
    """A Sequential, a list, any other module, a Sequential with a forward of its own: the outputs are plain."""
    torch.manual_seed(0)
    model = make()
    plain = nn.Sequential(*model) if isinstance(model, (list, nn.ModuleList)) else model
    inputs, _ = batch(6)
    inputs = inputs.reshape(6, 1, 4)
    plain.eval()
    with torch.no_grad():
        assert torch.allclose(wrap(model)(inputs), plain(inputs), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "wraps an nn.Module"),
        (([],), "wraps an nn.Module"),
        ((nn.Linear(2, 2), torch.int8), "optim_dtype"),
        ((nn.Linear(2, 2), None, None, {"num_microbatch": 2}), "model_run_config"),
        ((nn.Linear(2, 2), None, None, None, "sometimes"), "pin_model"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    """Each error names the argument."""
    with pytest.raises(ConfigError, match=message):
        RoundPipe(*arguments, devices="virtual:1")


def test_keyword_arguments_reach_the_first_layer(wrap):
    """Nested inputs by keyword are split with the others."""

    class Scaled(nn.Module):
        def forward(self, x, *, options):
            return x * options["scale"] + options["shift"]

    inputs, _ = batch(6)
    options = {"scale": torch.arange(6.0).reshape(6, 1), "shift": 2.0}
    with torch.no_grad():
        found = wrap(nn.Sequential(Scaled(), nn.Identity()).__getitem__(0))(inputs, options=options)
    assert torch.equal(found, inputs * options["scale"] + 2.0)


def test_lazy_layers_are_refused_with_the_remedy(wrap):
    """A parameter without a shape cannot travel."""
    with pytest.raises(StageError, match="Run the model once"):
        wrap(nn.Sequential(nn.LazyLinear(3)))(torch.zeros(4, 4))


def test_an_rnn_and_its_flat_weights(wrap):
    """nn.LSTM keeps a list of its weights beside the parameters: it follows the copies."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, batch_first=True)
    inputs = torch.randn(6, 3, 4)
    expected, _ = model(inputs)
    expected.sum().backward()
    exact = gradients(model)
    model.zero_grad()
    loss = wrap(model).forward_backward((inputs,), loss_fn=lambda outputs, _: outputs[0].sum())
    assert near(loss, expected.sum().detach())
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())


# -- attributes, states, copies ---------------------------------------------------------------------------------------


def test_attributes_are_those_of_the_model(wrap):
    """Read, written and deleted on the model, or on the original one that was set."""
    model = nn.Linear(3, 2)
    pipe = wrap(model)
    assert pipe.in_features == 3
    pipe.note = "here"
    assert model.note == "here"
    del pipe.note
    assert not hasattr(model, "note")
    original = nn.Module()
    original.config = {"vocab_size": 7}
    pipe.set_original_model(original)
    assert pipe.config == {"vocab_size": 7}
    pipe.flag = 1
    assert original.flag == 1
    with pytest.raises(AttributeError, match="nothing"):
        _ = pipe.nothing


def test_it_is_a_module_inside_another_one(wrap):
    """Names, state dict, dtype and mode go through a parent as if the model stood there."""
    model = small_model(norm=True)
    parent, plain = nn.ModuleDict({"net": wrap(model)}), nn.ModuleDict({"net": model})
    assert [n for n, _ in parent.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(parent.state_dict()) == list(plain.state_dict())
    parent.load_state_dict(nn.ModuleDict({"net": small_model(norm=True, seed=4)}).state_dict())
    assert torch.equal(model[0].weight, small_model(norm=True, seed=4)[0].weight)
    parent.eval()
    assert not model.training
    parent.double()
    assert model[0].weight.dtype == torch.float64
    assert [n for n, _ in wrap(model).named_buffers()] == [n for n, _ in model.named_buffers()]


def test_the_name_is_the_call_site_or_given(wrap):
    """file:line, for errors and timelines."""
    assert RoundPipe(nn.Linear(2, 2), devices="virtual:1").name.startswith("test_pipeline.py:")
    assert wrap(nn.Linear(2, 2), name="mine").name == "mine"


# -- running -----------------------------------------------------------------------------------------------------------


def test_no_grad_and_eval_give_plain_outputs(wrap):
    """Without gradients there is no graph, and nothing is kept for a backward."""
    model = small_model(norm=True, dropout=0.5).eval()
    inputs, _ = batch(7)
    pipe = wrap(model)
    with torch.no_grad():
        found = pipe(inputs)
    assert not found.requires_grad
    assert torch.allclose(found, model(inputs), atol=1e-6)
    assert not pipe(inputs, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False)).requires_grad
    with torch.no_grad():
        assert pipe(inputs, roundpipe_run_config=RoundPipeRunConfig(requires_grad=True)).requires_grad


def test_forward_backward_without_gradients_is_refused(wrap):
    """Under no_grad there is nothing to go back through."""
    with pytest.raises(ConfigError, match="Use forward"), torch.no_grad():
        wrap(small_model()).forward_backward((batch(4)[0],))


def test_outputs_are_returned_in_order_and_detached(wrap):
    """return_outputs gives (loss, outputs), rows in the order of the batch."""
    model = small_model()
    inputs, labels = batch(8)
    loss, outputs = wrap(model).forward_backward(
        (inputs,), label=labels, loss_fn=F.mse_loss, return_outputs=True, run_config=MEAN
    )
    expected = model(inputs)
    assert not outputs.requires_grad
    assert torch.allclose(outputs, expected, atol=1e-6)
    assert near(loss, F.mse_loss(expected, labels).detach())


def test_a_sequence_of_losses_is_a_list_of_totals(wrap):
    """Every loss is summed over the microbatches, and all of them go back."""
    model, inputs, labels = small_model(), *batch(6)
    losses = wrap(model).forward_backward(
        (inputs,), label=labels, loss_fn=lambda o, t: [((o - t) ** 2).sum(), o.abs().sum()], run_config=MEAN_SUM
    )
    found = gradients(model)
    model.zero_grad()
    outputs = model(inputs)
    expected = [((outputs - labels) ** 2).sum(), outputs.abs().sum()]
    torch.autograd.backward(expected)
    assert [near(a, b.detach()) for a, b in zip(losses, expected, strict=True)] == [True, True]
    assert all(near(found[name], p.grad) for name, p in model.named_parameters())


MEAN_SUM = RoundPipeRunConfig(num_microbatch=3)


def test_pipelines_are_chained_by_packed_data(wrap):
    """merge_output=False hands microbatches on; gradients flow back into the first pipeline and its input."""
    model, inputs, labels = small_model(), *batch(7)
    inputs.requires_grad_()
    F.mse_loss(model(inputs), labels).backward()
    exact, exact_input = gradients(model), inputs.grad
    model.zero_grad()
    inputs.grad = None
    first, second = wrap(model[:3]), wrap(model[3:])
    hidden = first(inputs, roundpipe_run_config=RoundPipeRunConfig(merge_output=False, num_microbatch=3))
    assert isinstance(hidden, RoundPipePackedData)
    assert [len(part) for part in hidden.synchronize()] == [3, 2, 2]
    second.forward_backward((hidden,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
    assert near(inputs.grad, exact_input)


class Table(nn.Module):
    """A layer with a table that every row reads whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, table):
        return self.linear(x) * table.sum(0)


@pytest.mark.parametrize("clone", [False, True])
def test_a_table_beside_packed_data_of_a_split_function_goes_whole(wrap, clone):
    """(2, 6) four times, and a (5, 6) table for all: not five rows, cut 2, 1, 1, 1. Gradients reach the first."""
    torch.manual_seed(0)
    first_model, second_model = Table(), Table()
    x, table = torch.randn(8, 6), torch.randn(5, 6)
    expected = second_model(first_model(x, table), table).pow(2).sum()
    expected.backward()
    exact = [parameter.grad for model in (first_model, second_model) for parameter in model.parameters()]
    first_model.zero_grad()
    second_model.zero_grad()

    def cut(args, kwargs, count):
        x, table = args
        return [(part, table.clone() if clone else table) for part in x.split(2)], [kwargs] * 4

    first, second = wrap(first_model), wrap(second_model)
    config = RoundPipeRunConfig(split_input=cut, merge_output=False, num_microbatch=4)
    hidden = first(x, table, roundpipe_run_config=config)
    assert hidden.rows == (2, 2, 2, 2)
    for given in (hidden, RoundPipePackedData(part.detach() for part in hidden)):  # the second does not tell its rows
        loss = second.forward_backward(
            (given, table), loss_fn=lambda o, t: o.pow(2).sum(), run_config=RoundPipeRunConfig(num_microbatch=4)
        )
        assert near(loss, expected.detach())
        if given is hidden:
            found = [parameter.grad for model in (first_model, second_model) for parameter in model.parameters()]
            assert all(near(a, b) for a, b in zip(found, exact, strict=True))


def test_packed_outputs_of_different_keys_are_refused(wrap):
    """They would all have the key of the first."""

    class Keys(nn.Module):
        def forward(self, x):
            return {"low" if x.sum() < 0 else "high": x}

    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    with pytest.raises(JoinError, match="low"), torch.no_grad():
        wrap(Keys())(torch.cat([-torch.ones(2, 2), torch.ones(2, 2)]), roundpipe_run_config=config)


def test_packed_labels_that_want_a_gradient_are_refused(wrap):
    """As tensors are: it would be lost without a word."""
    teacher, student, inputs = wrap(small_model()), wrap(small_model()), batch(4)[0]
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    with pytest.raises(ConfigError, match="label requires a gradient"):
        student.forward_backward((inputs,), label=teacher(inputs, roundpipe_run_config=config), loss_fn=F.mse_loss)
    with torch.no_grad():
        labels = teacher(inputs, roundpipe_run_config=config)
    loss = student.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert near(loss, torch.zeros(()))


def test_two_threads_may_share_devices(devices):
    """Two pipelines on the same devices, from two threads: neither waits for ever, both are right."""
    inputs, labels = batch(6)
    found, errors = {}, []

    def train(seed, model):
        try:
            pipe = RoundPipe(model, devices=devices, model_run_config=MEAN)
            for _ in range(5):
                pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
            found[seed] = state(model)
        except BaseException as error:  # shown by the assertion
            errors.append(error)

    models = [small_model(seed=seed) for seed in (0, 1)]  # made here: both would draw from one generator
    threads = [threading.Thread(target=train, args=(seed, copy.deepcopy(models[seed]))) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    together = dict(found)
    for seed in (0, 1):
        train(seed, models[seed])
    assert all(same_bits(together[seed], found[seed]) for seed in (0, 1))


def test_the_caller_s_autocast_holds_in_the_layers(wrap):
    """Under autocast the layers compute in bfloat16, as they do without the pipeline."""
    model, inputs, _labels = small_model(), *batch(6)
    dtypes = []
    model[0].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs)
        found = wrap(model)(inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert set(dtypes) == {torch.bfloat16}
    assert torch.equal(found, expected)


def test_frozen_parameters_get_no_gradient(wrap):
    """requires_grad is asked anew for every run."""
    model, inputs, labels = small_model(), *batch(6)
    pipe = wrap(model)
    model[0].requires_grad_(False)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert [p.grad is None for p in model[0].parameters()] == [True, True]
    assert model[2].weight.grad is not None


def test_a_parameter_that_no_microbatch_uses_has_no_gradient(wrap):
    """None, as in PyTorch, and not zeros: an optimizer skips it."""

    class Spare(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.spare = nn.Parameter(torch.ones(2))

    model = nn.Sequential(Spare(), nn.Linear(4, 3))
    inputs, labels = batch(6)
    wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    assert model[0].spare.grad is None
    assert model[0].weight.grad is not None


def test_one_module_in_two_places(wrap):
    """The same layer twice has one gradient, the sum of both uses."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))
    inputs, labels = batch(6)
    F.mse_loss(model(inputs), labels).backward()
    exact = gradients(model)
    for plan in (
        ModelExecutePlan([range(3)], [range(3, 4), range(3)]),
        ModelExecutePlan([range(1), range(1, 3)], [range(3, 4), range(2, 3), range(2)]),
    ):
        model.zero_grad()
        config = RoundPipeRunConfig(loss_reduction="mean", execute_plan=plan)
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())


def test_one_norm_in_two_places_is_refused(wrap):
    """Both places write the running statistics, and stages run one microbatch apart: an error that names both."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    before = norm.running_mean.clone()
    with pytest.raises(StageError, match=r"layer 0 \(BatchNorm1d\) and layer 2 \(BatchNorm1d\)"):
        wrap(model).forward_backward((batch(6)[0],), loss_fn=lambda o, _: o.sum())
    assert torch.equal(norm.running_mean, before)


def test_a_skip_connection_travels_in_a_tuple(wrap):
    """A tensor that is handed on twice is one tensor at the other end, and its gradient is the sum."""

    class Split(nn.Module):
        def forward(self, x):
            return x, x

    class Body(nn.Linear):
        def forward(self, pair):
            assert pair[0] is pair[1] or pair[0].shape != pair[1].shape or not torch.equal(*pair)
            return super().forward(pair[0]), pair[1]

    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Split(), Body(4, 4), Add())
    inputs, labels = batch(6)[0], batch(6, seed=2)[0]
    F.mse_loss(model(inputs), labels).backward()
    exact = gradients(model)
    found = []
    for plan in (
        ModelExecutePlan([], [range(4)]),
        ModelExecutePlan([range(2), range(2, 3)], [range(3, 4), range(2, 3), range(1, 2), range(1)]),
    ):
        model.zero_grad()
        config = RoundPipeRunConfig(loss_reduction="mean", execute_plan=plan)
        wrap(model).forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=config)
        assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
        found.append(state(model))
    assert same_bits(*found)


def test_backward_twice_is_refused(wrap):
    """What the forward saved is freed, even with retain_graph."""
    loss = wrap(small_model())(batch(4)[0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StageError, match="freed"):
        loss.backward()


def test_weights_changed_between_forward_and_backward_are_refused(wrap):
    """The recomputation would be of another function."""
    model = small_model()
    loss = wrap(model)(batch(4)[0]).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(StageError, match=r"layer 0 \(Linear\) was changed between"):
        loss.backward()


def test_the_cursor_goes_on_where_the_last_run_ended(wrap):
    """Three stages on two devices: the next run starts on the second one."""
    inputs, labels = batch(6)
    plan = ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    pipe = wrap(small_model())
    cursors = []
    for _ in range(3):
        cursors.append(pipe._rp_engine.round_robin.cursor)
        pipe.forward_backward(
            (inputs,),
            label=labels,
            loss_fn=F.mse_loss,
            run_config=RoundPipeRunConfig(execute_plan=plan, loss_reduction="mean"),
        )
    assert cursors == [0, 1, 0]


def test_the_plan_follows_what_was_measured(wrap):
    """After a run the costs are seconds, and a new plan may be made of them; no bit of the result depends on it."""
    pipe = wrap(small_model())
    guessed = [cost.forward for cost in pipe.layer_costs()]
    inputs, labels = batch(6)
    for _ in range(3):
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    measured = [cost.forward for cost in pipe.layer_costs()]
    assert max(measured) < 1 < min(guessed)
    assert isinstance(ModelExecutePlan.auto("fused", pipe), ModelExecutePlan)


def test_a_forward_alone_says_nothing_about_training(wrap):
    """One row in inference is quicker than a batch; the plan for training compares what was measured in training."""
    pipe = wrap(small_model())
    inputs, labels = batch(6)
    pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
    before = pipe.layer_costs()
    for _ in range(3):
        with torch.no_grad():
            pipe(inputs[:1])
    assert pipe.layer_costs() == before


def test_the_fused_stage_is_measured(wrap):
    """Its backward costs what a backward stage would: the forward, the loss, and the way back through both."""
    model, plan = small_model(), ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    pipe, (inputs, labels) = wrap(model), batch(6)
    model[6].register_forward_hook(lambda *_: time.sleep(0.01))

    def slow_loss(outputs, targets):
        time.sleep(0.1)
        return F.mse_loss(outputs, targets)

    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe.forward_backward((inputs,), label=labels, loss_fn=slow_loss, run_config=config)
    last = pipe.layer_costs()[6]
    assert last.forward >= 0.01
    assert last.backward >= 0.11


class _Watched(nn.Linear):
    """Notes in which threads its kind computes."""

    threads: ClassVar[set[int]] = set()

    def forward(self, x):
        self.threads.add(threading.get_ident())
        return super().forward(x)


@pytest.mark.parametrize(("brief", "threads"), [(1.0, 1), (0.0, 2)])
def test_one_thread_computes_brief_layers(wrap, monkeypatch, brief, threads):
    """Once layers were measured to be brief, one thread computes them all; no bit of the result depends on it."""
    monkeypatch.setattr(engine, "_BRIEF", brief)
    torch.manual_seed(0)
    model = nn.Sequential(*[_Watched(8, 8) for _ in range(6)])
    pipe, inputs, labels = wrap(model), torch.randn(6, 8), torch.randn(6, 8)

    def step():
        _Watched.threads.clear()
        pipe.zero_grad()
        loss = pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        return [loss, *(parameter.grad.clone() for parameter in model.parameters())]

    first = step()
    assert len(_Watched.threads) == 2
    for _ in range(5):
        assert same_bits(step(), first)
        assert len(_Watched.threads) == threads


def test_a_closed_pipeline_says_so():
    """A run after close() names the device and how to get another pipeline."""
    pipe = RoundPipe(small_model(), devices="virtual:2")
    pipe(batch(6)[0])
    pipe.close()
    with pytest.raises(DeviceError, match=r"virtual:\d was closed, .*\n    RoundPipe\(model, devices="):
        pipe(batch(6)[0])


def test_parameters_inside_the_optimizer_context(wrap):
    """parameters() are the model's; inside the block, and with optim_dtype, the copies that hold the gradients."""
    model = small_model().to(torch.bfloat16)
    pipe = wrap(model, optim_dtype=torch.float32)
    assert next(pipe.parameters()) is model[0].weight
    with OptimizerCtx():
        inside = dict(pipe.named_parameters())
    assert inside.keys() == dict(model.named_parameters()).keys()
    assert {p.dtype for p in inside.values()} == {torch.float32}
    assert inside["0.weight"] is next(pipe.optim_parameters())
    plain = wrap(copy.deepcopy(model))
    assert next(plain.optim_parameters()) is next(plain.parameters())


def test_a_pipeline_inside_of_a_layer_needs_devices_of_its_own(devices, wrap):
    """On the same devices it would wait for itself: an error says so."""
    inner = wrap(nn.Linear(4, 3))

    class Outer(nn.Module):
        def forward(self, x):
            return inner(x)

    with pytest.raises(StageError, match="devices of its own"):
        wrap(Outer())(batch(4)[0])


def test_inputs_changed_after_forward_change_nothing(wrap):
    """Backward recomputes from what the inputs were."""
    model, (inputs, labels) = small_model(), batch(6)
    F.mse_loss(model(inputs), labels).backward()
    exact = gradients(model)
    model.zero_grad()
    loss = F.mse_loss(wrap(model)(inputs), labels)
    inputs.zero_()
    loss.backward()
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())


def test_a_run_leaves_no_activation_behind(wrap):
    """When a call returns, what its layers computed is gone, without waiting for the garbage collector."""
    model, (inputs, labels) = small_model(norm=True, dropout=0.2), batch(9)
    alive = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    pipe = wrap(model)
    gc.collect()
    gc.disable()
    try:
        pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)
        F.mse_loss(pipe(inputs), labels).backward()
        pipe(inputs)  # and never backward
        for device in pipe.devices:
            device.worker.submit(int).result()  # its last stage has left, too
        assert len(alive) > 60
        assert not [reference for reference in alive if reference() is not None]
        assert [device.allocated for device in pipe.devices] == [0, 0]
    finally:
        gc.enable()


def test_a_model_four_times_larger_than_its_devices_trains():
    """The plan follows the memory of the devices; no device ever holds more, and the gradients are right."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(32)])
    inputs = torch.randn(6, 32)
    expected = model(inputs).square().mean()
    expected.backward()
    exact = gradients(model)
    model.zero_grad()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    small = [VirtualDevice(f"virtual:{n}", check=True, memory_limit=size // 4) for n in range(2)]
    pipe = RoundPipe(model, devices=small, model_run_config=MEAN)
    loss = pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    pipe.close()
    assert near(loss, expected.detach())
    assert all(relative_error(p.grad, exact[name]) < 1e-5 for name, p in model.named_parameters())


@pytest.mark.parametrize(("room", "uploads"), [(None, 1), (40, 1), (2, 2)])
def test_what_fits_stays_between_forward_and_backward(room, uploads):
    """On one device, a layer is uploaded once per run where the model fits, and once per pass where it does not."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    device = VirtualDevice("virtual:0", check=True, memory_limit=room and room * size)
    inputs = torch.randn(6, 16)
    model(inputs).square().mean().backward()
    exact = gradients(model)
    model.zero_grad()
    plan = ModelExecutePlan([range(4), range(4, 6)], [range(6, 8), range(3, 6), range(3)])
    config = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3, execute_plan=plan)
    pipe = RoundPipe(model, devices=[device], model_run_config=config)
    with Timeline() as timeline:
        pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
    found = [record.layer for record in timeline.records if record.kind == "upload"]
    assert [found.count(layer) for layer in range(8)] == [uploads] * 6 + [1, 1]
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
    assert device.allocated == 0
    pipe.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: pipe.append(nn.Tanh()),
        lambda pipe: setattr(pipe.model, "1", nn.Tanh()),
        lambda pipe: pipe.model.__delitem__(0),
    ],
)
def test_layers_that_were_changed_after_wrapping_are_refused(wrap, change):
    """The pipeline would have gone on with the old ones."""
    pipe = wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    change(pipe)
    for call in (
        lambda: pipe(torch.ones(2, 4)),
        lambda: pipe.forward_backward((torch.ones(2, 4),), label=torch.ones(2, 4), loss_fn=F.mse_loss),
    ):
        with pytest.raises(StageError, match=r"was made of 2 layers; .*\n.*RoundPipe\(pipeline\.model"):
            call()
    again = wrap(pipe.model)
    assert again(torch.ones(2, 4)).shape == (2, 4)


def test_a_parent_module_finds_the_optimizers_parameters(wrap):
    """With optim_dtype, an optimizer over the parent's parameters() trains the pipeline inside of it."""
    parent = nn.ModuleDict({"net": wrap(small_model().bfloat16(), torch.float32), "head": nn.Linear(3, 3)})
    outside = list(parent.named_parameters())
    with OptimizerCtx():
        inside = dict(parent.named_parameters())
        optimizer = torch.optim.SGD(parent.parameters(), lr=0.5)
    assert list(inside) == [name for name, _ in outside]
    assert [p.dtype for n, p in outside if n.startswith("net")] == [torch.bfloat16] * (len(inside) - 2)
    assert all(parameter.dtype == torch.float32 for parameter in inside.values())
    before = parent["net"][0].weight.detach().clone()
    parent["head"](parent["net"](batch(6)[0].bfloat16()).float()).sum().backward()
    parent["net"].step(lambda: (optimizer.step(), parent.zero_grad()))
    assert not torch.equal(before, parent["net"][0].weight)
    assert all(parameter.grad is None for parameter in inside.values())


@pytest.mark.parametrize("config", [{"num_microbatch": 2}, 3])
def test_a_run_configuration_is_of_its_class(wrap, config):
    """A dict is refused by name, in both calls and as the default of the model."""
    pipe = wrap(small_model())
    with pytest.raises(ConfigError, match="must be a RoundPipeRunConfig"):
        pipe(batch(6)[0], roundpipe_run_config=config)
    with pytest.raises(ConfigError, match="must be a RoundPipeRunConfig"):
        pipe.forward_backward((batch(6)[0],), label=batch(6)[1], loss_fn=F.mse_loss, run_config=config)
    with pytest.raises(ConfigError, match="must be a RoundPipeRunConfig"):
        wrap(small_model(), model_run_config={})


def test_closing_one_pipeline_leaves_its_devices_to_the_other():
    """The last one that closes ends the threads; the closed one says so, and another one may be made."""
    before = threading.active_count()
    first = RoundPipe(small_model(), devices="virtual:2")
    second = RoundPipe(small_model(), devices=first.devices)
    inputs, _ = batch(6)
    expected = first(inputs).detach()
    first.close()
    assert torch.equal(second(inputs), expected)
    with pytest.raises(DeviceError, match="was closed, by this pipeline"):
        first(inputs)
    second.close()
    assert threading.active_count() == before


def test_one_pipeline_in_two_threads_loses_no_gradient(wrap):
    """One run at a time: the gradients are the sum over the batches of both."""
    model = small_model()
    plain = copy.deepcopy(model)
    pipe = wrap(model)
    batches = [batch(6, seed) for seed in range(8)]

    def work(mine):
        for inputs, labels in mine:
            pipe.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss, run_config=MEAN)

    threads = [threading.Thread(target=work, args=(batches[part::2],)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for inputs, labels in batches:
        F.mse_loss(plain(inputs), labels).backward()
    assert all(near(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_one_buffer_in_two_modules_is_refused_when_both_write(wrap):
    """The tensor is shared, the modules are not: each would have overwritten what the other counted."""

    class Counts(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", count)

        def forward(self, x):
            self.count += 1
            return x + 0

    count = torch.zeros(())
    pipe = wrap(nn.Sequential(Counts(count), nn.Linear(4, 4), Counts(count)))
    with pytest.raises(StageError, match="both write its buffer 'count'"):
        pipe(batch(6)[0])
    assert count.item() == 0


def test_a_parameter_keeps_its_class(wrap):
    """Layers that look at it see what they would see in the plain model."""

    class Marked(nn.Parameter):
        pass

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = Marked(torch.eye(4))

        def forward(self, x):
            assert type(self.weight) is Marked
            return x @ self.weight

    model = Looks()
    wrap(model).forward_backward((batch(6)[0],), loss_fn=lambda outputs, _: outputs.sum())
    assert type(model.weight) is Marked
    assert model.weight.grad is not None
