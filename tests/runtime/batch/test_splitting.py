"""Arguments and labels come apart into microbatches: what has the batch axis is cut, and nothing else."""

import re

import numpy
import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate

from roundpipe_runtime.batch.splitting import (
    Replicate,
    RoundPipePackedData,
    TensorChunkSpec,
    infer_batch_size,
    join,
    split,
)
from roundpipe_runtime.errors import ConfigError, SplitError, UnregisteredObjectError
from tests.flatten.nodes import Dense, TrainState
from tests.runtime.documents import BatchResult, FlexibleOutput, ModelOutput, TransformerOutput
from yobx_flatten import (
    make_dynamic_cache,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)


def rows(count, *shape):
    """A tensor whose values tell the row."""
    return torch.arange(count).reshape(count, *[1] * len(shape)).expand(count, *shape).contiguous()


def firsts(parts, pick):
    """The rows that each microbatch got."""
    return [pick(part).flatten(1)[:, 0].tolist() if pick(part).dim() > 1 else pick(part).tolist() for part in parts]


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(1, 18))
@pytest.mark.parametrize("count", range(1, 9))
def test_sizes_are_those_of_tensor_split_without_empty_parts(batch, count):
    """As `torch.tensor_split` has them; a part without rows is no microbatch."""
    expected = [len(part) for part in torch.tensor_split(torch.arange(batch), count) if len(part)]
    assert [part.rows for part in split((rows(batch),), {}, None, count)] == expected


def test_fewer_rows_than_microbatches_make_one_microbatch_per_row():
    parts = split((rows(2, 3),), {}, rows(2), 4)
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1]]
    assert firsts(parts, lambda part: part.label) == [[0], [1]]


def test_a_batch_without_rows_is_one_microbatch_without_rows():
    (part,) = split((torch.zeros(0, 3),), {}, torch.zeros(0), 4)
    assert part.rows == 0
    assert part.args[0].shape == (0, 3)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_wrong_number_of_microbatches_is_refused(count):
    with pytest.raises(ConfigError, match="num_microbatch must be a number from 1 on"):
        split((rows(4),), {}, None, count)


# -- what is cut -----------------------------------------------------------------------------------------------------


def test_arguments_keyword_arguments_and_labels_are_cut_together():
    parts = split((rows(5, 2),), {"mask": rows(5)}, {"y": rows(5)}, 2)
    for pick in (lambda p: p.args[0], lambda p: p.kwargs["mask"], lambda p: p.label["y"]):
        assert firsts(parts, pick) == [[0, 1, 2], [3, 4]]


def test_parts_are_views_in_the_graph_of_the_input():
    """Nothing is copied, and gradients flow back into the batch."""
    x = torch.zeros(4, 2, requires_grad=True)
    parts = split((x,), {}, None, 2)
    assert parts[1].args[0].data_ptr() == x[2:].data_ptr()
    parts[1].args[0].sum().backward()
    assert x.grad.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_what_has_no_batch_axis_goes_to_every_microbatch_as_it_is():
    """0-d tensors, numbers, strings, None, tensors of size 1 and tensors without an axis of the batch's size."""
    whole = {
        "scale": torch.tensor(2.0),
        "step": 3,
        "mode": "train",
        "nothing": None,
        "mask": torch.zeros(1, 7),
        "weight": torch.zeros(3),
    }
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
    """`position_ids` of shape `(3, B, S)`, also where the batch is 3."""
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


# -- what is not clear -----------------------------------------------------------------------------------------------


def test_two_sizes_without_labels_are_refused_by_key_path():
    """Nothing says whether 8 or 3 is the batch."""
    with pytest.raises(SplitError) as caught:
        split((rows(8, 5),), {"weight": torch.zeros(3)}, None, 2)
    assert str(caught.value) == (
        "It is not clear how many rows the batch has: axis 0 has 3 in kwargs['weight']; 8 in args[0]. Say which of "
        "them go whole to every microbatch:\n"
        "    RoundPipeRunConfig(split_input={\"kwargs['weight']\": Replicate})"
    )


def test_inputs_and_labels_of_different_sizes_are_refused():
    """Neither is a weight or a table: the message says that the two do not go together."""
    with pytest.raises(SplitError, match=re.escape("other rows than the inputs: axis 0 has 8 in args[0]; 7 in label")):
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
        "args[1] has shape (3, 8, 5): the 8 rows of the batch are not on axis 0, but axis 1 has that size. Say whether "
        "it is cut there or goes whole to every microbatch, one of\n"
        "    RoundPipeRunConfig(split_input={'args[1]': TensorChunkSpec(1)})\n"
        "    RoundPipeRunConfig(split_input={'args[1]': Replicate})"
    )


def test_arrays_with_rows_are_refused():
    """Only tensors are cut; an array handed on whole would be wrong without a word."""
    with pytest.raises(SplitError, match=r"label is a numpy.ndarray with 8 rows, but only tensors are cut"):
        split((rows(8, 5),), {}, numpy.zeros(8), 2)


def test_infer_batch_size_looks_at_all_trees():
    assert infer_batch_size({"x": torch.zeros(8, 3)}, [torch.zeros(1, 3), 5], torch.tensor(1.0)) == 8
    assert infer_batch_size({"x": 5}) is None


# -- rules -----------------------------------------------------------------------------------------------------------


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
    """As RoundPipe writes them, with its classes from torch or with ours."""
    parts = split((rows(4, 2), torch.zeros(4)), {"y": rows(4)}, None, 2, split_input=((chunk(0), whole), None))
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2, 3]]
    assert parts[0].args[1].shape == (4,)
    assert firsts(parts, lambda part: part.kwargs["y"]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("whole", [Replicate, _Replicate])
def test_one_mark_may_stand_for_all_labels(whole):
    """Both marks are classes, and no function."""
    label = torch.zeros(9)
    parts = split((rows(4),), {}, label, 2, split_label=whole)
    assert all(part.label is label for part in parts)


def test_the_example_of_the_documentation_on_labels():
    """A scalar, a tensor to cut along axis 1, an integer."""
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
            "split_input: 'args[3]' is not among the inputs. Their key paths are:\n    ['args[0]', 'label']",
        ),
        (
            {"args[0]": TensorChunkSpec(2)},
            "args[0]: the rule says TensorChunkSpec(2), but this tensor has shape (4, 2)",
        ),
        ({"args[0]": 1}, "args[0]: expected TensorChunkSpec(dim), Replicate or None, found 1."),
        (7, "split_input must be (spec of args, spec of kwargs), a mapping from key paths or a function, found 7."),
    ],
)
def test_wrong_rules_are_refused(rules, message):
    with pytest.raises(SplitError, match=re.escape(message)):
        split((rows(4, 2),), {}, None, 2, split_input=rules)


def test_a_rule_that_cuts_a_number_is_refused():
    with pytest.raises(
        SplitError, match=r"kwargs\['n'\]: the rule says TensorChunkSpec\(0\), but there is no axis to cut in 5"
    ):
        split((rows(4),), {"n": 5}, None, 2, split_input={"kwargs['n']": TensorChunkSpec(0)})


def test_two_rules_that_contradict_each_other_are_refused():
    """A third leaf, without a rule, could follow either."""
    rules = {"args[0]": TensorChunkSpec(0), "args[1]": TensorChunkSpec(0)}
    with pytest.raises(
        SplitError, match=re.escape("not the same number of rows: 3 in args[1]; 4 in args[0]")
    ) as caught:
        split((rows(4), rows(3), rows(4)), {}, None, 2, split_input=rules)
    assert "give a rule to each of the others, too: args[2]." in str(caught.value)


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


# -- functions -------------------------------------------------------------------------------------------------------


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

    with pytest.raises(SplitError, match=r"label: 5 rows are to follow the sizes \[2, 2\]"):
        split((rows(5, 2),), {}, rows(5), 2, split_input=drop_some)


@pytest.mark.parametrize("made", [None, [(1,)], ([(1,)], []), ([], [])])
def test_a_split_function_that_returns_something_else_is_refused(made):
    with pytest.raises(SplitError, match="the function must return two lists of the same length"):
        split((rows(4),), {}, None, 2, split_input=lambda args, kwargs, n: made)


def test_both_sides_cut_by_functions_must_make_the_same_number():
    with pytest.raises(SplitError, match="split_input made 2 microbatches and split_label 1"):
        split((rows(4), rows(4)), {}, rows(4), 2, split_input=custom_split, split_label=lambda label, n: [label])


# -- classes ---------------------------------------------------------------------------------------------------------


def test_registered_classes_of_the_document_are_cut():
    """Dataclass, optional fields, nested containers: tensors are cut, the rest is handed on."""
    batch = (
        TransformerOutput(rows(5, 3), rows(5, 2, 2), loss=0.5),
        FlexibleOutput(rows(5)),
        FlexibleOutput(rows(5), rows(5, 4)),
        BatchResult([rows(5), rows(5, 2)], {"x": rows(5), "name": "first"}),
    )
    first, second = split(batch, {}, None, 2)
    assert type(first.args[0]) is TransformerOutput
    assert first.args[0].logits.shape == (3, 3)
    assert second.args[0].hidden_states[:, 0, 0].tolist() == [3, 4]
    assert second.args[0].loss == 0.5
    assert first.args[1].attentions is None
    assert second.args[2].attentions.shape == (2, 4)
    assert [t.shape[0] for t in second.args[3].outputs] == [2, 2]
    assert second.args[3].metadata["x"].tolist() == [3, 4]
    assert second.args[3].metadata["name"] == "first"


def test_classes_written_as_for_jax_are_cut():
    state = TrainState({"w": rows(4, 2)}, {"m": [rows(4)]}, step=7)
    dense = Dense(rows(4, 2), rows(4), activation="tanh")
    first, second = split((state, dense), {}, None, 2)
    assert first.args[0].params["w"][:, 0].tolist() == [0, 1]
    assert second.args[0].opt_state["m"][0].tolist() == [2, 3]
    assert second.args[0].step == 7
    assert second.args[1].bias.tolist() == [2, 3]
    assert second.args[1].activation == "tanh"


def test_an_unregistered_object_with_tensors_is_refused_with_the_line_to_type():
    """The document's first example: handed on whole, its tensors would be neither cut nor moved."""
    with pytest.raises(UnregisteredObjectError) as caught:
        split((rows(4),), {"state": [ModelOutput(rows(4), rows(4))]}, None, 2)
    message = str(caught.value)
    assert message.startswith("kwargs['state'][0] is a tests.runtime.documents.ModelOutput, which torch does not know")
    assert "It holds 2 tensors, 64 bytes. Register it first:\n" in message


def test_an_unregistered_object_goes_whole_if_a_rule_says_so():
    state = ModelOutput(rows(4), rows(4))
    parts = split((rows(4), state), {}, None, 2, split_input={"args[1]": Replicate})
    assert all(part.args[1] is state for part in parts)


def test_a_cache_is_cut_along_the_axis_that_its_registration_declares():
    """Also where it is the only one to say how many rows there are."""
    pytest.importorskip("transformers")
    cache = make_dynamic_cache([(torch.randn(4, 2, 3, 5), torch.randn(4, 2, 3, 5)) for _ in range(2)])
    with register_flattening_functions(patch_transformers=True):
        parts = split((), {"input_ids": rows(4, 1), "past_key_values": cache}, None, 3)
        alone = split((), {"past_key_values": cache, "table": torch.zeros(9)}, None, 3)
    assert [part.rows for part in alone] == [2, 1, 1]
    for layer in range(2):
        keys = [part.kwargs["past_key_values"].layers[layer].keys for part in parts]
        assert torch.equal(torch.cat(keys), cache.layers[layer].keys)
    assert [part.kwargs["past_key_values"].get_seq_length() for part in parts] == [3, 3, 3]


@pytest.mark.parametrize("filled", [True, False])
def test_an_unregistered_cache_is_refused(filled):
    """An empty one, too: every microbatch would write into the same."""
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    if filled:
        cache.update(torch.zeros(4, 2, 3, 5), torch.zeros(4, 2, 3, 5), 0)
    with pytest.raises(
        UnregisteredObjectError, match=re.escape("register_flattening_functions(patch_transformers=True)")
    ):
        split((rows(4),), {"past_key_values": cache}, None, 2)


def test_an_empty_registered_cache_is_one_per_microbatch():
    transformers = pytest.importorskip("transformers")
    with register_flattening_functions(patch_transformers=True):
        first, second = split((rows(4),), {"past_key_values": transformers.DynamicCache()}, None, 2)
    assert first.kwargs["past_key_values"] is not second.kwargs["past_key_values"]


# -- packed ----------------------------------------------------------------------------------------------------------


def test_packed_data_goes_entry_by_entry_and_the_rest_follows_its_rows():
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    parts = split((packed,), {}, rows(4), 8)
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]


def test_packed_data_of_different_lengths_is_refused():
    one, two = RoundPipePackedData([rows(2)], rows=[2]), RoundPipePackedData([rows(1), rows(1)], rows=[1, 1])
    with pytest.raises(SplitError, match="These were cut into different numbers of microbatches"):
        split((one, two), {}, None, 2)


def test_labels_that_do_not_fit_packed_data_are_refused():
    """Handed on whole they would be wrong without a word."""
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    with pytest.raises(SplitError, match=re.escape("axis 0 has 4 in args[0]; 5 in label")):
        split((packed,), {}, rows(5), 2)


def test_packed_data_whose_rows_are_not_told_is_counted():
    packed = RoundPipePackedData([rows(2), rows(1)])
    assert [part.label.tolist() for part in split((packed,), {}, rows(3), 8)] == [[0, 1], [2]]


def test_packed_data_in_which_nothing_can_be_counted_does_not_say_where_to_cut():
    """As even as possible would be wrong without a word where a function had cut it otherwise."""
    with pytest.raises(SplitError, match=r"args\[0\]: it is not known how many rows each of the 2 microbatches has"):
        split((RoundPipePackedData([1.0, 2.0]),), {}, rows(3), 8)
    parts = split((RoundPipePackedData([1.0, 2.0]),), {}, None, 8)
    assert [(part.args[0], part.rows) for part in parts] == [(1.0, None), (2.0, None)]


def test_a_table_beside_packed_data_is_not_taken_for_the_batch():
    """Eight rows in four microbatches, and a table of five: it goes whole."""
    table = rows(5, 6)
    parts = split((RoundPipePackedData([rows(2, 6)] * 4), table), {}, None, 4)
    assert [part.args[1] is table for part in parts] == [True] * 4
    assert [part.rows for part in parts] == [2] * 4


def test_of_several_packed_leaves_the_one_that_others_agree_with_counts():
    """(rows, width) beside (length, length): the labels tell which is the batch; without them, nobody guesses."""
    hidden, bias = RoundPipePackedData([rows(2, 6), rows(1, 6)]), RoundPipePackedData([rows(4, 4), rows(4, 4)])
    assert [part.label.tolist() for part in split((hidden, bias), {}, rows(3), 2)] == [[0, 1], [2]]
    with pytest.raises(SplitError, match=r"axis 0 has 3 in args\[0\]; 8 in args\[1\]"):
        split((hidden, bias), {}, None, 2)


@pytest.mark.parametrize("rule", [TensorChunkSpec(0), TorchChunkSpec(0), Replicate])
def test_a_rule_for_packed_data_is_taken(rule):
    """RoundPipe's own tests give one; entry i goes to microbatch i whatever it says."""
    packed = RoundPipePackedData([rows(2, 3), rows(1, 3)])
    spec = ((TensorChunkSpec(0), rule), None)
    parts = split((rows(3), packed), {}, None, 2, split_input=spec)
    assert [part.args[1] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.args[0]) == [[0, 1], [2]]


def test_a_rule_says_along_which_axis_packed_data_is_counted():
    packed = RoundPipePackedData([torch.zeros(7, 1), torch.zeros(7, 2)])
    parts = split((packed,), {}, rows(3), 2, split_input=((TensorChunkSpec(1),), None))
    assert [part.label.tolist() for part in parts] == [[0], [1, 2]]


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


def test_packed_labels_are_taken_entry_by_entry():
    """All of them, whatever number of microbatches was asked for."""
    packed = RoundPipePackedData([rows(1), rows(2), rows(1)])
    parts = split((rows(4),), {}, packed, 2)
    assert firsts(parts, lambda part: part.args[0]) == [[0], [1, 2], [3]]
    assert [part.label is entry for part, entry in zip(parts, packed, strict=True)] == [True] * 3


@pytest.mark.parametrize("told", [True, False])
def test_packed_labels_of_other_rows_than_packed_inputs_are_refused(told):
    """As many microbatches and as many rows, cut elsewhere; or fewer rows."""
    packed = RoundPipePackedData([rows(3), rows(1)], rows=[3, 1] if told else ())
    with pytest.raises(SplitError, match=re.escape("the rows of the microbatches differ, [[2, 2], [3, 1]]")):
        split((packed,), {}, RoundPipePackedData([rows(2), rows(2)]), 2)
    with pytest.raises(SplitError, match="3 in label"):
        split((packed,), {}, RoundPipePackedData([rows(2), rows(1)]), 2)


def test_packed_data_that_was_made_shorter_is_counted_anew():
    """It is a list: what a pipeline told of its entries holds for those entries."""
    packed = RoundPipePackedData([rows(3), rows(1), rows(2)], rows=[3, 1, 2])
    packed.pop(0)
    assert [part.label.tolist() for part in split((packed,), {}, rows(3), 2)] == [[0], [1, 2]]


# -- packed data and functions -----------------------------------------------------------------------------------------


def test_a_split_function_may_hand_packed_data_on():
    """Entry i is what microbatch i gets."""
    packed = RoundPipePackedData([rows(3, 2), rows(1, 2)], rows=[3, 1])
    parts = split((packed,), {}, rows(4), 2, split_input=lambda args, kwargs, n: ([args, args], [kwargs, kwargs]))
    assert [part.args[0] is entry for part, entry in zip(parts, packed, strict=True)] == [True, True]
    assert firsts(parts, lambda part: part.label) == [[0, 1, 2], [3]]
    with pytest.raises(SplitError, match="made 3 microbatches, and handed on packed data of 2"):
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
    with pytest.raises(SplitError, match=re.escape("args[0] has microbatches of [1, 2, 1] rows, and split_label made")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split([2, 1, 1])))
    with pytest.raises(SplitError, match=re.escape("args[0] has 3 microbatches, and split_label made 2")):
        split((packed,), {}, rows(4), 3, split_label=lambda label, n: list(label.split(2)))


def test_packed_data_waits_once():
    calls = []
    packed = RoundPipePackedData([1], wait=lambda: calls.append(1))
    assert packed.synchronize().synchronize() is packed
    assert calls == [1]


class TimeMajor:
    def __init__(self, steps, mask):
        self.steps, self.mask = steps, mask


def test_a_class_declares_its_batch_axis_with_its_registration():
    """Cut along axis 1 and joined along axis 1, without a rule."""
    register_class_flattening(
        TimeMajor,
        lambda obj: ([obj.steps, obj.mask], None),
        lambda children, _: TimeMajor(*children),
        None,
        axes={"0": {1: "batch"}},
    )
    try:
        batch = TimeMajor(torch.arange(28).reshape(7, 4), rows(4))
        parts = split((batch,), {}, None, 3)
        joined = join([part.args[0] for part in parts], [part.rows for part in parts])
    finally:
        unregister_class_flattening(TimeMajor)
    assert [tuple(part.args[0].steps.shape) for part in parts] == [(7, 2), (7, 1), (7, 1)]
    assert torch.equal(joined.steps, batch.steps)
    assert torch.equal(joined.mask, batch.mask)
