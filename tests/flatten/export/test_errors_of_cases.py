"""Errors of an export say which case, which line of the module, and what was not equal."""

import pytest
import torch

from yobx_flatten import Case, explain_error, export_program
from yobx_flatten.errors import InvalidArgumentError, ReplayError


class Planted(torch.nn.Module):
    def forward(self, x):
        return x + torch.ones(3, 4)


class Stacked(torch.nn.Module):
    def forward(self, x):
        return torch.cat([x, torch.ones(3, 4)], dim=1)


class Multiplied(torch.nn.Module):
    def forward(self, x):
        return torch.ones(2, 3) @ x


class Viewed(torch.nn.Module):
    def forward(self, x):
        return x.reshape(3, 4)


class Expanded(torch.nn.Module):
    def forward(self, x):
        return x[:, :1].T.expand(4, 3)


PLANTED = [Planted, Stacked, Multiplied, Viewed, Expanded]


@pytest.mark.parametrize("kind", PLANTED)
def test_a_case_at_which_the_module_stops_is_named_with_its_line(kind):
    cases = [Case("three rows", (torch.randn(3, 4),)), Case("bigger", (torch.randn(9, 4),))]
    with pytest.raises(InvalidArgumentError, match=rf"case 'bigger', step 0: {kind.__name__} itself fails") as caught:
        export_program(kind(), (torch.randn(3, 4),), cases=cases)
    text = str(caught.value)
    assert "test_errors_of_cases.py" in text
    assert "the code creates a tensor of a fixed size" in text
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_explain_error_knows_a_planted_size():
    """The line of the module, which the traceback has below torch's."""
    try:
        Planted()(torch.randn(9, 4))
    except RuntimeError as error:
        explanation = explain_error(error)
    assert explanation.known
    assert "The size of tensor a (9) must match the size of tensor b (3)" in explanation.text
    assert "in forward" in explanation.text
    assert "x + torch.ones(3, 4)" in explanation.text


class Branches(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1


class Counts(torch.nn.Module):
    def forward(self, x):
        return x[: int(x.max().item())]


@pytest.mark.parametrize(("kind", "line"), [(Branches, "if x.sum() > 0:"), (Counts, "x[: int(x.max().item())]")])
def test_a_branch_on_values_is_pointed_to(kind, line, capfd):
    with pytest.raises(InvalidArgumentError, match=f"{kind.__name__} cannot be traced. The code branches on") as caught:
        export_program(kind(), (torch.ones(4, 3),))
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3
    assert capfd.readouterr() == ("", "")


def test_what_was_not_equal_is_in_the_first_line():

    class Grows(torch.nn.Module):
        def forward(self, x):
            return x[: 2 if x.shape[0] < 4 else 3]

    with pytest.raises(ReplayError) as caught:
        export_program(Grows(), (torch.ones(3, 3),), cases=[Case("seven rows", (torch.ones(7, 3),))])
    first = str(caught.value).splitlines()[0]
    assert "seven rows: step 0" in first
    assert "inf" not in first


class Gradient(torch.nn.Module):
    def forward(self, x):
        return torch.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(x)


class GradientOfLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x):
        return torch.func.grad(lambda y: self.linear(y).pow(2).sum())(x)


class SetsData(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.weight.data = self.weight.data * 2
        return x * self.weight


class WritesData(torch.nn.Module):
    def forward(self, x):
        x.data.add_(1)
        return x * 2


class AsksForNumbers(torch.nn.Module):
    def forward(self, x):
        return x * torch.tensor(x.numpy() ** 2)


@pytest.mark.parametrize("kind", [Gradient, GradientOfLayer, SetsData, WritesData, AsksForNumbers])
def test_what_a_trace_does_not_follow_has_a_cure(kind):
    """Each is one of torch's own assertions, which name neither the cause nor what to write."""
    with pytest.raises(InvalidArgumentError, match=f"{kind.__name__} is not traced. forward uses torch.func, .data"):
        export_program(kind(), (torch.ones(4, 3),))


class Differentiates(torch.nn.Module):
    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(x.pow(3).sum(), x)
        return gradient


def test_the_cure_is_exported():
    x = torch.randn(5, 3)
    assert torch.allclose(export_program(Differentiates(), (torch.ones(4, 3),))(x), 3 * x**2)
