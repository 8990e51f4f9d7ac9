"""Where the sizes do not tell the batch, splitting is refused, with the rules that would."""

import re

import numpy
import pytest
import torch

from roundpipe_runtime.batch.spec import TensorChunkSpec
from roundpipe_runtime.batch.splitting import infer_batch_size, split
from roundpipe_runtime.errors import SplitError
from tests.runtime.batch.rows import rows


def test_two_sizes_without_labels_are_refused_by_key_path():
    """Nothing says whether 8 or 3 is the batch."""
    with pytest.raises(SplitError) as caught:
        split((rows(8, 5),), {"weight": torch.zeros(3)}, None, 2)
    assert str(caught.value) == (
        "It is not clear how many rows the batch has: axis 0 has 3 in kwargs['weight']; 8 in args[0]. Name the tensors "
        "that every microbatch gets whole:\n"
        "    RoundPipeRunConfig(split_input={\"kwargs['weight']\": Replicate})"
    )


def test_inputs_and_labels_of_different_sizes_are_refused():
    with pytest.raises(SplitError, match=re.escape("different numbers of rows: axis 0 has 8 in args[0]; 7 in label")):
        split((rows(8, 5),), {}, rows(7), 2)


@pytest.mark.parametrize(
    ("inputs", "label"),
    [
        ((torch.zeros(1, 6),), torch.zeros(6)),
        ((torch.zeros(1, 6), torch.zeros(3)), torch.zeros(1)),
        ((torch.zeros(1, 6),), [torch.zeros(1), torch.zeros(3)]),
    ],
)
def test_one_row_is_one_microbatch_whatever_stands_beside_it(inputs, label):
    """Six labels of one row of tokens, or three class weights, are not a batch; whole is right in any case."""
    (part,) = split(inputs, {}, label, 4)
    assert part.args == inputs
    assert part.label is label or part.label[1] is label[1]


def test_one_row_of_positions_does_not_tell_the_batch():
    """`position_ids` of `(1, S)` broadcasts, as a mask of `(1, S)` does."""
    parts = split((), {"input_ids": rows(8, 4), "position_ids": torch.zeros(1, 4)}, None, 2)
    assert [part.rows for part in parts] == [4, 4]


def test_the_batch_on_another_axis_is_refused_with_both_ways_out():
    with pytest.raises(SplitError) as caught:
        split((rows(8, 5), torch.zeros(3, 8, 5)), {}, rows(8), 2)
    assert str(caught.value) == (
        "args[1] has shape (3, 8, 5): the 8 rows of the batch are not on axis 0, but axis 1 has that size. Split it "
        "there, or pass it whole to every microbatch. Write one of:\n"
        "    RoundPipeRunConfig(split_input={'args[1]': TensorChunkSpec(1)})\n"
        "    RoundPipeRunConfig(split_input={'args[1]': Replicate})"
    )


def test_arrays_with_rows_are_refused():
    """Only tensors are cut; an array handed on whole would be wrong without a word."""
    with pytest.raises(SplitError, match=r"label is a numpy.ndarray with 8 rows, but only tensors are split"):
        split((rows(8, 5),), {}, numpy.zeros(8), 2)


@pytest.mark.parametrize("convert", [numpy.asarray, lambda rows: pytest.importorskip("pandas").DataFrame(rows)])
def test_the_line_that_converts_an_array_or_a_table_makes_a_tensor(convert):
    """`torch.as_tensor` takes no table."""
    values = numpy.arange(16.0).reshape(8, 2)
    with pytest.raises(SplitError, match="only tensors are split") as caught:
        split((convert(values),), {}, rows(8), 2)
    names = {"torch": torch, "array": convert(values), "table": convert(values)}
    assert eval(str(caught.value).splitlines()[-1], names).tolist() == values.tolist()


def test_a_generator_is_refused():
    """The second microbatch would find it at its end."""
    for number in (1, 2):
        with pytest.raises(SplitError, match=r"args\[1\] is a generator(.|\n)*    list\(iterator\)"):
            split((torch.ones(4, 2), (n for n in range(3))), {}, None, number)


def test_infer_batch_size_looks_at_all_trees():
    assert infer_batch_size({"x": torch.zeros(8, 3)}, [torch.zeros(1, 3), 5], torch.tensor(1.0)) == 8
    assert infer_batch_size({"x": 5}) is None


def test_errors_tell_types_and_shapes_and_no_data():
    """A batch is large, and may be confidential."""
    secret = torch.tensor([31337.0, 31338.0])
    for call in (
        lambda: split((rows(4), [secret.numpy()]), {}, None, 2, split_input={"args[1][0]": TensorChunkSpec(0)}),
        lambda: split((rows(4),), {}, None, 2, split_input=((secret,), None)),
        lambda: split((rows(4),), {}, None, 2, split_input=[secret]),
        lambda: split((rows(4),), {}, rows(4), 2, split_label=lambda label, n: secret),
    ):
        with pytest.raises(SplitError) as caught:
            call()
        assert "3133" not in str(caught.value)
