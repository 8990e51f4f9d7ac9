"""The report states sizes that a trace fixed and the model does not."""

import itertools

import pytest
import torch

from yobx_flatten import export_program
from yobx_flatten.errors import FlattenError
from yobx_flatten.export import traced
from yobx_flatten.model_folder.source.configuration import small_model


class Reader(torch.nn.Module):
    """An LSTM, whose trace is a loop over the steps of the example."""

    def __init__(self):
        super().__init__()
        self.reads = torch.nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.reads(x)[0]


class Loop(torch.nn.Module):
    """Python goes over the rows of one input, and another is summed."""

    def forward(self, x, y):
        total = y.sum()
        for row in range(len(x)):
            total = total + x[row].sum() * row
        return total + torch.zeros_like(y)


# torch says so of the weights of an LSTM
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_the_length_of_an_lstm_is_stated_and_its_width_is_not():
    module = Reader().eval()
    exported = export_program(module, (torch.randn(2, 7, 8),), cases=[])
    assert "x.shape[1] is fixed at 7 by the trace: the model accepts other sizes;" in str(exported.report)
    assert "x.shape[2]" not in str(exported.report)
    assert module(torch.randn(3, 9, 8)).shape == (3, 9, 8)
    with pytest.raises((FlattenError, AssertionError, RuntimeError)):
        exported.program.module()(torch.randn(3, 9, 8))


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_nothing_is_stated_where_the_model_is_not_called():
    """Without proof the model is not called, so widths of weights would be stated as well."""
    report = export_program(Reader().eval(), (torch.randn(2, 7, 8),), cases=[], proof="none").report
    assert "by the trace" not in str(report)


def test_a_model_that_writes_to_its_weights_is_as_it_was():
    """It is called once more, with one row more of each size that was fixed."""

    class Learns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return sum(x[:, place] for place in range(x.shape[1])) * self.weight

    module = Learns()
    report = export_program(module, (torch.randn(2, 4, 3),), cases=[]).report
    assert "x.shape[1] is fixed at 4 by the trace: the model accepts other sizes" in str(report)
    assert module.weight.tolist() == [1, 1, 1]


def test_sizes_that_belong_together_are_tried_together():
    """Masks have the length of their tokens: one alone would be refused by the model."""

    class Masked(torch.nn.Module):
        def forward(self, tokens, mask):
            return sum(tokens[:, place] * mask[:, place] for place in range(tokens.shape[1]))

    report = export_program(Masked(), (torch.randn(2, 5), torch.ones(2, 5)), cases=[]).report
    assert "tokens.shape[1] is fixed at 5 by the trace: the model accepts other sizes" in str(report)


def test_what_varies_or_was_fixed_by_the_caller_is_no_note():
    example = (torch.randn(4, 3), torch.randn(6))
    assert "x.shape[0] is fixed at 4" in str(export_program(Loop(), example, cases=[]).report)
    stated = ({1: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    assert "is fixed at" not in str(export_program(Loop(), example, dynamic_shapes=stated, cases=[]).report)
    assert "is fixed at" not in str(export_program(Loop(), example, dynamic_shapes=None, cases=[]).report)


class Doubles(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_the_batch_varies_where_it_is_enough_to_fix_other_sizes(monkeypatch):
    """A number that code rounds may be computed from all sizes, and from none as soon as height and width are fixed."""
    rounded = itertools.chain([{("x", 0): 3, ("x", 1): 8}], itertools.repeat({}))
    monkeypatch.setattr(traced, "_unasserted", lambda program, names: next(rounded))
    exported = export_program(Doubles(), (torch.ones(3, 8, 5),))
    assert "x.shape[1] is fixed at 8, since the model's code rounds" in str(exported.report)
    assert "x.shape[0]" not in str(exported.report)
    taken = exported.program.module()(torch.ones(6, 8, 7))
    assert torch.equal(taken, torch.full((6, 8, 7), 2.0))


@pytest.mark.timeout(900)  # 105 s on an idle machine
def test_the_batch_of_swin_varies():
    """Its windows are counted from batch, height and width."""
    model, pictures = small_model("swin"), torch.randn(4, 3, 32, 32)
    exported = export_program(model, kwargs={"pixel_values": torch.randn(2, 3, 32, 32)})
    found = exported.program.module()(pixel_values=pictures)
    torch.testing.assert_close(found.last_hidden_state, model(pictures).last_hidden_state)
