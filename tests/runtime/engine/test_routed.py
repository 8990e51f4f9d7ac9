"""Experts are uploaded when a token was routed to them: the same bits as without, and as the plain model."""

import contextlib

import pytest
import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig, Timeline, VirtualDevice
from roundpipe_runtime.engine.parameters import partial_table
from roundpipe_runtime.engine.parameters.partial_table import find_groups
from roundpipe_runtime.optim.layer_contents import scan
from tests.modules import module_class
from tests.runtime.small import assert_same_gradients, gradients, without_row_check

F = nn.functional
WIDTH, EXPERTS = 16, 8


# routes each row to the two experts whose numbers stand in its first two entries
Gate = module_class("Gate", lambda self, x: x[:, :2].detach().abs().long() % EXPERTS)


class ByRow(nn.Module):
    """Experts in one parameter, which are read in a loop over those that were hit."""

    def __init__(self):
        super().__init__()
        self.gate, self.weight = Gate(), nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x):
        return x + torch.tanh(self.sum_of_experts(x))

    def sum_of_experts(self, x):
        found, ids = x * 0, self.gate(x)
        for expert in ids.unique():
            rows = (ids == expert).any(1).nonzero()[:, 0]
            found = found.index_add(0, rows, self.expert(expert, x[rows]))
        return found

    def expert(self, number, x):
        return F.linear(x, self.weight[number])


class Gathered(ByRow):
    """Experts in one parameter, of which each row takes its own."""

    def sum_of_experts(self, x):
        return torch.einsum("rkoi,ri->ro", self.weight[self.gate(x)], x)


class Grouped(ByRow):
    """Experts in one parameter, which groups of rows are multiplied with."""

    def sum_of_experts(self, x):
        ids, order = self.gate(x)[:, 0].sort()
        ends = torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)
        return F.grouped_mm(x[order], self.weight.transpose(-2, -1), offs=ends)[order.argsort()]


class Dense(ByRow):
    """All experts compute, and those that were hit count: a mask hides the others in the forward."""

    def sum_of_experts(self, x):
        every = torch.einsum("eoi,ri->reo", self.weight, x)
        return torch.where(F.one_hot(self.gate(x), EXPERTS).any(1)[..., None], every, 0).sum(1)


class Listed(ByRow):
    """Experts in a list, of which those that were hit are called."""

    def __init__(self):
        nn.Module.__init__(self)
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(EXPERTS))

    def expert(self, number, x):
        return self.experts[int(number)](x)


class Keyed(Listed):
    """Experts in a list, of which each has its two matrices by name."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})
            for _ in range(EXPERTS)
        )

    def expert(self, number, x):
        return self.experts[int(number)]["down"](torch.tanh(self.experts[int(number)]["up"](x)))


class Named(Listed):
    """Experts in a list of parameters."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(EXPERTS))

    def expert(self, number, x):
        return F.linear(x, self.experts[int(number)])


KINDS = [ByRow, Gathered, Grouped, Listed, Keyed, Named]


@pytest.fixture(autouse=True)
def small_experts_count(monkeypatch):
    monkeypatch.setattr(partial_table, "LEAST_BYTES", 0)


def rows_to(*experts, rows=6, seed=1):
    torch.manual_seed(seed)
    x = torch.rand(rows, WIDTH) / 2
    x[:, :2] = torch.tensor([[float(experts[(row + k) % len(experts)]) for k in range(2)] for row in range(rows)])
    return x


class Passing(nn.Module):
    """Stands before experts, and leaves the entries that route as they are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.cat([x[:, :2], (x * self.scale)[:, 2:]], 1)


def model_of(kind, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Passing(), kind(), nn.Linear(WIDTH, 3))


def squares(outputs, labels):
    return F.mse_loss(outputs, labels.to(outputs.dtype))


def go(pipe, x, width=3):
    return pipe.forward_backward((x,), label=torch.ones(len(x), width), loss_fn=squares)


def pipe_of(model, devices="virtual:2:check", experts="routed", **options):
    options = {"num_microbatch": 2, "loss_reduction": "mean", **options}
    dtype = options.pop("optim_dtype", None)
    config = RoundPipeRunConfig(upload_experts=experts, **options)
    return RoundPipe(model, devices=devices, optim_dtype=dtype, model_run_config=config)


def steps_of(model, batches, *, is_async=False, lr=0.05, tries_rows=True, **options):
    """Losses, and all values after some steps; gradients of the last run; bytes that went up in each run."""
    pipe = pipe_of(model, **options) if tries_rows else without_row_check(pipe_of(model, **options))
    optimizer = torch.optim.AdamW(pipe.optim_parameters(), lr=lr, weight_decay=0.1)
    losses, uploaded = [], []
    for x in batches:
        before = pipe.parameter_traffic
        labels = torch.linspace(-1, 1, 3 * len(x)).reshape(len(x), 3)
        losses.append(pipe.forward_backward((x,), label=labels, loss_fn=squares))
        after = pipe.parameter_traffic
        uploaded.append((after.uploaded - before.uploaded, after.skipped - before.skipped))
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    pipe.synchronize()
    pipe.close()
    return [*losses, *(value.clone() for value in model.state_dict().values())], uploaded


def like_the_plain_model(kind, x):
    """Three runs, of which the third proves nothing, have the gradients of the plain model; the bytes it skipped."""
    plain, model = model_of(kind), model_of(kind)
    expected = squares(plain(x), torch.ones(len(x), 3))
    expected.backward()
    pipe, skipped = pipe_of(model, num_microbatch=1), []
    for _ in range(3):
        pipe.zero_grad()
        assert torch.equal(go(pipe, x), expected.detach())
        assert_same_gradients(gradients(model), gradients(plain))
        skipped.append(pipe.parameter_traffic.skipped)
    return skipped


def both_ways(make, batches, devices="virtual:2:check", run=go, **options):
    """Runs have the same bits, whether all experts are uploaded or those that were hit; the second pipeline."""
    found = []
    for experts in ("all", "routed"):
        model = make()
        pipe = pipe_of(model, devices, experts, **options)
        found.append([])
        for x in batches:
            given = x.clone().requires_grad_()
            run(pipe, given)
            found[-1].append(given.grad)
        found[-1] += gradients(model).values()
    assert all(one is other or torch.equal(one, other) for one, other in zip(*found, strict=True))
    return pipe


BATCHES = [rows_to(1, 3), rows_to(0), rows_to(2, 5, 7), rows_to(3, 1), rows_to(6, rows=5), rows_to(4, 5), rows_to(1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_async", [False, True, "exact"])
def test_a_training_has_the_same_bits_and_uploads_less(kind, is_async):
    """Losses and weights after AdamW with weight decay, which treats a zero and no gradient differently."""
    plain, most = steps_of(model_of(kind), BATCHES, is_async=is_async, experts="all")
    found, some = steps_of(model_of(kind), BATCHES, is_async=is_async)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    assert [skipped for _, skipped in most] == [0] * len(BATCHES)
    for number in (2, 4, 5, 6):  # not those that prove anything: the first, second and fourth
        uploaded, skipped = some[number]
        assert uploaded < 0.6 * (uploaded + skipped)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_plain_model(kind):
    """Of experts without tokens they are zeros in one parameter, and none of modules that were not called."""
    assert like_the_plain_model(kind, rows_to(2, 6, rows=4))[-1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_no_token_reaches_an_expert_of(kind):
    class Empty(kind):
        def forward(self, x):
            return x + super().forward(x[:0]).sum()

    _, before, after = like_the_plain_model(Empty, rows_to(1, 2, rows=4))
    weights = sum(parameter.nbytes for parameter in model_of(Empty)[1].parameters())
    assert (after - before) % weights == 0 < after - before


class Kernel(ByRow):
    def forward(self, x):
        if type(self.weight) is not nn.Parameter:
            raise TypeError("expected a parameter")
        return super().forward(x)


@pytest.mark.parametrize("kind", [Dense, Kernel])
def test_a_layer_that_reads_all_experts_gets_all(kind):
    """A mask hides NaN in the forward only. Code that refuses a stand-in, such as a kernel in C++, is called again."""
    assert like_the_plain_model(kind, rows_to(1, 2, rows=4)) == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_add_up_over_runs_with_other_experts(kind):
    both_ways(lambda: model_of(kind), (*BATCHES[:3], rows_to(0, 7), rows_to(2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", ["virtual:1:check", "virtual:3:check"])
def test_backward_later_and_recomputed_layers_have_the_same_bits(kind, devices):
    def run(pipe, x):
        pipe(x).square().sum().backward()

    both_ways(lambda: model_of(kind), BATCHES[:5], devices, run, recompute_grain="layer")


def test_several_copies_of_the_last_stage_have_the_same_bits():
    def run(pipe, x):
        go(pipe, x, WIDTH)

    both_ways(lambda: model_of(ByRow)[:2], BATCHES[:5], "virtual:3:check", run, num_microbatch=4, last_stage_copies=3)


@pytest.mark.parametrize("kind", [ByRow, Gathered, Listed])
def test_bfloat16_with_float32_master_weights(kind):
    batches = [x.bfloat16() for x in BATCHES]
    runs = [
        steps_of(model_of(kind).bfloat16(), batches, experts=experts, optim_dtype=torch.float32)
        for experts in ("all", "routed")
    ]
    assert all(torch.equal(one, other) for one, other in zip(runs[0][0], runs[1][0], strict=True))
    assert runs[1][1][-1][1] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_experts_have_no_gradient_and_may_stay(kind):
    found = []
    for experts in ("all", "routed"):
        model = model_of(kind)
        for parameter in model[1].parameters():
            parameter.requires_grad_(False)
        kept = {"devices": "virtual:1:check", "keep_parameters": 1.0, "tries_rows": False}
        values, uploaded = steps_of(model, BATCHES + BATCHES[:3], experts=experts, **kept)
        assert all(parameter.grad is None for parameter in model[1].parameters())
        found.append((values, uploaded))
    (plain, _), (values, uploaded) = found
    assert all(torch.equal(one, other) for one, other in zip(plain, values, strict=True))
    frozen = sum(parameter.nbytes for parameter in model_of(kind)[1].parameters())
    trained = sum(parameter.nbytes for parameter in model_of(kind).parameters()) - frozen
    assert uploaded[-1] == (trained, 0)  # by then each expert was hit


def test_layers_that_share_experts_that_stay_have_the_gradients_of_both():
    class Shifted(Passing):
        def forward(self, x):
            return torch.cat([(x[:, :2] + 3) % EXPERTS, (x * self.scale)[:, 2:]], 1)

    class Kept(ByRow):
        def forward(self, x):
            return torch.cat([x[:, :2], super().forward(x)[:, 2:]], 1)

    def make():
        torch.manual_seed(0)
        layers = [Passing(), Kept(), Shifted(), Kept(), nn.Linear(WIDTH, 3)]
        layers[3].weight = layers[1].weight
        return nn.Sequential(*layers)

    def run(pipe, x):
        go(without_row_check(pipe), x)

    batches = rows_to(1), rows_to(1), rows_to(2), rows_to(2), rows_to(7)  # without a step: the table stays
    pipe = both_ways(make, batches, "virtual:1:check", run, keep_parameters=1.0)
    assert pipe.parameter_traffic.skipped > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_half_way_leaves_nothing_behind(kind):
    class Failing(nn.Linear):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("half-way")
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Passing(), kind(), Failing(WIDTH, 3))
    held = {name: id(parameter) for name, parameter in model.named_parameters()}
    pipe = pipe_of(model, num_microbatch=1)
    for fails in (False, True, False, True, False):
        pipe.zero_grad()
        model[2].fails = fails
        with pytest.raises(ValueError, match="half-way") if fails else contextlib.nullcontext():
            go(pipe, rows_to(5))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == held
    assert all(type(module._parameters) is dict for module in model.modules())
    plain = model_of(kind)
    plain.load_state_dict(model.state_dict())
    squares(plain(rows_to(5)), torch.ones(6, 3)).backward()
    assert_same_gradients(gradients(model), gradients(plain))


@pytest.mark.parametrize(("experts", "is_on_demand"), [((0, 1, 2, 3, 4, 5), True), ((0, 1, 2, 3, 4, 5, 6), False)])
def test_a_run_like_one_that_needed_most_experts_uploads_all_ahead(experts, is_on_demand):
    """Six of eight are three quarters, which is on demand; seven are not. A batch of another size is looked at anew."""
    pipe = pipe_of(model_of(ByRow), num_microbatch=1)

    def skipped(x):
        before = pipe.parameter_traffic.skipped
        go(pipe, x)
        return pipe.parameter_traffic.skipped - before

    many = rows_to(*experts, rows=14)
    assert [skipped(many) > 0 for _ in range(3)] == [True, True, is_on_demand]
    assert skipped(rows_to(2, rows=1)) > 0


def test_groups_are_named_by_their_place_and_have_enough_bytes_and_modules_of_one_kind(monkeypatch):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.listed = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in "ab")
            self.keyed = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in "ab")
            self.named = nn.ModuleDict({"expert_0": nn.Linear(4, 8), "expert_1": nn.Linear(4, 8)})
            self.rows = nn.Parameter(torch.ones(3, 2, 2))
            self.others = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(3, 3, bias=False)])
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

    found = {name: len(members) for name, members in find_groups(scan([Layer()])[0]).items()}
    listed = {f"listed.*.{place}.{name}": 2 for place in (0, 1) for name in ("weight", "bias")}
    keyed = {f"keyed.*.{key}.{name}": 2 for key in ("up", "down") for name in ("weight", "bias")}
    assert found == {"rows": 1, "named.*.weight": 2, "named.*.bias": 2, **listed, **keyed}
    for least, names in ((EXPERTS * WIDTH * WIDTH * 4, ["weight"]), (EXPERTS * WIDTH * WIDTH * 4 + 1, [])):
        monkeypatch.setattr(partial_table, "LEAST_BYTES", least)
        assert list(find_groups(scan([ByRow()])[0])) == names


def test_a_timeline_states_the_bytes():
    """Memory is that of all experts, so what is planned fits whatever tokens are routed to."""
    model = model_of(ByRow)
    device = VirtualDevice("virtual:0", memory_limit=10**6, check=True)
    pipe = pipe_of(model, [device], num_microbatch=1)
    for _ in range(3):
        with Timeline() as timeline, torch.no_grad():
            pipe(rows_to(3))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    row = model[1].weight.nbytes // EXPERTS
    assert (timeline.uploaded, timeline.skipped) == (whole - 7 * row, 7 * row)
    assert timeline.to_chrome_trace()["otherData"]["skipped"] == 7 * row
    assert device.peak >= whole
    device.close()
