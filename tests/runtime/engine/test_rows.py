"""Layers that do not compute each row by itself are refused by name, whatever their classes state."""

import contextlib
import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, RoundPipeWarning, SplitError, TensorChunkSpec, WeightedLoss
from roundpipe_runtime.engine.digests import mixes_rows, pair_leaves
from roundpipe_runtime.engine.rows import with_shared
from tests.flatten.nodes import Dense
from tests.modules import module_of
from tests.runtime.small import near_gradients, trains_like
from yobx_flatten.core.compare import tolerance

F = nn.functional
X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))


def encoder(**options):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, **options) for _ in range(2)])


class Recurrent(nn.RNN):
    def forward(self, x):
        return super().forward(x)[0]


def call(pipe, way, inputs=X, num_microbatch=2, **options):
    config = RoundPipeRunConfig(num_microbatch=num_microbatch, loss_reduction="mean", **options)
    if way == "loss":
        return pipe.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=config)
    with torch.set_grad_enabled(way == "gradients"):
        return pipe(inputs, roundpipe_run_config=config)


@pytest.mark.parametrize(("replicas", "num_microbatch"), [(None, 2), (1, 2), (2, 2), (2, 1), (9, 1)])
@pytest.mark.parametrize("way", ["loss", "gradients", "no gradients"])
@pytest.mark.parametrize("make", [encoder, lambda: nn.Sequential(nn.Linear(8, 8), Recurrent(8, 8))])
def test_a_sequence_that_is_cut_is_refused(make, way, replicas, num_microbatch):
    if way == "no gradients" and num_microbatch == 1:
        pytest.skip("an evaluation runs as one group, so nothing is cut")
    pipe = RoundPipe(make(), devices="virtual:2:check", replicas=replicas)
    before = torch.get_rng_state()
    with pytest.raises(SplitError, match=r"(?s)batch_first=False.*split_input=\{.args\[0\].: TensorChunkSpec\(1\)\}"):
        call(pipe, way, num_microbatch=num_microbatch)
    assert all(module.training for module in pipe.modules())
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("replicas", [None, 2])
def test_the_rule_of_the_error_gives_the_numbers_of_the_plain_layers(replicas):
    plain = encoder().eval()
    pipe = RoundPipe(copy.deepcopy(plain), devices="virtual:2:check", replicas=replicas)
    rules = {"split_input": {"args[0]": TensorChunkSpec(1)}, "merge_output": TensorChunkSpec(1)}
    with torch.no_grad():
        assert torch.allclose(call(pipe, "no gradients", **rules), plain(X), atol=1e-5)
    call(pipe, "gradients", **rules).square().sum().backward()
    plain(X).square().sum().backward()
    assert near_gradients(pipe, plain, rtol=1e-4, atol=1e-4)


LABELS = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.linear, self.after = nn.Linear(8, 8), after

    def forward(self, x):
        return self.after(self, self.linear(x))


def sequence_first():
    """Has the batch on axis 1, with an attention of its own that says nothing about it."""

    def forward(self, x):
        q, k, v = self.qkv(x.transpose(0, 1)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0).transpose(0, 1)

    return module_of(forward, qkv=nn.Linear(8, 24)).train()


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class Average(nn.Module):
    """Takes a moving average of all rows away, which stands in an attribute, in a list, or on an object."""

    def __init__(self, where):
        super().__init__()
        self.linear, self.where = nn.Linear(8, 8), where
        self.average, self.held, self.state = torch.zeros(8), [torch.zeros(8)], Layer(None)
        self.state.average = torch.zeros(8)

    def forward(self, x):
        x, mean = self.linear(x), x.detach().mean((0, 1))
        if self.where == "attribute":
            self.average = average = 0.9 * self.average + 0.1 * mean
        elif self.where == "list":
            average = self.held[0].mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.state.average = average = 0.9 * self.state.average + 0.1 * mean
        return x - average


MIXES = {
    "batch on axis 1": sequence_first,
    "attention of torch": lambda: Attends(8, 2, 0.1),
    "encoder of torch": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "mean of the batch": lambda: Layer(lambda layer, x: x - x.mean(0)),
    "mean of the batch in training": lambda: Layer(lambda layer, x: x - x.mean(0) if layer.training else x),
    "norm of the batch": lambda: Layer(lambda layer, x: F.batch_norm(x.flatten(1), None, None, training=True)),
    "sorted": lambda: Layer(lambda layer, x: x.sort(0).values),
    "rolled": lambda: Layer(lambda layer, x: x.roll(1, 0)),
    "added up": lambda: Layer(lambda layer, x: x.cumsum(0)),
    "largest rows": lambda: Layer(lambda layer, x: x * (x >= x.topk(2, 0).values[-1])),
    "permuted": lambda: Layer(lambda layer, x: x + x[torch.randperm(len(x))]),
    "by the number of rows": lambda: Layer(lambda layer, x: x / len(x)),
    "by the place of a row": lambda: Layer(lambda layer, x: x + torch.arange(len(x)).to(x)[:, None, None]),
    "one position": lambda: Layer(lambda layer, x: torch.cat([x[:, :1] - x[:, :1].mean(0), x[:, 1:]], 1)),
    "with noise of NumPy": lambda: Layer(
        lambda layer, x: x + torch.from_numpy(np.random.rand(*x.shape)).to(x) - x.mean(0)
    ),
    "average in an attribute": lambda: Average("attribute"),
    "average in a list": lambda: Average("list"),
    "average of another module": lambda: Average("module"),
}


def pipeline(layer):
    torch.manual_seed(0)
    return RoundPipe(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), layer, nn.Tanh()), devices="virtual:2:check")


@pytest.mark.parametrize("way", ["loss", "gradients", "no gradients"])
@pytest.mark.parametrize("kind", MIXES)
def test_a_layer_that_mixes_rows_is_refused_by_its_place(kind, way):
    layer = MIXES[kind]()
    pipe = pipeline(layer)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with pytest.raises(SplitError, match=rf"(?s)layer 2 \({type(layer).__name__}\) mixes.*num_microbatch=1"):
        call(pipe, way)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert all(module.training for module in pipe.modules())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), str(np.random.get_state()))


@pytest.mark.parametrize("kind", ["mean of the batch", "rolled", "added up", "encoder of torch"])
def test_one_microbatch_gives_the_numbers_of_the_plain_layers(kind):
    plain = nn.Sequential(nn.Linear(8, 8), MIXES[kind]()).eval()
    pipe = RoundPipe(copy.deepcopy(plain), devices="virtual:2:check")
    assert trains_like(pipe, plain, F.mse_loss, X, LABELS, config=RoundPipeRunConfig(num_microbatch=1), atol=1e-6)


def experts():
    """Sends each token to the expert that it chooses, and returns what the load of all of them is."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        chosen, made = self.choice(tokens).argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            made[chosen == number] = expert(tokens[chosen == number])
        return made.reshape(x.shape)

    each = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    return module_of(forward, choice=nn.Linear(8, 4), experts=each).train()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls / 100)


class Draws(nn.Module):
    """Draws a number for each row in every way that there is."""

    def forward(self, x):
        own = [np.random.rand(len(x)), [random.random() for _ in range(len(x))], torch.rand(len(x))]
        factors = sum(torch.as_tensor(one, dtype=x.dtype) for one in own).to(x.device)
        return F.dropout(x * factors[:, None, None], 0.5, self.training)


APART = {
    "experts": experts,
    "batch norm of torch": lambda: nn.BatchNorm1d(4),
    "norm of rows": lambda: nn.GroupNorm(2, 4),
    "buffers": Counts,
    "random": Draws,
    "flat tokens": lambda: Layer(lambda layer, x: x.flatten(0, 1).softmax(-1).reshape(x.shape)),
    "fixed mask": lambda: Layer(lambda layer, x: x.masked_fill(x.new_ones(4, 1).tril(-2).bool(), -torch.inf).tanh()),
}


@pytest.mark.filterwarnings("ignore:The outputs of a layer depend")
@pytest.mark.parametrize("way", ["loss", "gradients", "no gradients"])
@pytest.mark.parametrize("kind", APART)
def test_a_layer_that_computes_each_row_by_itself_runs(kind, way):
    pipe = pipeline(APART[kind]())
    messages = {"buffers": "The outputs of a layer depend", "batch norm of torch": r"Layer . \(\w+\) normalizes each"}
    with (
        pytest.warns(RoundPipeWarning, match=messages[kind]) if kind in messages else contextlib.nullcontext() as found
    ):
        call(pipe, way)
    assert found is None or found[0].filename == __file__
    with warnings.catch_warnings(action="error"):  # at the first call only
        call(pipe, way)


def test_batch_norms_have_the_statistics_of_each_microbatch_and_of_the_batch_if_it_is_one():
    for number in (2, 1):
        plain = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh())
        pipe = RoundPipe(copy.deepcopy(plain), devices="virtual:2:check")
        warns = pytest.warns(RoundPipeWarning, match=r"Layer 1 \(BatchNorm1d\) normalizes each microbatch")
        with warns if number == 2 else warnings.catch_warnings(action="error"):
            loss = call(pipe, "loss", X[:, 0], num_microbatch=number)
        wanted = sum(plain(part).square().mean() for part in X[:, 0].chunk(number)) / number
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
        assert near_gradients(pipe, plain, atol=1e-6)
        torch.testing.assert_close(pipe[1].running_var, plain[1].running_var)


class Backward(torch.autograd.Function):
    """Computes each row by itself, with another backward."""

    @staticmethod
    def forward(ctx, x, back):
        ctx.back = back
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None


def looks_up(made):
    def forward(self, x):
        return self.made((x > 0).long().flatten(0, 1)).reshape(*x.shape[:2], -1)[..., :8]

    return module_of(forward, made=made).train()


def backward(back):
    return lambda: Layer(lambda layer, x: Backward.apply(x, back))


def hooked(back):
    return lambda: Layer(lambda layer, x: (x.register_hook(back), x)[1] if x.requires_grad else x)


MIXES_BACK = {
    "by the number of ids": lambda: looks_up(nn.Embedding(2, 8, scale_grad_by_freq=True)),
    "by the number of ids, summed": lambda: looks_up(nn.EmbeddingBag(2, 8, mode="sum", scale_grad_by_freq=True)),
    "by the norm": backward(lambda gradient: gradient / gradient.norm()),
    "by the number of rows": backward(lambda gradient: gradient / len(gradient)),
    "less the mean": backward(lambda gradient: gradient - gradient.mean(0)),
    "by the norm, in a hook": hooked(lambda gradient: gradient / gradient.norm()),
    "by the largest number": lambda: Layer(lambda layer, x: x + (x - x.detach()) * x.detach().amax()),
    "of all but the first row": lambda: Layer(lambda layer, x: torch.cat([x[:1].detach(), x[1:]])),
}
APART_BACK = {
    "a table": lambda: looks_up(nn.Embedding(2, 8)),
    "a table with padding": lambda: looks_up(nn.Embedding(2, 8, padding_idx=1)),
    "a bag": lambda: looks_up(nn.EmbeddingBag(2, 8, mode="mean")),
    "turned": backward(lambda gradient: -gradient),
    "by the norm of each row": backward(lambda gradient: F.normalize(gradient, dim=(1, 2))),
    "half, in a hook": hooked(lambda gradient: gradient / 2),
    "straight through": lambda: Layer(lambda layer, x: x + (x.round() - x).detach()),
    "stopped": lambda: Layer(lambda layer, x: x.detach()),
}


@pytest.mark.parametrize("way", ["loss", "gradients"])
@pytest.mark.parametrize("kind", MIXES_BACK)
def test_a_layer_that_mixes_rows_in_its_backward_is_refused(kind, way):
    """Outputs show nothing. One microbatch gives the gradients of the layers without a pipeline."""
    pipe = pipeline(MIXES_BACK[kind]())
    before = torch.get_rng_state()
    with pytest.raises(SplitError, match=r"(?s)the backward of layer [12] .*num_microbatch=1"):
        call(pipe, way)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert torch.equal(before, torch.get_rng_state())
    call(pipe, "no gradients")


@pytest.mark.parametrize("kind", APART_BACK)
def test_a_backward_that_keeps_rows_apart_is_that_of_the_plain_layers(kind):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), APART_BACK[kind](), nn.Linear(8, 8), nn.Tanh())
    pipe = RoundPipe(copy.deepcopy(plain), devices="virtual:2:check")
    config = RoundPipeRunConfig(num_microbatch=3)
    pipe.forward_backward(
        (X,), label=LABELS, loss_fn=lambda y, label: F.mse_loss(y, label, reduction="sum"), run_config=config
    )
    F.mse_loss(plain(X), LABELS, reduction="sum").backward()
    assert near_gradients(pipe, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tries", [0, 1, 2])
@pytest.mark.parametrize("made", [MIXES["mean of the batch"], MIXES_BACK["by the number of rows"]])
def test_a_refused_call_is_refused_again(made, tries):
    """Checks come at calls 1, 2, 4, ...; calls without gradients do not count, as a model is tried before it trains."""
    pipe = pipeline(made())
    for _ in range(tries if made in MIXES_BACK.values() else 0):
        call(pipe, "no gradients")
    for _ in range(4):
        with pytest.raises(SplitError, match="mixes rows"):
            call(pipe, "loss")


def clamp(gradient):
    return gradient.clamp(-1e-3, 1e-3)


def clamped(way):
    """Three layers, of which the second has gradients that are not proportional to those of its outputs."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    if way == "in the layer":
        made[1] = backward(clamp)()
    elif way == "before a module":
        made[1].register_full_backward_pre_hook(lambda module, given: tuple(map(clamp, given)))
    elif way == "after a module":
        made[1].register_full_backward_hook(lambda module, found, given: tuple(map(clamp, found)))
    return made


def masked_mean(y, label):
    return WeightedLoss(F.mse_loss(y, label, reduction="none")[label > -0.5].sum(), int((label > -0.5).sum()))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("way", ["in the layer", "before a module", "after a module"])
def test_clamped_gradients_are_those_of_the_mean_over_the_batch(way, number):
    """Losses are summed over microbatches and divided at the end, so gradients in between have another scale."""
    plain = clamped(way)
    pipe = RoundPipe(
        clamped(way), devices="virtual:2:check", model_run_config=RoundPipeRunConfig(num_microbatch=number)
    )
    warns = pytest.warns(RoundPipeWarning, match="not proportional")
    with warns if number > 1 else contextlib.nullcontext():
        found = pipe.forward_backward((X,), label=LABELS, loss_fn=masked_mean)
    total, weight = masked_mean(plain(X), LABELS)
    (total / weight).backward()
    assert torch.allclose(found, total / weight)
    assert near_gradients(pipe, plain, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("layer", "accepted"),
    [
        (MIXES["mean of the batch in training"], lambda pipe: (call(pipe.eval(), "no gradients"), pipe.train())),
        (
            lambda: Layer(lambda layer, x: x - x.mean(0) if x.dim() == 3 else x),
            lambda pipe: call(pipe, "no gradients", X[:, 0]),
        ),
        (MIXES["mean of the batch"], lambda pipe: call(pipe, "no gradients", X[:1])),
    ],
    ids=["another mode", "another kind of input", "one row"],
)
def test_a_call_that_shows_no_mixing_does_not_stand_for_the_next(layer, accepted):
    pipe = pipeline(layer())
    accepted(pipe)
    with pytest.raises(SplitError, match="layer 2"):
        call(pipe, "no gradients")


def test_hooks_take_tensors_of_the_batch_only_and_are_checked_for_mixing():
    pipe, outputs, gradients = pipeline(nn.Identity()), [], []
    pipe[0].register_forward_hook(lambda module, args, output: outputs.append(len(output)))
    pipe[0].register_full_backward_hook(lambda module, given, gradient: gradients.append(len(gradient[0])))
    call(pipe, "no gradients")
    assert outputs == [3, 3]
    call(pipe, "loss", X.clone().requires_grad_())
    assert gradients == [3, 3]
    pipe[0].register_forward_hook(lambda module, args, output: output - output.mean(0))
    with pytest.raises(SplitError, match="layer 0"):
        call(pipe, "loss")


@pytest.mark.filterwarnings("ignore:The outputs of a layer depend")
def test_it_changes_no_bit_of_what_follows():
    found = []
    for looks in (True, False):
        pipe = pipeline(nn.Sequential(Draws(), Counts(), nn.BatchNorm1d(4)))
        if not looks:
            pipe._rp_engine.row_check = None
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        found.append([call(pipe, "loss"), *(p.grad for p in pipe.parameters()), *pipe.buffers(), torch.rand(2)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layers_that_cannot_be_tried_are_named_when_they_run():
    """The first call of one that wants four rows at a time runs; the second one states that nothing was shown."""

    def four(layer, x):
        if len(x) % 4:
            raise ValueError("four rows, please")
        return x

    pipe = pipeline(Layer(four))
    for number in range(3):
        warns = pytest.warns(UserWarning, match=r"could not check.*four rows, please")
        with warns if number == 1 else contextlib.nullcontext():
            call(pipe, "no gradients", torch.cat([X, X[:2]]))


class Begins(nn.Module):
    """Takes the mean of the batch away, once it is told to or has been called often."""

    mixes, calls = False, 0

    def forward(self, x):
        self.calls += 1
        return x - x.mean(0) if self.mixes or self.calls > 8 else x


@pytest.mark.parametrize("way", ["loss", "gradients", "no gradients"])
@pytest.mark.parametrize("by_itself", [True, False])
def test_a_layer_that_begins_to_mix_rows_is_refused(by_itself, way):
    """When an attribute of it has changed, or at calls 2, 4, 8, ...: it is called twice in each."""
    layer = Begins()
    layer.calls = 0 if by_itself else -100
    pipe = pipeline(layer)
    for _ in range(3):
        call(pipe, way)
    layer.mixes = not by_itself
    with pytest.raises(SplitError, match="layer 2"):
        [call(pipe, way) for _ in range(5 if by_itself else 1)]


@pytest.mark.parametrize("made", [MIXES["mean of the batch"], MIXES_BACK["less the mean"]])
def test_rows_that_mix_next_to_a_list_with_an_entry_per_row_are_refused(made):
    """The outputs for parts have fewer tensors than those for all rows."""
    layers = nn.Sequential(nn.Linear(8, 8), made(), Layer(lambda layer, x: {"whole": x, "each": list(x)}))
    pipe = RoundPipe(layers, devices="virtual:2:check")
    with pytest.raises(SplitError, match=r"(?s)layer 1 .*num_microbatch=1"):
        pipe.forward_backward((X,), label=LABELS, loss_fn=lambda y, label: F.mse_loss(y["whole"], label))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_lists_with_an_entry_per_row_are_compared_entry_by_entry():
    x = torch.arange(12.0).reshape(3, 4)
    rows = [x[0], x[1, :2], x[2]]
    assert not mixes_rows({"a": rows}, [{"a": rows[:2]}, {"a": rows[2:]}], [2, 1])
    assert mixes_rows({"a": rows}, [{"a": rows[:2]}, {"a": [x[2] + 1]}], [2, 1])
    others = {"a": rows[:1], "n": torch.nested.nested_tensor([x[0]])}  # has no shape
    assert mixes_rows({**others, "b": x}, [{**others, "b": x[:2]}, {**others, "b": x[2:] + 1}], [2, 1])
    whole, *parts = (Dense(part, x[0], activation=str(len(part))) for part in (x, x[:2], x[2:] + 1))
    assert mixes_rows(whole, parts, [2, 1])  # static parts differ
    assert pair_leaves([[*x], [*x[:2]], [*x[2:]]], [], 3)
    assert not pair_leaves([[*x], [*x[:2]], [*x[2:, :3]]], [], 3)  # padded to the longest row: gradients differ


def test_noise_is_not_taken_for_mixing_after_rounding_has_changed_a_choice():
    """The choice differs for the first three rows; the noise is less than rows may differ by, and more than a tenth."""
    generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        y = x * torch.where((torch.arange(len(x)) == 0) & (len(x) == 3) & torch.equal(x[0], X[0, 0]), 1.1, 1.0)[:, None]
        return y + 1e-4 * y.abs().max() * torch.rand(y.shape, generator=generator)

    pipe = RoundPipe(nn.Sequential(module_of(forward)), devices="virtual:2:check")
    call(pipe, "no gradients", X[:, 0].repeat(2, 1)[:9], num_microbatch=3)


def test_rows_that_mix_a_little_are_refused_where_other_rows_differ_less():
    """Five rows are tried as three, and then as two, whose places differ by half as much."""
    x = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    x /= x.amax(1, keepdim=True)
    layers = nn.Sequential(module_of(lambda self, x: x + 7e-4 * torch.arange(len(x))[:, None]))
    assert [mixes_rows(layers(x[:n]), [layers(x[: n - 1]), layers(x[n - 1 : n])], [n - 1, 1]) for n in (3, 2)] == [1, 0]
    pipe = RoundPipe(layers, devices="virtual:2:check")
    with pytest.raises(SplitError, match=r"(?s)layer 0 .*num_microbatch=1"):
        call(pipe, "no gradients", x)


def test_rounding_that_many_layers_enlarge_is_not_taken_for_mixing():
    """What float32 rounds through 40 layers is more than sums of losses may differ by, and less than rows may."""
    largest = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(40)))
        for parameter in layers.parameters():
            nn.init.normal_(parameter, std=0.25)
        x = torch.randn(3, 64)
        with torch.no_grad():
            whole, exact = layers(x), layers.double()(x.double())
        others = exact.float()  # as of kernels that round otherwise
        largest = max(largest, ((whole - exact).abs().max() / whole.abs().max()).item())
        assert not mixes_rows([whole], [[others[:2]], [others[2:]]], [2, 1])
        assert mixes_rows([whole], [[others[:2] + 0.01], [others[2:]]], [2, 1])
    assert largest > tolerance("sums", torch.float32)


def test_what_all_rows_share_is_not_known_of_a_whole_batch():
    """Also next to a switch, which has no rows: all tensors of a batch of three rows would be taken for shared."""
    some, table = torch.zeros(3, 2), torch.zeros(3)
    cut = ["cut", "cut", "cut"]
    assert with_shared(cut, [some, table, True], [torch.zeros(5, 2), table, True]) == ["cut", table, "cut"]
    assert with_shared(cut, [some, table, True], [some, table, True]) == cut
    assert with_shared(cut[:2], [some, table], [torch.zeros(5, 2), table, table]) == cut[:2]
