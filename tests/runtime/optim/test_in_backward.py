"""RoundPipe(update=...): weights rounded while they are uploaded, and layers stepped in the backward."""

import copy
import itertools
import pickle
import time

import pytest
import torch
from torch import nn

from roundpipe_runtime import GradScaler, RoundPipeRunConfig, load_checkpoint, save_checkpoint
from roundpipe_runtime.errors import CheckpointError, ConfigError, StageError
from roundpipe_runtime.huggingface import wrap_model_to_roundpipe
from roundpipe_runtime.huggingface.trainer.classes import RoundPipeTrainer
from tests.ctrl_c import press
from tests.runtime.huggingface.hf_small import known_model
from tests.runtime.optim.test_parts import Clips
from tests.runtime.small import MEAN, batch, near, relative_error, same_bits, small_model

F = nn.functional
UPDATES = ("in_place", "in_backward")
FLOAT = {"optim_dtype": torch.float32}


def mse(outputs, labels):
    return F.mse_loss(outputs.float(), labels)


def give(pipe, optimizer):
    if pipe._rp_options.update == "in_backward":
        pipe.step_with(optimizer)
    return optimizer


def step(pipe, optimizer, how=False):
    pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=how)


def run(pipe, seed=0, rows=6, loss_fn=mse):
    inputs, labels = batch(rows, seed=seed)
    return pipe.forward_backward((inputs.bfloat16(),), label=labels, loss_fn=loss_fn)


def adam(pipe, **options):
    return give(pipe, torch.optim.AdamW(pipe.optim_parameters(), lr=1e-2, **options))


def numbers(pipe, *optimizers):
    pipe.synchronize()
    masters = [p.detach().float().clone() for p in pipe.optim_parameters() if p.requires_grad]
    states = [
        optimizer.state[p][key].clone()
        for optimizer in optimizers
        for p in pipe.optim_parameters()
        for key in sorted(optimizer.state.get(p, {}))
    ]
    return masters + states + [m.bfloat16() for m in masters]


def layers_of(name):
    if name == "tied":  # of two layers in different stages
        return small_model(tied=True).bfloat16()
    if name == "batch norm":
        return small_model(norm=True).bfloat16()
    made = small_model().bfloat16()
    if name == "frozen":
        made[0].requires_grad_(False)
    if name == "mixed":  # one layer computes in float32
        made[4] = nn.Sequential(Casts(torch.float32), made[4].float(), Casts(torch.bfloat16))
    return made


class Casts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def train(pipe, make=adam, steps=3, rows=7, how=False):
    optimizer = make(pipe)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for seed in range(steps):
        losses.append(run(pipe, seed, rows))
        step(pipe, optimizer, how)
        scheduler.step()
    return losses + numbers(pipe, optimizer)


def same_as_masters(wrap, update, train, name="plain", config=MEAN, **options):
    """A training with master weights and one with `update` leave bitwise the same tensors."""
    options = {"model_run_config": config, **FLOAT, **options}
    assert same_bits(*(train(wrap(layers_of(name), update=way, **options)) for way in ("masters", update)))


@pytest.mark.parametrize("how", [False, "exact"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", ["plain", "tied", "batch norm", "frozen", "mixed"])
def test_the_numbers_are_those_of_master_weights(wrap, name, update, how):
    def trained(pipe):
        return train(pipe, how=False if pipe._rp_options.update == "masters" else how)

    same_as_masters(wrap, update, trained, name)


OPTIMIZERS = {
    "AdamW fused": lambda pipe: adam(pipe, fused=True),
    "Adam amsgrad": lambda pipe: give(pipe, torch.optim.Adam(pipe.optim_parameters(), lr=1e-2, amsgrad=True)),
    "SGD momentum": lambda pipe: give(pipe, torch.optim.SGD(pipe.optim_parameters(), lr=0.1, momentum=0.9)),
    "Adafactor": lambda pipe: give(pipe, torch.optim.Adafactor(pipe.optim_parameters(), lr=1e-2)),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("gradients", [None, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_that_steps_parameter_by_parameter(wrap, name, gradients, update):
    same_as_masters(wrap, update, lambda pipe: train(pipe, OPTIMIZERS[name]), "tied", gradient_dtype=gradients)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    "config",
    [
        RoundPipeRunConfig(num_microbatch=1),
        RoundPipeRunConfig(num_microbatch=5, last_stage_copies=2),
        RoundPipeRunConfig(num_microbatch=3, recompute_grain="layer", keep_parameters="auto"),
    ],
    ids=["one", "copies", "kept"],
)
def test_however_a_run_is_cut(wrap, config, update):
    same_as_masters(wrap, update, train, config=config.over(MEAN))


def test_clipping_in_place_is_that_of_master_weights_and_in_the_backward_it_is_refused(wrap):
    def clipped(pipe):
        optimizer = adam(pipe)
        for seed in range(3):
            run(pipe, seed)
            assert nn.utils.clip_grad_norm_(pipe.optim_parameters(), 0.05) > 0.05
            step(pipe, optimizer)
        return numbers(pipe, optimizer)

    same_as_masters(wrap, "in_place", clipped, "tied", gradient_dtype=torch.bfloat16)
    pipe, _, run_once = pipe_and_run(wrap, gradient_dtype=torch.bfloat16)
    run_once()
    for clip in (
        lambda: nn.utils.clip_grad_norm_(pipe.optim_parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(list(pipe.optim_parameters())[:1], 1.0),
        lambda: pipe.clip_grad_norm_(1.0),
    ):
        with pytest.raises(ConfigError, match=r"no gradient is left to clip(.|\n)*update=\"in_place\""):
            clip()


def test_parameters_are_wide_on_the_host_and_nothing_else_is(wrap):
    seen = []
    model = layers_of("plain")
    model[0].register_forward_hook(lambda layer, args, output: seen.append(layer.weight.dtype))
    pipe = wrap(model, model_run_config=MEAN, update="in_backward", **FLOAT)
    optimizer = adam(pipe)
    run(pipe)
    held = {id(p): p for p in [*pipe.optim_parameters(), *model.parameters()]}
    moments = [v for p in held.values() for v in optimizer.state[p].values() if v.dim()]
    assert all(p.dtype == torch.float32 and p.grad is None for p in held.values())
    assert sum(t.nbytes for t in [*held.values(), *moments]) == 12 * sum(p.numel() for p in model.parameters())
    assert set(seen) == {torch.bfloat16}
    assert pipe._rp_engine.store.masters() == {}


def model_of(name):
    made = known_model(name).to(torch.bfloat16)
    if name == "seq2seq:t5":
        made.config.decoder_start_token_id = 0
        made.decoder.block[1].layer[2].DenseReluDense.wo.float()  # as transformers loads it
        assert made.shared.weight is made.lm_head.weight
    return made


TOKENS = torch.randint(2, 60, (5, 6), generator=torch.Generator().manual_seed(1))


def pipelines_of_the_same_bits(make, update, **options):
    """Two pipelines, with master weights and with `update`; losses, weights and moments of two steps are the same."""
    pipes, found = [], []
    for way in ("masters", update):
        torch.manual_seed(0)
        pipe = wrap_model_to_roundpipe(
            make(), lower_threshold=0, devices="virtual:2", name="same", update=way, **FLOAT, **options
        )
        learning = [p for p in pipe.optim_parameters() if p.requires_grad]
        optimizer = give(pipe, torch.optim.AdamW(learning, lr=1e-2))
        losses = []
        for _ in range(2):
            losses.append(pipe.forward_backward(input_kwargs={"input_ids": TOKENS, "labels": TOKENS}))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(pipe(input_ids=TOKENS, labels=TOKENS).loss)
        found.append(losses + numbers(pipe, optimizer))
        pipes.append(pipe)
    assert len(found[0]) > 10
    assert same_bits(*found)
    return pipes


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", ["llama", "seq2seq:t5", "mixtral"])
def test_models_of_transformers(name, update):
    pipelines_of_the_same_bits(lambda: model_of(name), update, model_run_config=MEAN)


@pytest.mark.parametrize("update", UPDATES)
def test_adapters_of_peft(update):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    pipes = pipelines_of_the_same_bits(
        lambda: peft.get_peft_model(model_of("llama"), lora, autocast_adapter_dtype=False), update
    )
    for pipe in pipes:
        assert {p.dtype for p in pipe.cut.model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("tables", ["whole", "slices"])
def test_large_tables(tables, monkeypatch):
    monkeypatch.setattr("roundpipe_runtime.optim.layer_contents.LARGE", 2**10)
    monkeypatch.setattr("roundpipe_runtime.optim.layer_contents._SMALLEST_SLICE", 2**10)
    for pipe in pipelines_of_the_same_bits(lambda: model_of("llama"), "in_backward", large_tables=tables):
        marked = pipe._rp_engine.planner.rule.mark(pipe._rp_engine._read_layers())
        assert any(layer.tables for layer in marked) == (tables == "slices")


class Breaks(nn.Module):
    """A layer whose backward raises, or is interrupted, when it is told to."""

    act = None

    def forward(self, x):
        if x.requires_grad and self.act is not None:
            x.register_hook(lambda gradient: self.act())
        return x * 1


def broken():
    return nn.Sequential(nn.Linear(4, 4), Breaks(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).bfloat16()


@pytest.mark.parametrize("act", [lambda: 1 / 0, press], ids=["exception", "Ctrl-C"])
def test_what_fails_half_way_is_named_and_a_checkpoint_is_the_way_back(wrap, tmp_path, act, python_handles_ctrl_c):
    torch.manual_seed(0)
    model = broken()
    pipe = wrap(model, model_run_config=MEAN, update="in_backward", name="same", **FLOAT)
    optimizer = adam(pipe)
    run(pipe)
    optimizer.step()
    save_checkpoint(tmp_path / "saved", pipe, optimizer=optimizer)
    before = numbers(pipe, optimizer)
    expected = run(pipe)
    optimizer.step()
    after = numbers(pipe, optimizer)
    load_checkpoint(tmp_path / "saved", pipe, optimizer=optimizer)

    calls = itertools.count(1)

    def act_late():
        """In the last microbatch, when the layers after this one have begun to step."""
        if next(calls) == MEAN.num_microbatch:
            end = time.monotonic() + 60
            while not pipe._rp_engine.store._stepped and time.monotonic() < end:
                time.sleep(0.001)
            act()

    Breaks.act = staticmethod(act_late)
    try:
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)) as raised:
            run(pipe)
    finally:
        Breaks.act = None
    assert "Load the last checkpoint" in "".join(raised.value.__notes__)
    for use in (lambda: run(pipe), lambda: save_checkpoint(tmp_path / "broken", pipe, optimizer=optimizer)):
        with pytest.raises(StageError, match=r"had stepped layers \d to 4(.|\n)*load_checkpoint"):
            use()
    assert not (tmp_path / "broken").exists()
    load_checkpoint(tmp_path / "saved", pipe, optimizer=optimizer)
    assert same_bits(numbers(pipe, optimizer), before)
    assert run(pipe) == expected
    optimizer.step()
    assert same_bits(numbers(pipe, optimizer), after)


def test_what_fails_or_is_refused_before_a_step_changes_nothing(wrap):
    """Gradients would be stepped before they are divided by the scale: of torch's scaler and of the pipeline's."""
    pipe = wrap(broken(), model_run_config=MEAN, update="in_backward", **FLOAT)
    before, optimizer = numbers(pipe), adam(pipe)
    with pytest.raises(ZeroDivisionError):
        run(pipe, loss_fn=lambda outputs, labels: 1 / 0)
    for scaler in (GradScaler(), torch.amp.GradScaler("cpu")):
        with pytest.raises(ConfigError, match="could not divide gradients by its scale"):
            run(pipe, loss_fn=lambda outputs, y, s=scaler: s.scale(mse(outputs, y)))
    inputs, labels = batch(6)
    with pytest.raises(StageError, match="updates parameters only in forward_backward"):
        mse(pipe(inputs.bfloat16()), labels).backward()
    assert same_bits(numbers(pipe), before)
    assert not optimizer.state
    run(pipe)
    assert not same_bits(numbers(pipe), before)
    assert GradScaler().scale(torch.ones(())) == 2.0**16


def pipe_and_run(wrap, make=adam, model=None, **options):
    pipe = wrap(model or layers_of("plain"), model_run_config=MEAN, **{**FLOAT, "update": "in_backward", **options})
    return pipe, make(pipe), lambda: run(pipe)


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda pipe: None, r"needs the optimizer before forward_backward(.|\n)*step_with"),
        (lambda pipe: give(pipe, Clips(pipe.optim_parameters(), lr=0.1)), "if parameters are updated one by one"),
        (lambda pipe: hooked(adam(pipe)), "has hooks around its step"),
        (
            lambda pipe: give(pipe, torch.optim.SGD(list(pipe.optim_parameters())[:2], lr=0.1)),
            "0 optimizers contain it",
        ),
    ],
    ids=["none", "not in parts", "hooks", "not held"],
)
def test_optimizers_that_cannot_step_in_the_backward(wrap, make, match):
    _, _, run = pipe_and_run(wrap, make)
    with pytest.raises(ConfigError, match=match):
        run()


def test_hooks_and_older_gradients_of_parameters_are_refused_and_gradients_of_two_calls_are_not_added(wrap):
    pipe, optimizer, run = pipe_and_run(wrap)
    first = next(iter(pipe.optim_parameters()))
    hook = first.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ConfigError, match="it has a hook"):
        run()
    hook.remove()
    first.grad = torch.ones_like(first)
    with pytest.raises(ConfigError, match=r"optimizer\.zero_grad"):
        run()
    optimizer.zero_grad()
    run()
    with pytest.raises(ConfigError, match=r"AdamW\.step\(\) was not called(.|\n)*num_microbatch"):
        run()
    optimizer.step()
    run()
    pipe.step_with(optimizer, torch.optim.SGD([first], lr=0.1))
    with pytest.raises(ConfigError, match="2 optimizers contain it"):
        run()


@pytest.mark.parametrize(
    ("options", "match"),
    [({"replicas": 2}, "replicas="), ({"host": "disk:."}, "host="), ({"update": "now"}, "must be")],
)
@pytest.mark.parametrize("update", UPDATES)
def test_options_that_do_not_go_together(wrap, options, match, update):
    """Groups, ranks and a disk have other places for master weights and gradients."""
    with pytest.raises(ConfigError, match=match):
        wrap(layers_of("plain"), **{**FLOAT, "update": update, **options})


def test_a_step_next_to_the_next_run_has_been_done(wrap):
    """`is_async=True` would read weights from before the step; an optimizer given to another pipeline is refused."""
    pipe, optimizer, run = pipe_and_run(wrap)
    run()
    with pytest.raises(ConfigError, match="has already updated the parameters"):
        pipe.step(optimizer.step, is_async=True)
    other = wrap(layers_of("plain"), **FLOAT)
    with pytest.raises(ConfigError, match=r"update=\"in_backward\""):
        other.step_with(torch.optim.AdamW(other.optim_parameters()))


def test_a_batch_without_weight_has_zero_gradients(wrap):
    def trained(pipe):
        optimizer = adam(pipe)
        for weight in (1.0, 0.0, 1.0):
            run(pipe, loss_fn=lambda outputs, y, w=weight: (mse(outputs, y) * len(y) * w, w * len(y)))
            optimizer.step()
            optimizer.zero_grad()
        return numbers(pipe, optimizer)

    same_as_masters(wrap, "in_backward", trained)


def test_parameters_of_a_loss_are_stepped_by_the_call(wrap):
    """They are in no layer: `optimizer.step()` steps them, and no layer twice."""

    def trained(pipe):
        scale = nn.Parameter(torch.ones(3))
        optimizer = give(pipe, torch.optim.AdamW([*pipe.optim_parameters(), scale], lr=1e-2))
        for _ in range(3):
            run(pipe, loss_fn=lambda outputs, y: mse(outputs * scale, y))
            optimizer.step()
            optimizer.zero_grad()
        assert relative_error(scale.detach(), torch.ones(3)) > 0.001
        return [*numbers(pipe, optimizer), scale.detach()]

    same_as_masters(wrap, "in_backward", trained)


@pytest.mark.parametrize("update", UPDATES)
def test_a_checkpoint_continues_with_the_same_bits(wrap, tmp_path, update):
    def made():
        torch.manual_seed(0)
        return wrap(small_model(dropout=0.3).bfloat16(), model_run_config=MEAN, update=update, name="same", **FLOAT)

    def train(pipe, optimizer, steps):
        for seed in steps:
            run(pipe, seed)
            step(pipe, optimizer)

    pipe = made()
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    save_checkpoint(tmp_path / "saved", pipe, optimizer=optimizer)
    train(pipe, optimizer, range(2, 4))
    expected = numbers(pipe, optimizer)
    again = made()
    other = adam(again)
    load_checkpoint(tmp_path / "saved", again, optimizer=other)
    train(again, other, range(2, 4))
    assert same_bits(numbers(again, other), expected)
    ordinary = wrap(small_model(dropout=0.3).bfloat16(), model_run_config=MEAN, **FLOAT)
    with pytest.raises(CheckpointError, match="float32"):
        load_checkpoint(tmp_path / "saved", ordinary, optimizer=adam(ordinary))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
@pytest.mark.parametrize("update", UPDATES)
def test_a_copy_computes_in_the_same_dtype(wrap, again, update):
    pipe, _, run = pipe_and_run(wrap, update=update, devices="virtual:2")
    inputs, _ = batch(6)
    run()
    made = again(pipe)
    with torch.no_grad():
        assert torch.equal(made(inputs.bfloat16()), pipe(inputs.bfloat16()))
    made.close()
    model = pipe.model
    pipe.close()
    with torch.no_grad():
        assert model(inputs).dtype == torch.float32
        plain = wrap(model, devices="virtual:2")
        assert near(plain(inputs), model(inputs))


@pytest.mark.parametrize("update", UPDATES)
def test_a_layer_that_is_unfrozen_later(wrap, update):
    def trained(pipe):
        optimizer = adam(pipe)
        for seed in range(4):
            if seed == 2:
                pipe.model[0].requires_grad_(True)
            run(pipe, seed)
            step(pipe, optimizer)
        return numbers(pipe, optimizer)

    same_as_masters(wrap, update, trained, "frozen")


def trainer(tmp_path, update, **options):
    from transformers import TrainingArguments

    torch.manual_seed(0)
    model = known_model("llama").to(torch.bfloat16)
    tokens = torch.randint(2, 60, (8, 6), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    args = TrainingArguments(
        str(tmp_path / update), per_device_train_batch_size=4, max_steps=4, report_to=[], use_cpu=True,
        **{"max_grad_norm": 0.0, "save_strategy": "no", "disable_tqdm": True, **options},
    )  # fmt: skip
    return RoundPipeTrainer(
        model, args, train_dataset=rows, devices="virtual:2", optim_dtype=torch.float32, update=update
    )


def test_the_trainer_steps_in_the_backward(tmp_path):
    found = []
    for way in ("masters", *UPDATES):
        made = trainer(tmp_path, way, save_strategy="steps", save_steps=2)
        made.train()
        found.append(numbers(made.pipeline, made.optimizer.optimizer))
        again = trainer(tmp_path, way, save_strategy="no")
        again.train(resume_from_checkpoint=str(tmp_path / way / "checkpoint-2"))
        assert same_bits(numbers(again.pipeline, again.optimizer.optimizer), found[-1])
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}], ids=lambda o: next(iter(o))
)
def test_the_trainer_refuses_what_needs_all_gradients(tmp_path, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        trainer(tmp_path, "in_backward", **options).train()
