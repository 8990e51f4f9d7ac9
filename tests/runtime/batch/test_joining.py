"""The outputs of the microbatches go together again, or the key path at which they do not is named."""

import math
import re
from collections import namedtuple

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec as TorchChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate, sum_reducer

from roundpipe_runtime.batch.joining import join
from roundpipe_runtime.batch.spec import Replicate, TensorChunkSpec
from roundpipe_runtime.batch.splitting import split
from roundpipe_runtime.errors import JoinError
from tests.cases import examples
from tests.flatten.nodes import Dense, TrainState
from tests.runtime.documents import BatchResult, FlexibleOutput, TransformerOutput
from yobx_flatten import make_dynamic_cache, make_encoder_decoder_cache
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening

Point = namedtuple("Point", ["x", "y"])


def test_tensors_without_axes_are_averaged_by_weight():
    """Means over 3 rows and over 1 row: the mean over all 4 is no mean of the two. One output is returned itself."""
    assert join([torch.tensor(1.0), torch.tensor(5.0)], [3, 1]).item() == 2.0
    assert join([torch.tensor(1 + 1j), torch.tensor(3 - 1j)], [1, 1]).item() == 2
    assert join([torch.tensor(math.nan), torch.tensor(2.0)], [0, 7], rows=[2, 2]).item() == 2.0
    assert join([torch.tensor(math.nan), torch.tensor(math.nan)], [0, 0], rows=[2, 2]).item() == 0.0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        value = torch.tensor(0.1, dtype=dtype)
        assert torch.equal(join([value.clone() for _ in range(3)], [3, 3, 1]), value)
    output = {"y": torch.zeros(2)}
    assert join([output], [2]) is output


def test_weights_that_are_no_rows_do_not_disturb_the_concatenation():
    outputs = [{"y": torch.zeros(2), "n": torch.tensor(1.0)}, {"y": torch.ones(1), "n": torch.tensor(4.0)}]
    joined = join(outputs, [20, 10], rows=[2, 1])
    assert joined["y"].tolist() == [0, 0, 1]
    assert joined["n"].item() == 2.0


def test_gradients_flow_through_the_join():
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    means = [part.mean() for part in parts]
    joined = join([{"y": y, "n": n} for y, n in zip(parts, means, strict=True)], [2, 1])
    (joined["y"].sum() + 3 * joined["n"]).backward()
    assert [part.grad.tolist() for part in parts] == [[2, 2], [2]]


def test_structures_that_differ_are_named():
    """The other system joins by position and says nothing."""
    with pytest.raises(JoinError) as caught:
        join([{"a": torch.zeros(1), "b": [1]}, {"a": torch.zeros(1), "b": [1, 2]}, {"c": torch.zeros(1)}], [1, 1, 1])
    assert str(caught.value) == (
        "The outputs of microbatches 0 and 1 have different structures:\n"
        "outputs['b']\n"
        "    microbatch 0: list of 1\n"
        "    microbatch 1: list of 2"
    )
    outputs = [TransformerOutput(torch.zeros(1), torch.zeros(1), loss=loss) for loss in (0.5, 0.25)]
    with pytest.raises(JoinError, match=r"(?s)microbatches 0 and 1 have different structures:.*0\.5.*0\.25"):
        join(outputs, [1, 1])


class Odd:
    """Cannot be compared; its own error would name neither the output nor the microbatch."""

    __hash__ = None

    def __eq__(self, other):
        raise TypeError("not comparable")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (3, 4, "outputs['v'] differs: 3 in microbatch 0, 4 in microbatch 1."),
        ("a", None, "outputs['v'] differs: 'a' in microbatch 0, None in microbatch 1."),
        (torch.tensor(1), torch.tensor(2), "outputs['v'] differs: 1 in microbatch 0, 2 in microbatch 1."),
        (torch.tensor(1), 1, "outputs['v'] differs: 1 in microbatch 0, 1 in microbatch 1."),
        (1, True, "outputs['v'] differs: 1 in microbatch 0, True in microbatch 1."),
        (Odd(), Odd(), "outputs['v'] differs"),
    ],
)
def test_other_values_must_be_equal(one, other, message):
    with pytest.raises(JoinError, match=re.escape(message)):
        join([{"v": one}, {"v": other}], [1, 1])
    assert math.isnan(join([{"v": math.nan}, {"v": float("nan")}], [1, 1])["v"])
    assert join([torch.tensor(3), torch.tensor(3)], [2, 1]).item() == 3


def test_rows_on_another_axis_are_refused_with_the_line_to_type():
    with pytest.raises(JoinError) as caught:
        join([{"p": torch.zeros(3, 2)}, {"p": torch.ones(3, 2)}], [2, 2])
    assert str(caught.value) == (
        "outputs['p'] cannot be joined: the microbatches have [2, 2] rows, but axis 0 of the tensors has other sizes: "
        "[(3, 2), (3, 2)]. The tensors differ, so all are needed. Name the axis to join along, or pass a function:\n"
        "    RoundPipeRunConfig(merge_output={\"outputs['p']\": TensorChunkSpec(1)})\n"
        "    RoundPipeRunConfig(merge_output=lambda outputs: ...)"
    )


def test_shapes_that_do_not_go_together_are_named():
    message = "outputs[0]: shapes [(2, 3), (2, 4)] cannot be concatenated along axis 0"
    with pytest.raises(JoinError, match=re.escape(message)):
        join([[torch.zeros(2, 3)], [torch.zeros(2, 4)]], [2, 2])
    with pytest.raises(JoinError, match="outputs differs: "):
        join([torch.zeros(2), torch.ones(2)], [2, 2], merge=Replicate)


@pytest.mark.parametrize(("chunk", "whole"), [(TensorChunkSpec, Replicate), (TorchChunkSpec, _Replicate)])
def test_a_spec_says_how_to_join(chunk, whole):
    outputs = [(torch.zeros(3, 2), torch.zeros(2)), (torch.ones(3, 2), torch.zeros(2))]
    joined = join(outputs, [2, 2], merge=(chunk(1), whole))
    assert joined[0].shape == (3, 4)
    assert joined[1].shape == (2,)


def test_a_rule_for_one_key_path_leaves_the_others_alone():
    outputs = [{"p": torch.zeros(3, n), "y": torch.zeros(n)} for n in (2, 1)]
    joined = join(outputs, [2, 1], merge={"outputs['p']": TensorChunkSpec(1)})
    assert (joined["p"].shape, joined["y"].shape) == ((3, 3), (3,))


@pytest.mark.parametrize("merge", [sum, sum_reducer])
def test_a_function_or_a_reducer_of_torch_joins_as_it_likes(merge):
    """`sum_reducer`, which torch and RoundPipe's scripts import, is of a class below `_CustomReducer`."""
    assert join([torch.tensor(2.0), torch.tensor(3.0)], [1, 3], merge=merge) == 5


@pytest.mark.parametrize("merge", [{"outputs['z']": Replicate}, (Replicate, {"z": Replicate})])
def test_a_rule_for_a_path_that_is_not_there_is_refused(merge):
    with pytest.raises(JoinError, match=r"is not among the outputs\. The key paths are"):
        join([{"y": torch.zeros(1)}, {"y": torch.zeros(1)}], [1, 1], merge=merge)


@pytest.mark.parametrize(("outputs", "weights"), [([], []), ([1, 1], [1])])
def test_a_wrong_number_of_outputs_is_refused(outputs, weights):
    with pytest.raises(JoinError):
        join(outputs, weights)


def tensors(batch):
    tails = st.lists(st.integers(1, 4), max_size=2).map(tuple)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool])
    filled = st.builds(
        lambda tail, dtype: torch.arange(batch * math.prod(tail)).reshape(batch, *tail).to(dtype), tails, dtypes
    )
    broadcast = tails.map(lambda tail: torch.ones(1, *tail))
    other = st.integers(2, 40).filter(lambda size: size != batch).map(torch.zeros)
    return st.one_of(filled, filled, broadcast, other, st.just(torch.tensor(1.5)), st.just(torch.tensor(3)))


def caches(batch):
    def make(layers, length):
        shape = (batch, 2, length, 3)
        return make_dynamic_cache([(torch.randn(shape), torch.randn(shape)) for _ in range(layers)])

    decoder = st.builds(make, st.integers(1, 2), st.integers(1, 5))
    return st.one_of(decoder, st.builds(make_encoder_decoder_cache, decoder, decoder))


def model_outputs(children):
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

    return st.one_of(
        # with one field alone, transformers would take a dict in it for all fields
        st.builds(lambda x: BaseModelOutput(last_hidden_state=x, attentions=()), children),
        st.builds(lambda x, y: CausalLMOutputWithPast(logits=x, hidden_states=(y, x)), children, children),
    )


def trees(batch):
    plain = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.booleans(), st.floats(allow_nan=False))
    leaves = st.one_of(tensors(batch), tensors(batch), plain, caches(batch))

    def extend(children):
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=2), children, max_size=3),
            st.builds(Point, children, children),
            st.builds(TransformerOutput, children, children, st.floats(0, 1)),
            st.builds(FlexibleOutput, children),
            st.builds(FlexibleOutput, children, children),
            st.builds(BatchResult, st.lists(children, max_size=2), st.dictionaries(st.text(max_size=2), children)),
            st.builds(TrainState, children, children, children),
            st.builds(Dense, children, children, st.sampled_from(["relu", "tanh"])),
            model_outputs(children),
        )

    return st.recursive(leaves, extend, max_leaves=8)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@given(data=st.data(), batch=st.integers(1, 17), count=st.integers(1, 8))
@settings(max_examples=examples(60))
def test_join_undoes_split(data, batch, count):
    pytest.importorskip("transformers")
    tree = data.draw(trees(batch))
    with register_flattening_functions(patch_transformers=True):
        parts = split((torch.zeros(batch), tree), {}, torch.zeros(batch), count)
        joined = join([part.args[1] for part in parts], [part.rows for part in parts])
        expected, spec = pytree.tree_flatten(tree)
        found, found_spec = pytree.tree_flatten(joined)
    assert found_spec == spec
    assert all(map(same, found, expected))


def test_parts_whose_rows_are_not_known():
    """An average would be wrong for parts of unlike size. Equal values need none, unless they are trained."""
    one, other = torch.tensor(1.0), torch.tensor(3.0)
    with pytest.raises(JoinError, match="averaged, weighted by rows, but a microbatch's rows are unknown"):
        join([one, other], [None, None])
    assert join([one, one.clone()], [None, None]) == 1
    with pytest.raises(JoinError, match="are unknown"):
        join([one.clone().requires_grad_(), one.clone().requires_grad_()], [None, None])
    parts = [torch.ones(3), torch.ones(3)]
    with pytest.raises(JoinError, match=r"concatenate it \(one value per row\) or to keep it once"):
        join(parts, [None, None])
    assert join(parts, [None, None], merge=TensorChunkSpec(0)).shape == (6,)
    assert join(parts, [None, None], merge=Replicate).shape == (3,)


class Steps:
    """Steps on axis 0 and rows on axis 1, or a table without rows."""

    def __init__(self, steps):
        self.steps = steps


@pytest.mark.parametrize(("axes", "shape"), [({0: "length", 1: "batch"}, (3, 4)), ({0: "length"}, (3, 2))])
def test_a_class_is_joined_along_the_axis_that_it_declares_as_the_batch(axes, shape):
    """One that declares no batch has to be the same in all microbatches."""
    register_class_flattening(Steps, lambda s: ([s.steps], None), lambda c, _: Steps(*c), None, axes={"0": axes})
    try:
        assert join([Steps(torch.ones(3, 2)), Steps(torch.ones(3, 2))], [2, 2]).steps.shape == shape
    finally:
        unregister_class_flattening(Steps)
