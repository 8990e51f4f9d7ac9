"""Losses that choose rows by values: another loss for each split, which the first rows of a batch need not show."""

import copy

import pytest
import torch
from torch import nn

from roundpipe_runtime import LossError, RoundPipe, RoundPipeRunConfig, WeightedLoss
from tests.runtime.small import MEAN, near, trains_like

F = nn.functional
ROWS = 9


def each(outputs, labels):
    return F.cross_entropy(outputs, labels, reduction="none")


def balanced(outputs, labels):
    weights = 1 / torch.bincount(labels, minlength=4).clamp(min=1)
    return (each(outputs, labels) * weights[labels]).sum() / weights[labels].sum()


def in_a_loop(outputs, labels):
    total, number = outputs.sum() * 0, 0
    for loss, label in zip(each(outputs, labels), labels, strict=True):
        if label == 1:
            total, number = total + loss, number + 1
    return total / max(number, 1)


WRONG = {
    "of one class": lambda out, y: each(out, y)[y == 1].mean(),
    "of one class or zero": lambda out, y: each(out, y)[y == 2].sum() / (y == 2).sum().clamp(min=1),
    "by product": lambda out, y: (each(out, y) * (y == 1)).sum() / (y == 1).float().sum().clamp(min=1e-6),
    "with a term of one class": lambda out, y: each(out, y).mean() + (3 if (y == 2).any() else 0),
    "of confident rows": lambda out, y: each(out, y)[out.detach().softmax(-1).amax(-1) > 0.35].mean(),
    "balanced": balanced,
    "in a loop": in_a_loop,
    "counted": lambda out, y: F.cross_entropy(out, y, reduction="sum") / (y != -100).sum().item(),
    "by a limit": lambda out, y: each(out, y).mean() * (2 if y.max().item() > 2 else 1),
    "of exchanged rows": lambda out, y: F.mse_loss(out, out[torch.randperm(len(out))].detach()),
}
LABELS = [1, 1, 1, 0, 2, 1, 0, 3, 1]


def made():
    """The first three rows are of one class."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
    return model, torch.randn(ROWS, 4), torch.tensor(LABELS), RoundPipe(copy.deepcopy(model), devices="virtual:2")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_fn", WRONG.values(), ids=WRONG)
def test_a_loss_that_depends_on_the_split_is_refused_before_the_first_gradient(loss_fn, reduction):
    """In the first three rows it is a mean over rows."""
    _, x, y, pipeline = made()
    config = RoundPipeRunConfig(num_microbatch=3, loss_reduction=reduction)
    with pytest.raises(LossError, match=r'loss_reduction="joined"'):
        pipeline.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config)
    assert all(parameter.grad is None for parameter in pipeline.parameters())


def test_masks_that_are_floats_are_refused():
    """All of them are one in the first rows."""
    _, x, y, pipeline = made()
    mask = torch.tensor([1.0] * 5 + [0.0, 0.5, 1.0, 0.0])
    with pytest.raises(LossError, match="other values"):
        pipeline.forward_backward(
            (x,), label=(y, mask), loss_fn=lambda out, y: (each(out, y[0]) * y[1]).sum() / y[1].sum(), run_config=MEAN
        )


MASKED = {
    "clamped": lambda losses, mask: (losses * mask).sum() / mask.sum().clamp(min=1),
    "with epsilon": lambda losses, mask: (losses * mask).sum() / (mask.sum() + 1e-6),
    "of chosen rows": lambda losses, mask: losses[mask.bool()].sum() / max(1, int(mask.sum())),
    "all rows without a mask": lambda losses, mask: (losses * mask if mask.any() else losses).mean(),
}


FIRST_MASKS = {
    "the first rows are left out": [0, 0, 0, 0, 0, 0, 1, 0, 1],
    "all rows are left out at first": [0] * ROWS,
    "no row is left out at first": [1] * ROWS,
}


@pytest.mark.filterwarnings("ignore:The loss cannot be computed from the losses of microbatches")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("first", FIRST_MASKS)
@pytest.mark.parametrize("name", MASKED)
def test_means_over_rows_of_a_mask_are_those_of_the_plain_model(name, first, dtype):
    def loss_fn(outputs, labels):
        return MASKED[name](each(outputs, labels[0]), labels[1])

    plain, x, y, pipeline = made()
    for rows in (FIRST_MASKS[first], [0, 0, 0, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1, 1, 1, 1]):
        mask = torch.tensor(rows).to(dtype)
        assert trains_like(pipeline, plain, loss_fn, x, (y, mask), config=RoundPipeRunConfig(num_microbatch=3))


SUMS = [
    lambda out, y: WeightedLoss(each(out, y)[y == 1].sum(), (y == 1).sum()),
    lambda out, y: WeightedLoss((each(out, y) * (y != -100)).sum(), (y != -100).sum().item()),
]


def larger_where_wrong(outputs, labels):
    found = each(outputs, labels)
    return torch.where(outputs.argmax(-1) == labels, found, 2 * found).mean()


def checked(outputs, labels):
    assert (labels >= 0).all()
    loss = F.cross_entropy(outputs, labels)
    if not torch.isfinite(loss):
        raise ValueError("not finite")
    return loss


def with_metric(outputs, labels):
    with torch.no_grad():
        F.cross_entropy(outputs, torch.where(labels == 1, -100, labels))  # a mean over some rows, which is no loss
    return F.cross_entropy(outputs, labels)


SEEN = []


def noted(outputs, labels):
    loss = each(outputs, labels).mean()
    SEEN.append(loss.item())
    return loss


@pytest.mark.parametrize(
    ("loss_fn", "reduction", "count"),
    [
        *((loss, "mean", 4) for loss in (*SUMS, larger_where_wrong, checked, noted, with_metric, F.cross_entropy)),
        *((WRONG[name], "joined", 3) for name in ("of one class", "with a term of one class", "in a loop")),
    ],
)
def test_a_loss_of_each_row_may_decide_by_values_and_a_joined_one_too(loss_fn, reduction, count):
    """What a row adds depends on this row alone, or all rows are there: the numbers are those of the plain model."""
    plain, x, y, pipeline = made()
    config = RoundPipeRunConfig(num_microbatch=count, loss_reduction=reduction)
    assert trains_like(pipeline, plain, loss_fn, x, y, config=config)


def test_labels_of_another_kind_are_checked_anew():
    """A loss that was shown for classes is another one for probabilities."""
    _, x, y, pipeline = made()

    def loss_fn(outputs, labels):
        return F.cross_entropy(outputs, labels) if labels.dim() == 1 else F.mse_loss(outputs / outputs.std(), labels)

    pipeline.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=MEAN)
    with pytest.raises(LossError, match="not a mean over rows"):
        pipeline.forward_backward((x,), label=torch.rand(ROWS, 4), loss_fn=loss_fn, run_config=MEAN)


def test_rows_and_tokens_on_one_axis_get_other_values():
    """In all rows of the batch, each token is chosen: only other values show that the loss chooses tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Flatten(0, 1))
    model[2].bias.data[0] = 3.0
    x, y = torch.randn(ROWS, 6, 4), torch.randint(0, 4, (ROWS, 6))

    def is_chosen(outputs):
        return outputs.detach().softmax(-1).amax(-1) > 0.5

    assert is_chosen(model(x)).all()
    pipeline = RoundPipe(model, devices="virtual:2")
    call = {"label": y, "run_config": MEAN}
    found = pipeline.forward_backward((x,), loss_fn=lambda out, y: each(out, y.flatten()).mean(), **call)
    assert near(found, F.cross_entropy(model(x), y.flatten()))
    with pytest.raises(LossError, match="other values"):
        pipeline.forward_backward((x,), loss_fn=lambda out, y: each(out, y.flatten())[is_chosen(out)].mean(), **call)
