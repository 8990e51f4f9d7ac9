"""Split a batch into microbatches: by its rows, by rules, by functions; what is unclear is refused."""

import re

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate, sum_reducer

from roundpipe_runtime import ConfigError, RoundPipe, RoundPipePackedData
from roundpipe_runtime.batch.entries import FlatTree, check_labels
from roundpipe_runtime.batch.spec import Replicate, Rule, TensorChunkSpec, is_below, read_rules, rule_for
from roundpipe_runtime.batch.splitting import infer_batch_size, split
from roundpipe_runtime.errors import JoinError, SplitError
from tests.runtime.batch.rows import firsts, rows


@pytest.mark.parametrize("batch", range(1, 18))
@pytest.mark.parametrize("count", range(1, 9))
def test_sizes_are_those_of_tensor_split_without_empty_parts(batch, count):
    """As `torch.tensor_split` has them; a part without rows is no microbatch."""
    expected = [len(part) for part in torch.tensor_split(torch.arange(batch), count) if len(part)]
    assert [part.rows for part in split((rows(batch),), {}, None, count)] == expected


def test_a_batch_without_rows_is_one_microbatch_without_rows():
    (part,) = split((torch.zeros(0, 3),), {}, torch.zeros(0), 4)
    assert part.rows == 0
    assert part.args[0].shape == (0, 3)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_wrong_number_of_microbatches_is_refused(count):
    with pytest.raises(ConfigError, match="num_microbatch must be a number of at least 1"):
        split((rows(4),), {}, None, count)


def test_arguments_keyword_arguments_and_labels_are_cut_together():
    parts = split((rows(5, 2),), {"mask": rows(5)}, {"y": rows(5)}, 2)
    for pick in (lambda p: p.args[0], lambda p: p.kwargs["mask"], lambda p: p.label["y"]):
        assert firsts(parts, pick) == [[0, 1, 2], [3, 4]]


def test_parts_are_views_in_the_graph_of_the_input():
    x = torch.zeros(4, 2, requires_grad=True)
    parts = split((x,), {}, None, 2)
    assert parts[1].args[0].data_ptr() == x[2:].data_ptr()
    parts[1].args[0].sum().backward()
    assert x.grad.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_what_has_no_batch_axis_goes_to_every_microbatch_as_it_is():
    """0-d tensors, numbers, strings, None, tensors of size 1 and tensors without an axis of the batch's size."""
    whole = {
        "scale": torch.tensor(2.0), "step": 3, "mode": "train", "nothing": None, "mask": torch.zeros(1, 7),
        "weight": torch.zeros(3),
    }  # fmt: skip
    for part in split((rows(8, 2),), whole, rows(8), 3):
        assert all(part.kwargs[name] is value for name, value in whole.items())


def test_a_broadcast_tensor_does_not_make_the_batch_one_row():
    """`(1, S)` beside `(B, S)`: the other system collapses to one microbatch here."""
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


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_positions_of_multimodal_models_are_cut_along_axis_1(batch):
    positions = torch.arange(batch).reshape(1, batch, 1).expand(3, batch, 4)
    parts = split((), {"input_ids": rows(batch, 4), "position_ids": positions}, None, 2)
    for part in parts:
        assert part.kwargs["position_ids"].shape == (3, part.rows, 4)
        assert part.kwargs["position_ids"][0, :, 0].tolist() == part.kwargs["input_ids"][:, 0].tolist()


def test_positions_along_the_length_are_not_cut():
    parts = split((), {"input_ids": rows(4, 6), "cache_position": torch.arange(6)}, None, 2)
    assert [part.kwargs["cache_position"].shape for part in parts] == [(6,)] * 2


def test_no_tensor_at_all_is_one_microbatch():
    (part,) = split((3,), {"mode": "x"}, None, 4)
    assert part.args == (3,)
    assert part.rows == 1


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


def custom_split(args, kwargs, num_microbatch):
    images, masks = args
    chunks_images = images.chunk(num_microbatch)
    chunks_masks = masks.chunk(num_microbatch)
    args_list = [(img, mask) for img, mask in zip(chunks_images, chunks_masks, strict=True)]
    kwargs_list = [kwargs] * len(args_list)
    return args_list, kwargs_list


def test_labels_follow_the_sizes_of_a_split_function():
    """`chunk` makes 3, 3, 3, 1 of 10 rows where `tensor_split` makes 3, 3, 2, 2: the labels must not slip."""
    parts = split((rows(10, 2), rows(10)), {"k": 1}, rows(10), 4, split_input=custom_split)
    assert [part.rows for part in parts] == [3, 3, 3, 1]
    assert firsts(parts, lambda part: part.label) == firsts(parts, lambda part: part.args[0])


def test_inputs_follow_the_sizes_of_a_split_function_for_labels():
    parts = split((rows(5, 2),), {}, rows(5), 2, split_label=lambda label, n: [label[:1], label[1:]])
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1, 2, 3, 4]]


def test_a_split_function_whose_sizes_cannot_be_followed_is_refused():
    def drop_some(args, kwargs, n):
        return [(args[0][:2],), (args[0][2:4],)], [{}, {}]

    with pytest.raises(SplitError, match=r"label: 5 rows cannot be split into the sizes \[2, 2\]"):
        split((rows(5, 2),), {}, rows(5), 2, split_input=drop_some)


@pytest.mark.parametrize("made", [None, [(1,)], ([(1,)], []), ([], [])])
def test_a_split_function_that_returns_something_else_is_refused(made):
    with pytest.raises(SplitError, match="the function must return two lists of the same length"):
        split((rows(4),), {}, None, 2, split_input=lambda args, kwargs, n: made)


def test_both_sides_cut_by_functions_must_make_the_same_number():
    with pytest.raises(SplitError, match="split_input made 2 microbatches, but split_label 1"):
        split((rows(4), rows(4)), {}, rows(4), 2, split_input=custom_split, split_label=lambda label, n: [label])


def test_a_split_function_may_hand_packed_data_on():
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    parts = split((packed,), {}, rows(4), 2, split_input=lambda args, kwargs, n: ([args, args], [kwargs, kwargs]))
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]
    with pytest.raises(SplitError, match="made 3 microbatches, but the packed data has 2"):
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
    with pytest.raises(SplitError, match=re.escape("args[0] has 3 microbatches, but split_label made 2")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split(2)))


def test_rows_that_only_packed_labels_state_are_those_of_the_microbatches():
    """The function cuts words, which have no rows."""
    labels = RoundPipePackedData(["first", "second"], rows=[2, 1])
    parts = split(("words",), {}, labels, 2, split_input=lambda args, kwargs, n: ([("a",), ("b",)], [{}, {}]))
    assert [(part.args, part.label, part.rows) for part in parts] == [(("a",), "first", 2), (("b",), "second", 1)]


def test_a_rule_by_key_path_says_where_to_cut():
    parts = split((rows(8, 5), torch.zeros(3, 8, 5)), {}, None, 2, split_input={"args[1]": TensorChunkSpec(1)})
    assert [tuple(part.args[1].shape) for part in parts] == [(3, 4, 5)] * 2


def test_a_rule_holds_for_all_that_is_below_it():
    tables = {"a": torch.zeros(3, 2), "b": [torch.zeros(4)]}
    parts = split((rows(8, 5), tables), {}, None, 2, split_input={"args[1]": Replicate})
    assert all(part.args[1]["a"] is tables["a"] and part.args[1]["b"][0] is tables["b"][0] for part in parts)


def test_a_longer_path_wins():
    rules = {"args[0]": Replicate, "args[0]['x']": TensorChunkSpec(0)}
    parts = split(({"x": rows(4), "t": torch.zeros(4)},), {}, None, 2, split_input=rules)
    assert firsts(parts, lambda part: part.args[0]["x"]) == [[0, 1], [2, 3]]
    assert parts[0].args[0]["t"].shape == (4,)


def test_rules_may_speak_of_labels():
    parts = split((rows(4, 2),), {}, [rows(4), torch.zeros(3)], 2, split_input={"label[1]": Replicate})
    assert [part.label[1].shape for part in parts] == [(3,), (3,)]


@pytest.mark.parametrize(("chunk", "whole"), [(TensorChunkSpec, Replicate), (TorchChunkSpec, _Replicate)])
def test_specs_have_the_structure_of_the_arguments(chunk, whole):
    parts = split((rows(4, 2), torch.zeros(4)), {"y": rows(4)}, None, 2, split_input=((chunk(0), whole), None))
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2, 3]]
    assert parts[0].args[1].shape == (4,)
    assert firsts(parts, lambda part: part.kwargs["y"]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("whole", [Replicate, _Replicate])
def test_one_mark_may_stand_for_all_labels(whole):
    label = torch.zeros(9)
    parts = split((rows(4),), {}, label, 2, split_label=whole)
    assert all(part.label is label for part in parts)


def test_the_example_of_the_documentation_on_labels():
    label = (torch.tensor(1.0), torch.zeros(3, 12, 4), 5)
    spec = (_Replicate, TorchChunkSpec(1), _Replicate)
    parts = split((rows(12, 2),), {}, label, 4, split_label=spec)
    assert [tuple(part.label[1].shape) for part in parts] == [(3, 3, 4)] * 4
    assert all(part.label[0] is label[0] and part.label[2] == 5 for part in parts)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"args[3]": Replicate},
            "split_input: 'args[3]' is not among the inputs. The key paths of inputs are:\n    ['args[0]', 'label']",
        ),
        ({"args[0]": TensorChunkSpec(2)}, "args[0]: the rule is TensorChunkSpec(2), but this tensor has shape (4, 2)"),
        ({"args[0]": 1}, "args[0]: expected TensorChunkSpec(dim), Replicate or None, found 1."),
        (7, "split_input must be (spec of args, spec of kwargs), a mapping from key paths or a function, found 7."),
    ],
)
def test_wrong_rules_are_refused(rules, message):
    with pytest.raises(SplitError, match=re.escape(message)):
        split((rows(4, 2),), {}, None, 2, split_input=rules)


def test_a_rule_that_cuts_a_number_is_refused():
    with pytest.raises(
        SplitError, match=r"kwargs\['n'\]: the rule is TensorChunkSpec\(0\), but there is no axis to split in 5"
    ):
        split((rows(4),), {"n": 5}, None, 2, split_input={"kwargs['n']": TensorChunkSpec(0)})


def test_two_rules_that_contradict_each_other_are_refused():
    """A third leaf, without a rule, could follow either."""
    rules = {"args[0]": TensorChunkSpec(0), "args[1]": TensorChunkSpec(0)}
    with pytest.raises(SplitError, match=re.escape("different numbers of rows: 3 in args[1]; 4 in args[0]")) as caught:
        split((rows(4), rows(3), rows(4)), {}, None, 2, split_input=rules)
    assert "also pass rules (TensorChunkSpec) for args[2]." in str(caught.value)


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


def test_an_array_that_a_rule_hands_on_whole_is_the_same_object_in_all_parts():
    """Only an array that would have to be cut is refused."""
    table = numpy.arange(4)
    parts = split((torch.zeros(4, 2), table), {}, None, 2, split_input={"args[1]": Replicate})
    assert [part.args[1] is table for part in parts] == [True, True]


def test_a_reducer_is_no_rule_for_inputs():
    """torch has one class of marks for both sides."""
    with pytest.raises(SplitError, match="a rule that reduces outputs, but this is an input"):
        split((torch.zeros(4),), {}, None, 2, split_input={"args[0]": sum_reducer})


def test_a_tree_of_marks_becomes_rules_by_path():
    spec = {"a": [TensorChunkSpec(1), None], "b": Replicate, "c": Replicate()}
    assert read_rules(spec, "kwargs") == {
        "kwargs['a'][0]": Rule(1),
        "kwargs['b']": Rule(None),
        "kwargs['c']": Rule(None),
    }


def test_the_error_is_of_the_class_that_fits_the_place():
    for error in (SplitError, JoinError):
        with pytest.raises(error, match=r"x: expected TensorChunkSpec\(dim\), Replicate or None, found 'batch'"):
            read_rules("batch", "x", error)


def test_the_longest_path_above_a_leaf_counts():
    rules = {"args": Rule(0), "args[0]": Rule(None), "args[0].x": Rule(2)}
    assert rule_for("args[0].x[3]", rules) == Rule(2)
    assert rule_for("args[0].y", rules) == Rule(None)
    assert rule_for("args[1]", rules) == Rule(0)
    assert rule_for("kwargs['args']", rules) is None


@pytest.mark.parametrize(
    ("path", "above", "expected"),
    [("a", "a", True), ("a[0]", "a", True), ("a.b", "a", True), ("ab", "a", False), ("a[10]", "a[1]", False)],
)
def test_a_path_ends_at_a_step(path, above, expected):
    assert is_below(path, above) is expected


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
        "args[1] has shape (3, 8, 5): the 8 rows of the batch are not on axis 0, but axis 1 has that size. Split the "
        "tensor along axis 1, or pass it whole to every microbatch. Write one of:\n"
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
