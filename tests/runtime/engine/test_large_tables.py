"""Embeddings of any pipeline send only the rows that a microbatch needs, where code reads nothing else of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundpipe_runtime import ConfigError, RoundPipe, RoundPipeRunConfig, StageError
from roundpipe_runtime.optim import layer_contents
from roundpipe_runtime.optim.layer_contents import scan
from tests.runtime.small import near_gradients, same_bits

ROWS, WIDTH = 201, 16
CONFIG = RoundPipeRunConfig(num_microbatch=3, loss_reduction="mean")
LABELS = torch.ones(7, 30, 2)


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(layer_contents, "LARGE", ROWS * WIDTH * 4)


def model(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, **options), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def ids():
    """Numbers of a few rows, the padding of some tables, and the last row."""
    found = torch.randint(0, 9, (7, 30), generator=torch.Generator().manual_seed(1))
    found[:, :3] = 5
    found[3, 3] = ROWS - 1
    return found


def once(made, large_tables="auto", calls=1):
    made = copy.deepcopy(made)
    pipe = RoundPipe(made, devices="virtual:2:check", large_tables=large_tables)
    for _ in range(calls):
        loss = pipe.forward_backward((ids(),), label=LABELS, loss_fn=functional.mse_loss, run_config=CONFIG)
    traffic = pipe.parameter_traffic.uploaded
    pipe.close()
    return loss, [p.grad for p in made.parameters()], [p.detach() for p in made.parameters()], traffic


def same(one, other):
    assert torch.equal(one[0], other[0])
    for found, expected in zip(one[1] + one[2], other[1] + other[2], strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.layout == expected.layout
            assert torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("padding", [None, 5, -1])
def test_rows_have_the_bits_of_the_whole_table(padding):
    made = model(padding_idx=padding)
    for calls in (1, 2):
        rows, whole = once(made, calls=calls), once(made, "whole", calls)
        same(rows, whole)
        assert whole[3] - rows[3] >= made[0].weight.nbytes  # of two visits, less the rows of three microbatches in each
    made[0].weight.requires_grad_(False)
    rows = once(made)
    same(rows, once(made, "whole"))
    assert rows[1][0] is None


@pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_embeddings_that_do_more_than_look_up_travel_whole(options):
    """So do all tables of compiled code. The options write the table, count its rows, or make gradients sparse."""
    made = model(**options)
    (first, *_) = layer_contents.TableRule(by_rows=True).mark(scan(list(made)))
    assert not first.tables
    assert layer_contents.TableRule(by_rows=True).mark(scan(list(model())))[0].tables
    rule = layer_contents.rule_for(list(model()), "slices", None, is_compiled=True)
    assert not rule.mark(scan(list(model())))[0].tables
    if "sparse" in options:  # the others are refused: a forward that writes a parameter, gradients that mix rows
        same(once(made), once(made, "whole"))


class Tied(nn.Module):
    """An embedding whose weight is also multiplied with."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)

    def forward(self, x):
        looked_up = self.embed(x)
        return functional.linear(looked_up, self.embed.weight)[..., :2] + looked_up[..., :2] * self.embed.weight.mean()


@pytest.mark.parametrize("way", ["auto", "slices"])
def test_code_that_needs_the_whole_table_gets_it(way):
    torch.manual_seed(0)
    made = nn.Sequential(Tied().double(), nn.Linear(2, 2).double())
    own = copy.deepcopy(made)
    loss = functional.mse_loss(own(ids()), LABELS.double())
    loss.backward()
    pipe = RoundPipe(made, devices="virtual:2:check", large_tables=way)
    found = pipe.forward_backward((ids(),), label=LABELS.double(), loss_fn=functional.mse_loss, run_config=CONFIG)
    torch.testing.assert_close(found, loss.detach())
    assert near_gradients(made, own, rtol=1e-10, atol=1e-12)


def test_hooks_of_a_table_see_its_whole_gradient():
    made, seen = model(), []
    expected = once(made, "whole")[1][0]
    made[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    pipe = RoundPipe(made, devices="virtual:2:check")
    pipe.forward_backward((ids(),), label=LABELS, loss_fn=functional.mse_loss, run_config=CONFIG)
    assert same_bits(seen, [expected])


def test_a_write_by_way_of_data_is_found():
    """Torch does not count it; what it does to the copy of a table would be lost."""

    class WritesData(Tied):
        def forward(self, x):
            self.embed.weight.data.mul_(2.0)
            return super().forward(x)

    with pytest.raises(StageError, match=r"writes Embedding\.weight in its forward"):
        once(nn.Sequential(WritesData(), nn.Linear(2, 2)))


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match='large_tables must be "auto", "whole" or "slices", found \'rows\''):
        RoundPipe(model(), large_tables="rows")
