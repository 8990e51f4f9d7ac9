"""A batch is flattened once per call, however many microbatches it is split into."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node, tree_unflatten

from roundpipe_runtime import RoundPipe, RoundPipePackedData, RoundPipeRunConfig
from roundpipe_runtime.batch.entries import FlatBatch
from roundpipe_runtime.batch.splitting import split, split_flat
from tests.runtime.small import without_row_check

FLATTENED = []


class Batch:
    """A batch that notes each time that it is flattened."""

    def __init__(self, logits, hidden_states):
        self.logits, self.hidden_states = logits, hidden_states


def flatten(batch):
    FLATTENED.append(batch)
    return [batch.logits, batch.hidden_states], None


register_pytree_node(Batch, flatten, lambda children, context: Batch(*children))


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch):
        return self.linear(batch.logits) + batch.hidden_states.sum(1, keepdim=True)


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_the_batch_is_flattened_for_its_leaves_and_for_its_structure(microbatches):
    torch.manual_seed(0)
    layer, batch, labels = Reads(), Batch(torch.randn(8, 3), torch.randn(8, 4)), torch.randn(8, 2)
    expected = torch.autograd.grad(nn.functional.mse_loss(layer(batch), labels), [*layer.parameters()])
    FLATTENED.clear()
    pipe = without_row_check(RoundPipe(nn.Sequential(layer), devices="virtual:2"))
    config = RoundPipeRunConfig(num_microbatch=microbatches, loss_reduction="mean")
    pipe.forward_backward((batch,), label=labels, loss_fn=nn.functional.mse_loss, run_config=config)
    assert [obj is batch for obj in FLATTENED] == [True, True]
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_leaves_of_microbatches_are_those_of_the_split_trees():
    x, packed = torch.arange(4), RoundPipePackedData([(torch.zeros(2), 1), (torch.ones(2), 1)], rows=[2, 2])
    halves = {"split_input": lambda args, kwargs, count: ([(part,) for part in args[0].chunk(2)], [{}, {}])}
    for args, options in (((x, 3), {}), ((x,), halves), ((x, packed), {})):
        trees = split(args, {}, x, 2, **options)
        flat = split_flat(FlatBatch.of(args, {}, x), 2, **options)
        assert [part.rows for part in flat] == [part.rows for part in trees] == [2, 2]
        for part, tree in zip(flat, trees, strict=True):
            found = tree_unflatten(part.inputs, part.spec)
            torch.testing.assert_close(found, (tree.args, tree.kwargs))
            torch.testing.assert_close(tree_unflatten(part.labels, part.label_spec), tree.label)
            assert not any(isinstance(leaf, tuple) for leaf in part.inputs)
