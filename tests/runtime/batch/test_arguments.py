"""What forward_backward is called with: wrong arguments are errors before anything runs."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, RoundPipe, RoundPipePackedData
from roundpipe_runtime.batch.entries import FlatTree, check_labels

F = nn.functional


@pytest.fixture(scope="module")
def pipe():
    made = RoundPipe(nn.Sequential(nn.Linear(4, 4)), devices="virtual:1")
    yield made
    made.close()


@pytest.mark.parametrize("rows", [1, 4])
def test_a_tensor_is_no_tuple_of_its_rows(pipe, rows):
    """`forward_backward(x)` for `forward_backward((x,))`: with one row it would have run, on a row without its axis."""
    with pytest.raises(ConfigError, match=r"found Tensor.*\n.*forward_backward\(\(x,\), "):
        pipe.forward_backward(torch.ones(rows, 4), label=torch.ones(rows, 4), loss_fn=F.mse_loss)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "options", "message"),
    [
        # a mapping would have given its keys, packed data its microbatches
        *(((args,), None, {}, "input_args must be a tuple") for args in ({"x": X}, "x", 3, RoundPipePackedData([X]))),
        (((),), (X,), {}, r"input_kwargs must be a mapping .* found tuple"),
        (((X,),), None, {"loss_fn": None}, r"loss_fn must be a function .* found None"),  # not taken for the default
    ],
)
def test_other_arguments_are_refused(pipe, args, kwargs, options, message):
    with pytest.raises(ConfigError, match=message):
        pipe.forward_backward(*args, kwargs, label=X, **{"loss_fn": F.mse_loss, **options})


def test_labels_that_want_a_gradient_are_refused_by_their_path(pipe):
    """Nothing would flow back into them; detached ones run."""
    target = torch.ones(2, 4, requires_grad=True)

    def loss_fn(outputs, label):
        return F.mse_loss(outputs, label["soft"][0])

    with pytest.raises(ConfigError, match=r"label\['soft'\]\[0\] requires a gradient"):
        pipe.forward_backward((torch.ones(2, 4),), label={"soft": [target]}, loss_fn=loss_fn)
    pipe.forward_backward((torch.ones(2, 4),), label={"soft": [target.detach()]}, loss_fn=loss_fn)
    assert pipe[0].weight.grad is not None


def test_packed_labels_that_require_a_gradient_name_the_block_for_a_teacher():
    """They are outputs of another pipeline, which has no `detach`."""
    packed = RoundPipePackedData([torch.ones(2, requires_grad=True), torch.ones(1)])
    with pytest.raises(ConfigError, match=r"with torch.no_grad\(\): label = teacher\(x\)"):
        check_labels(FlatTree.of(packed, "label"))
