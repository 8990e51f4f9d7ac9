"""Split a batch into microbatches: by its rows, by rules, by functions; what is unclear is refused."""

import re

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate, sum_reducer

from roundpipe_runtime import ConfigError, RoundPipe, RoundPipePackedData
from roundpipe_runtime.batch.spec import Replicate, TensorChunkSpec
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import SplitError
from tests.runtime.small import firsts, rows


@pytest.mark.parametrize("batch", range(1, 18))
@pytest.mark.parametrize("count", range(1, 9))
def test_sizes_are_those_of_tensor_split_without_empty_parts(batch, count):
    """As `torch.tensor_split` has them; a part without rows is no microbatch."""
    expected = [len(part) for part in torch.tensor_split(torch.arange(batch), count) if len(part)]
    assert [part.rows for part in split((rows(batch),), {}, None, count)] == expected


def test_a_batch_without_rows_or_tensors_is_one_microbatch():
    (part,) = split((torch.zeros(0, 3),), {}, torch.zeros(0), 4)
    assert (part.rows, part.args[0].shape) == (0, (0, 3))
    (part,) = split((3,), {"mode": "x"}, None, 4)
    assert (part.args, part.rows) == ((3,), 1)
    for count in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="num_microbatch must be a whole number of at least 1"):
            split((rows(4),), {}, None, count)


def test_arguments_keyword_arguments_and_labels_are_cut_together_as_views():
    x = torch.arange(5.0).reshape(5, 1).requires_grad_()
    parts = split((x,), {"mask": rows(5)}, {"y": rows(5)}, 2)
    for pick in (lambda p: p.args[0], lambda p: p.kwargs["mask"], lambda p: p.label["y"]):
        assert firsts(parts, pick) == [[0, 1, 2], [3, 4]]
    assert parts[1].args[0].data_ptr() == x[3:].data_ptr()
    parts[1].args[0].sum().backward()
    assert x.grad.flatten().tolist() == [0, 0, 0, 1, 1]


def test_what_has_no_batch_axis_goes_to_every_microbatch_as_it_is():
    """0-d tensors, numbers, strings, None, tensors of size 1 and tensors without an axis of the batch's size."""
    whole = {
        "scale": torch.tensor(2.0), "step": 3, "mode": "train", "nothing": None, "mask": torch.zeros(1, 7),
        "weight": torch.zeros(3),
    }  # fmt: skip
    for part in split((rows(8, 2),), whole, rows(8), 3):
        assert all(part.kwargs[name] is value for name, value in whole.items())


def test_a_broadcast_tensor_does_not_make_the_batch_one_row():
    """`(1, S)` beside `(B, S)`, such as `position_ids`: the other system collapses to one microbatch here."""
    parts = split((torch.zeros(1, 6), rows(8, 6)), {}, None, 4)
    assert [part.rows for part in parts] == [2, 2, 2, 2]
    assert [tuple(part.args[0].shape) for part in parts] == [(1, 6)] * 4


def test_class_weights_go_whole_when_labels_tell_the_batch():
    """Inputs and labels share one size, 8; the 3 of the weights is none."""
    weight = torch.zeros(3)
    parts = split((rows(8, 5), weight), {}, rows(8), 2)
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(part.args[1] is weight for part in parts)
    parts = split((rows(8, 5),), {}, (rows(8), weight), 2)
    assert all(part.label[1] is weight for part in parts)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_positions_of_multimodal_models_are_cut_along_axis_1(batch):
    positions = torch.arange(batch).reshape(1, batch, 1).expand(3, batch, 4)
    along = torch.arange(4) if batch == 3 else torch.arange(6)  # positions along the length are not cut
    given = {"input_ids": rows(batch, len(along)), "position_ids": positions, "cache_position": along}
    for part in split((), given, None, 2):
        assert part.kwargs["position_ids"].shape == (3, part.rows, 4)
        assert part.kwargs["position_ids"][0, :, 0].tolist() == part.kwargs["input_ids"][:, 0].tolist()
        assert part.kwargs["cache_position"] is along


F = nn.functional


@pytest.fixture(scope="module")
def pipe():
    made = RoundPipe(nn.Sequential(nn.Linear(4, 4)), devices="virtual:1")
    yield made
    made.close()


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "options", "message"),
    [
        # with one row it would have run, on a row without its axis
        *((torch.ones(rows, 4), None, {}, r"found Tensor.*\n.*forward_backward\(\(x,\), ") for rows in (1, 2)),
        # a mapping would have given its keys, packed data its microbatches
        *((args, None, {}, "input_args must be a tuple") for args in ({"x": X}, "x", 3, RoundPipePackedData([X]))),
        ((), (X,), {}, r"input_kwargs must be a mapping .* found tuple"),
        ((X,), None, {"loss_fn": None}, r"loss_fn must be a function .* found None"),  # not taken for the default
    ],
)
def test_other_arguments_are_refused(pipe, args, kwargs, options, message):
    with pytest.raises(ConfigError, match=message):
        pipe.forward_backward(args, kwargs, label=X, **{"loss_fn": F.mse_loss, **options})


def test_labels_that_want_a_gradient_are_refused_by_their_path(pipe):
    """Nothing would flow back into them, also in packed data; detached ones run."""
    target = torch.ones(2, 4, requires_grad=True)

    def loss_fn(outputs, label):
        return F.mse_loss(outputs, label["soft"][0])

    with pytest.raises(ConfigError, match=r"label\['soft'\]\[0\] requires a gradient"):
        pipe.forward_backward((X,), label={"soft": [target]}, loss_fn=loss_fn)
    pipe.forward_backward((X,), label={"soft": [target.detach()]}, loss_fn=loss_fn)
    line = r"label requires a gradient(.|\n)*with torch.no_grad\(\): label = teacher\(x\)"
    with pytest.raises(ConfigError, match=line):
        pipe.forward_backward((X,), label=RoundPipePackedData(target.split(1)), loss_fn=F.mse_loss)
    pipe.forward_backward((X,), label=RoundPipePackedData(target.detach().split(1)), loss_fn=F.mse_loss)
    assert pipe[0].weight.grad is not None


def custom_split(args, kwargs, num_microbatch):
    images, masks = (tensor.chunk(num_microbatch) for tensor in args)
    return list(zip(images, masks, strict=True)), [kwargs] * len(images)


def test_labels_follow_the_sizes_of_a_split_function_and_the_other_way_round():
    """`chunk` makes 3, 3, 3, 1 of 10 rows where `tensor_split` makes 3, 3, 2, 2: the labels must not slip."""
    parts = split((rows(10, 2), rows(10)), {"k": 1}, rows(10), 4, split_input=custom_split)
    assert [part.rows for part in parts] == [3, 3, 3, 1]
    assert firsts(parts, lambda part: part.label) == firsts(parts, lambda part: part.args[0])
    parts = split((rows(5, 2),), {}, rows(5), 2, split_label=lambda label, n: [label[:1], label[1:]])
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1, 2, 3, 4]]

    def drop_some(args, kwargs, n):
        return [(args[0][:2],), (args[0][2:4],)], [{}, {}]

    with pytest.raises(SplitError, match=r"The 5 rows of label cannot be split .* have \[2, 2\] rows"):
        split((rows(5, 2),), {}, rows(5), 2, split_input=drop_some)


@pytest.mark.parametrize("made", [None, [(1,)], ([(1,)], []), ([], [])])
def test_a_split_function_that_returns_something_else_is_refused(made):
    with pytest.raises(SplitError, match="the function must return two lists of the same length"):
        split((rows(4),), {}, None, 2, split_input=lambda args, kwargs, n: made)
    with pytest.raises(SplitError, match="split_input made 2 microbatches, split_label made 1"):
        split((rows(4), rows(4)), {}, rows(4), 2, split_input=custom_split, split_label=lambda label, n: [label])


def test_a_split_function_may_hand_packed_data_on():
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    parts = split((packed,), {}, rows(4), 2, split_input=lambda args, kwargs, n: ([args, args], [kwargs, kwargs]))
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]
    with pytest.raises(SplitError, match="made 3 microbatches, but a RoundPipePackedData has 2"):
        split((packed,), {}, None, 3, split_input=lambda args, kwargs, n: ([args] * 3, [kwargs] * 3))


def test_a_split_function_for_labels_is_asked_for_as_many_as_the_packed_data_has():
    packed = RoundPipePackedData([rows(1), rows(2), rows(1)], rows=[1, 2, 1])
    asked = []

    def split_label(label, n):
        asked.append(n)
        return list(label.split([1, 2, 1]))

    parts = split((packed,), {}, rows(4), 2, split_label=split_label)
    assert asked == [3]
    assert firsts(parts, lambda part: part.label) == [[0], [1, 2], [3]]


@pytest.mark.parametrize("told", [True, False])
def test_labels_that_a_function_cuts_at_other_rows_than_packed_data_are_refused(told):
    """[1, 2, 1] beside [2, 1, 1] would pair labels with the outputs of other rows."""
    packed = RoundPipePackedData([rows(1), rows(2), rows(1)], rows=[1, 2, 1] if told else ())
    with pytest.raises(SplitError, match=re.escape("args[0] has microbatches of [1, 2, 1] rows, but split_label made")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split([2, 1, 1])))
    with pytest.raises(SplitError, match=re.escape("args[0] has 3 microbatches, but split_label made 2.")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split(2)))


def test_rows_that_only_packed_labels_state_are_those_of_the_microbatches():
    """The function cuts words, which have no rows."""
    labels = RoundPipePackedData(["first", "second"], rows=[2, 1])
    parts = split(("words",), {}, labels, 2, split_input=lambda args, kwargs, n: ([("a",), ("b",)], [{}, {}]))
    assert [(part.args, part.label, part.rows) for part in parts] == [(("a",), "first", 2), (("b",), "second", 1)]


def test_a_rule_by_key_path_holds_for_all_below_it_where_no_longer_path_has_one():
    rules = {"args[1]": TensorChunkSpec(1), "args[2]": Replicate, "args[2]['x']": TensorChunkSpec(0)}
    table = torch.zeros(8)
    args = rows(8, 5), torch.zeros(3, 8, 5), {"x": rows(8), "t": [table]}, *[torch.zeros(1)] * 17, rows(8)
    rules |= {"label[1]": Replicate, "args[20]": TensorChunkSpec(0)}  # of which `args[2]` says nothing
    for part in split(args, {}, [rows(8), torch.zeros(3)], 2, split_input=rules):
        assert part.args[1].shape == (3, 4, 5)
        assert part.args[2]["x"].shape == part.args[20].shape == (4,)
        assert part.args[2]["t"][0] is table
        assert part.label[1].shape == (3,)


@pytest.mark.parametrize(("chunk", "whole"), [(TensorChunkSpec, Replicate), (TorchChunkSpec, _Replicate)])
def test_specs_have_the_structure_of_the_arguments(chunk, whole):
    parts = split((rows(4, 2), torch.zeros(4)), {"y": rows(4)}, None, 2, split_input=((chunk(0), whole), None))
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2, 3]]
    assert parts[0].args[1].shape == (4,)
    assert firsts(parts, lambda part: part.kwargs["y"]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("whole", [Replicate, _Replicate])
def test_marks_for_labels(whole):
    """One may stand for all of them; the tuple is the example of the documentation."""
    label = torch.zeros(9)
    assert all(part.label is label for part in split((rows(4),), {}, label, 2, split_label=whole))
    label = (torch.tensor(1.0), torch.zeros(3, 12, 4), 5)
    for part in split((rows(12, 2),), {}, label, 4, split_label=(whole, TorchChunkSpec(1), whole)):
        assert part.label[0] is label[0]
        assert (part.label[1].shape, part.label[2]) == ((3, 3, 4), 5)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"args[3]": Replicate},
            "split_input: 'args[3]' is not among the inputs. The key paths of inputs are:\n"
            "    ['args[0]', \"kwargs['n']\", 'label']",
        ),
        ({"args[0]": TensorChunkSpec(2)}, "args[0]: the rule is TensorChunkSpec(2), but this tensor has shape (4, 2)"),
        ({"args[0]": 1}, "args[0]: expected TensorChunkSpec(dim), Replicate or None, found 1."),
        (7, "split_input must be (rules of args, rules of kwargs), a mapping from key paths or a function, found 7."),
        (
            {"kwargs['n']": TensorChunkSpec(0)},
            "kwargs['n']: TensorChunkSpec(0) cannot split 5. Pass it whole:\n    RoundPipeRunConfig(split_in",
        ),
        # torch has one class of marks for both sides
        ({"args[0]": sum_reducer}, "a rule that reduces outputs, but this is an input"),
    ],
)
def test_wrong_rules_are_refused(rules, message):
    with pytest.raises(SplitError, match=re.escape(message)):
        split((rows(4, 2),), {"n": 5}, None, 2, split_input=rules)


def test_two_rules_that_contradict_each_other_are_refused():
    """A third leaf, without a rule, could follow either."""
    rules = {"args[0]": TensorChunkSpec(0), "args[1]": TensorChunkSpec(0)}
    with pytest.raises(SplitError, match=re.escape("different numbers of rows: 3 in args[1]; 4 in args[0]")) as caught:
        split((rows(4), rows(3), rows(4)), {}, None, 2, split_input=rules)
    assert "pass TensorChunkSpec(axis) for args[2]." in str(caught.value)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_rule_for_every_leaf_is_taken_at_its_word(count):
    """12 rows of one and 10 of the other: each is cut for itself, as `torch.tensor_split` cuts it."""
    x, y, label = rows(12, 2), rows(10), torch.arange(36).reshape(3, 12)
    spec = ((TensorChunkSpec(0), Replicate), {"y": TensorChunkSpec(0), "name": Replicate})
    parts = split((x, 5), {"y": y, "name": "n"}, label, count, split_input=spec, split_label=TensorChunkSpec(1))
    for pick, whole, axis in (
        (lambda part: part.args[0], x, 0),
        (lambda part: part.kwargs["y"], y, 0),
        (lambda part: part.label, label, 1),
    ):
        expected = torch.tensor_split(whole, count, axis)
        assert all(torch.equal(pick(part), one) for part, one in zip(parts, expected, strict=True))
    assert [part.rows for part in parts] == [12 // count] * count  # those of the labels


def test_leaves_that_are_cut_each_for_itself_have_as_many_microbatches_as_the_shortest():
    spec = ((TensorChunkSpec(0), TensorChunkSpec(0)), None)
    parts = split((rows(7), rows(2)), {}, None, 4, split_input=spec)
    assert [part.args[0].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [part.args[1].tolist() for part in parts] == [[0], [1]]
    assert [part.rows for part in parts] == [None, None]


def test_two_sizes_are_refused_by_key_path():
    """Nothing says whether 8 or 3 is the batch, or 8 or 7."""
    with pytest.raises(SplitError, match=re.escape("different numbers of rows: 8 in args[0]; 7 in label")):
        split((rows(8, 5),), {}, rows(7), 2)
    with pytest.raises(SplitError) as caught:
        split((rows(8, 5),), {"weight": torch.zeros(3)}, None, 2)
    assert str(caught.value) == (
        "It is not clear how many rows the batch has. The sizes of axis 0: 3 in kwargs['weight']; 8 in args[0]. Name "
        "the tensors that every microbatch gets whole:\n"
        "    RoundPipeRunConfig(split_input={\"kwargs['weight']\": Replicate})"
    )


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


def test_the_batch_on_another_axis_is_refused_with_both_ways_out():
    with pytest.raises(SplitError) as caught:
        split((rows(8, 5), torch.zeros(3, 8, 5)), {}, rows(8), 2)
    assert str(caught.value) == (
        "args[1] has shape (3, 8, 5): the 8 rows of the batch are not on axis 0, but axis 1 has that size. Split the "
        "tensor along axis 1, or pass it whole to every microbatch. Write one of:\n"
        "    RoundPipeRunConfig(split_input={'args[1]': TensorChunkSpec(1)})\n"
        "    RoundPipeRunConfig(split_input={'args[1]': Replicate})"
    )


@pytest.mark.parametrize("convert", [numpy.asarray, lambda rows: pytest.importorskip("pandas").DataFrame(rows)])
def test_arrays_and_tables_with_rows_are_refused_with_the_line_that_makes_a_tensor(convert):
    """Each microbatch would get all rows, and the loss would be wrong; `torch.as_tensor` takes no table."""
    table = convert(numpy.arange(16.0).reshape(8, 2))
    with pytest.raises(SplitError, match=r"label is a .* with 8 rows, but only tensors are split"):
        split((rows(8, 5),), {}, table, 2)
    with pytest.raises(SplitError, match="only tensors are split") as caught:
        split((table,), {}, rows(8), 2)
    names = {"torch": torch, "array": table, "table": table}
    assert eval(str(caught.value).splitlines()[-1], names).tolist() == numpy.asarray(table).tolist()
    parts = split((rows(8), table), {}, None, 2, split_input={"args[1]": Replicate})
    assert [part.args[1] is table for part in parts] == [True, True]


def test_a_generator_is_refused():
    """The second microbatch would find it at its end."""
    for number in (1, 2):
        with pytest.raises(SplitError, match=r"args\[1\] is a generator(.|\n)*    list\(iterator\)"):
            split((torch.ones(4, 2), (n for n in range(3))), {}, None, number)


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
