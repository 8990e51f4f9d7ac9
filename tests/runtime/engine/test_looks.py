"""What a layer does behind the back of the engine is right, or an error: other numbers, escaped tensors, writes."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, SplitError, StageError
from roundpipe_runtime.engine.digests import check_repeated, digest_outputs
from roundpipe_runtime.engine.recomputed import doing_recompute, get_recompute_data, save_for_recompute
from tests.modules import module_of
from tests.runtime.small import all_recomputed, near_gradients

F = nn.functional
SOURCE = torch.Generator().manual_seed(1)  # held by no layer
INPUTS, LABELS = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(6, 3)


def train(model, config=None):
    config = config or RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
    return model.forward_backward((INPUTS,), label=LABELS, loss_fn=F.mse_loss, run_config=config)


def go_back(model, classic, config=None):
    if classic:
        model(INPUTS, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2)).sum().backward()
    else:
        train(model, config)


class Noisy(nn.Linear):
    """Draws from a generator that it does not hold."""

    def forward(self, x):
        out = super().forward(x)
        return out * torch.rand(out.shape, generator=SOURCE).to(out.device)


class Counting(nn.Linear):
    """Computes something else at each call, by a number that is not its own."""

    calls = 0

    def forward(self, x):
        Counting.calls += 1
        return super().forward(x) / Counting.calls


@pytest.mark.parametrize("kind", [Noisy, Counting])
@pytest.mark.parametrize("classic", [False, True])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_layer_that_does_not_repeat_itself_is_refused(pipe, kind, classic, grain):
    """Its gradient would be that of other numbers; the error names the layer, and nothing of the run is kept."""
    torch.manual_seed(0)  # with some weights and counts, the check of rows refuses the layer first
    Counting.calls = 0
    model = pipe(nn.Linear(4, 4), kind(4, 4), nn.Linear(4, 3))
    with pytest.raises(StageError, match=f"layer 1 \\({kind.__name__}\\) computed different values"):
        go_back(model, classic, all_recomputed(2, recompute_grain=grain))
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(3):  # also after an error that the caller has caught
        with pytest.raises((SplitError, StageError)):
            go_back(model, classic, all_recomputed(2, recompute_grain=grain))


def test_kept_data_makes_a_layer_repeat_itself(pipe):
    class Keeps(nn.Linear):
        def forward(self, x):
            if doing_recompute():
                (mask,) = get_recompute_data()
            else:
                mask = torch.rand(x.shape, generator=SOURCE).to(x.device)
                save_for_recompute(mask)
            return super().forward(x * mask)

    model = pipe(Keeps(4, 4), nn.Linear(4, 3))
    train(model, all_recomputed(1))
    assert model[0].weight.grad is not None


def test_a_layer_in_the_fused_stage_need_not_repeat_itself(pipe):
    """It is called once, and its gradient is that of this call: proportional to the loss."""
    model = pipe(nn.Identity(), Noisy(4, 3, bias=False))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=ModelExecutePlan([range(1)], [range(1, 2), range(1)]))
    loss = model.forward_backward((INPUTS,), loss_fn=lambda outputs, _: outputs.sum(), run_config=config)
    assert (model[1].weight.grad * model[1].weight).sum().item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_layer_that_begins_to_differ_is_found_in_a_later_run(pipe):
    """Runs 1, 2, 4, 8, ... look: a layer that differs from the third run on is refused in the fourth."""
    model = pipe(Noisy(4, 4), nn.Linear(4, 3))
    plain, Noisy.forward = Noisy.forward, nn.Linear.forward
    try:
        for _ in range(2):
            train(model, all_recomputed(1))
        Noisy.forward = plain
        train(model, all_recomputed(1))
        with pytest.raises(StageError, match="computed different values"):
            train(model, all_recomputed(1))
    finally:
        Noisy.forward = plain


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64])
def test_one_number_in_a_thousand_is_seen(dtype):
    """Masks are filled with the least number of their dtype, and a sum of two of these is infinite in it."""

    def digest(tensor):
        return digest_outputs([tensor.detach().clone().requires_grad_()])

    for width in (1, 1000):
        output = torch.randn(1000, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        other = output.clone()
        other[500] = 30.0
        check_repeated("it", digest(output), digest(output), [dtype])
        with pytest.raises(StageError, match="it computed different values"):
            check_repeated("it", digest(output), digest(other), [dtype])
    mask = torch.full((27, 27), torch.finfo(dtype).min, dtype=dtype).triu(1)
    check_repeated("it", digest(mask), digest(mask), [dtype])


class Auxiliary(nn.Linear):
    """Keeps a loss on itself, as routers do."""

    def forward(self, x):
        out = super().forward(x)
        self.auxiliary_loss = out.pow(2).mean()
        return out


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_kept_on_a_layer_is_refused_when_a_gradient_comes(pipe, microbatches):
    model = pipe(Auxiliary(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), devices="virtual:2")
    plain = copy.deepcopy(model.model)

    def loss_fn(outputs, labels):
        return F.mse_loss(outputs, labels) + model[0].auxiliary_loss.to(outputs.device)

    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean")
    with pytest.raises(StageError, match=r"layer 0 \(Auxiliary\) stored as an .*\n.*return outputs, auxiliary_loss"):
        model.forward_backward((INPUTS,), label=LABELS, loss_fn=loss_fn, run_config=config)
    F.mse_loss(plain(INPUTS), LABELS).backward()
    F.mse_loss(model(INPUTS, roundpipe_run_config=config), LABELS).backward()
    assert near_gradients(model, plain, atol=1e-6)
    assert model[0].auxiliary_loss.item() > 0
    with pytest.raises(StageError, match=r"A tensor was taken from layer 0 \(Auxiliary\) by an attribute or a hook"):
        (F.mse_loss(model(INPUTS, roundpipe_run_config=config), LABELS) + model[0].auxiliary_loss).backward()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_features_of_a_hook_may_be_read_and_are_refused_when_a_gradient_comes(pipe, number):
    """Of a layer with parameters, and of one without: the gradient of a feature would be lost."""
    model = pipe(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), devices="virtual:2")
    features = []
    model[number].register_forward_hook(lambda module, args, output: features.append(output))
    output = model(INPUTS, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    feature = features[0]
    assert torch.allclose(feature.detach().cpu(), model.model[: number + 1](INPUTS), atol=1e-6)
    with pytest.raises(StageError, match=f"layer {number} "):
        (output.sum() + feature.sum()).backward()


def test_features_of_a_fused_run_are_refused_afterwards(pipe):
    model = pipe(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 3))
    features = []
    model[1].register_forward_hook(lambda module, args, output: features.append(output * 2))
    train(model)
    assert model[0].weight.grad is not None
    for feature in features:
        with pytest.raises(StageError, match="by an attribute or a hook"):
            feature.sum().backward()


class Shifted(nn.Linear):
    delta: torch.Tensor

    def forward(self, x):
        return F.linear(x, self.weight + self.delta.to(x.device), self.bias)


@pytest.mark.parametrize("with_graph", [True, False])
@pytest.mark.parametrize("classic", [True, False])
def test_an_attribute_that_requires_a_gradient_is_refused(pipe, with_graph, classic):
    source = torch.randn(3, 4, requires_grad=True)
    model = pipe(nn.Linear(4, 4), Shifted(4, 3))
    model[1].delta = source * 2 if with_graph else source
    with pytest.raises(StageError, match=r"reads Shifted\.delta of shape .*, which requires a gradient"):
        go_back(model, classic)
    assert source.grad is None


def test_a_leaf_of_the_layers_own_making_is_accepted(pipe):
    """Forces are gradients of an energy within a forward: their leaf is nobody else's."""

    def force(self, x):
        place = x.detach().requires_grad_()
        return torch.autograd.grad((place**2 * self.weight).sum(), place, create_graph=True)[0] + x

    plain = nn.Sequential(nn.Linear(4, 4), module_of(force, weight=torch.ones(4)))
    model = pipe(*copy.deepcopy(plain), devices="virtual:2")
    plain(INPUTS).sum().backward()
    model(INPUTS).sum().backward()
    assert near_gradients(model, plain, atol=1e-6)


def count(layer):
    with torch.no_grad():
        layer.weight.mul_(0.5)


WRITES = {
    "clamp": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
    "replace": lambda layer: setattr(layer.weight, "data", layer.weight.data * 0.5),
    "count": count,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", ["classic", "fused", "evaluation"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_parameter_written_in_a_forward_is_refused(pipe, write, mode, number):
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad() if mode == "evaluation" else contextlib.nullcontext():
                write(self)
            return super().forward(x)

    layers = [nn.Linear(4, 4), nn.Linear(4, 3)]
    layers[number] = Writes(4, 4 - number)
    model = pipe(*layers)
    before = [parameter.clone() for parameter in model.parameters()]

    def run():
        if mode != "evaluation":
            return go_back(model, mode == "classic", all_recomputed(1))
        with torch.no_grad():
            return model.eval()(INPUTS, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))

    with pytest.raises(StageError, match=rf"layer {number} \(Writes\) writes Writes\.weight in its forward"):
        run()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


class Codes(nn.Module):
    """A codebook of moving averages, as VQ-VAEs have it: in training its forward makes new parameters."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(3, 4)

    def forward(self, x):
        if self.training:
            self.codes.weight = nn.Parameter(0.9 * self.codes.weight.detach() + 0.1 * x.detach()[:1])
        return x + self.codes.weight.detach().sum()


class Swapped(nn.Linear):
    """A layer that takes its bias away."""

    def forward(self, x):
        self.register_parameter("bias", None)
        return super().forward(x)


@pytest.mark.parametrize(("layer", "name"), [(Codes, r"Embedding\.weight"), (lambda: Swapped(4, 4), r"Swapped\.bias")])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_parameters_that_a_layer_replaces_are_refused(layer, name, with_gradients):
    """They would be lost with the copies of the layer; the layer keeps its own."""
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 4))
    before = list(model.named_parameters())
    pipe = RoundPipe(model, devices="virtual:2", model_run_config=RoundPipeRunConfig(num_microbatch=1))
    with torch.set_grad_enabled(with_gradients), pytest.raises(StageError, match=rf"replaces {name} in its forward"):
        pipe(torch.ones(4, 4))
    assert [(name, id(one)) for name, one in model.named_parameters()] == [(name, id(one)) for name, one in before]


@pytest.mark.parametrize("kept", [0, "auto"])
@pytest.mark.parametrize("devices", ["virtual:1:check", "virtual:2:check"])
def test_norms_of_embeddings_that_a_lookup_renews_are_refused_in_an_evaluation(pipe, devices, kept):
    """`max_norm` writes the table, or a copy of the table that stays on the device; the table of the model stays."""
    model = pipe(nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 3), devices=devices).eval()
    tokens, before = torch.arange(6), model[0].weight.clone()
    config = RoundPipeRunConfig(num_microbatch=2, keep_parameters=kept)
    with torch.no_grad(), pytest.raises(StageError, match=r"writes Embedding\.weight in its forward"):
        model(tokens, roundpipe_run_config=config)
    assert torch.equal(model[0].weight, before)


def test_a_second_backward_names_the_way():
    """Two losses of one output: together they go back, one after the other is an error with the line to type."""
    model = RoundPipe(nn.Sequential(nn.Linear(4, 3)), devices="virtual:2")
    output = model(INPUTS)
    output.sum().backward(retain_graph=True)
    with pytest.raises(StageError, match=r"freed(.|\n)*\(loss \+ other_loss\)\.backward\(\)"):
        output.pow(2).sum().backward()
    model.zero_grad()
    output, expected = model(INPUTS), model.model(INPUTS)
    (output.sum() + output.pow(2).sum()).backward()
    (expected,) = torch.autograd.grad(expected.sum() + expected.pow(2).sum(), model[0].weight)
    assert torch.allclose(model[0].weight.grad, expected, atol=1e-5)


def test_a_parameter_that_is_nan_was_not_written(pipe):
    """NaN differs from itself, and is no write."""
    model = pipe(nn.Linear(4, 3))
    nn.init.constant_(model[0].bias, torch.nan)
    assert train(model).isnan()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jacrev])
def test_a_transform_of_torch_func_is_refused_with_the_way(transform):
    """Also where only the inputs are transformed."""
    model = RoundPipe(nn.Sequential(nn.Linear(4, 3)), devices="virtual:2")

    def loss(x):
        return model(x).sum()

    with pytest.raises(StageError, match=r"torch\.autograd\.grad\(loss"):
        transform(loss, INPUTS) if transform is torch.func.vjp else transform(loss)(INPUTS)
