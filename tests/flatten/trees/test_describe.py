"""`string_type` says in one line what an object is made of, and never fails to."""

import collections
import dataclasses
import enum
import logging
import math

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from transformers import BatchEncoding, LlamaConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
)
from transformers.modeling_outputs import BaseModelOutput

from tests import fresh_process
from tests.flatten.other_libraries import forget
from tests.modules import module_class
from yobx_flatten import make_dynamic_cache, make_static_cache
from yobx_flatten.trees.describe import _ELEMENT_TYPES, string_type

NAN = math.nan


def described(obj, **options):
    return string_type(obj, with_shape=True, with_min_max=True, **options)


@pytest.mark.parametrize(
    ("obj", "text", "with_shape"),
    [
        (torch.zeros(2, 4, 3, 7), "T1r4", "T1s2x4x3x7"),
        (torch.nn.Parameter(torch.zeros(2)), "T1r1", "T1s2"),
        (np.zeros((2, 3), dtype=np.int64), "A7r2", "A7s2x3"),
        (np.array(["a"]), "A8r1", "A8s1"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "A0r1", "A0s1"),
        (torch.empty(2, dtype=torch.bfloat16), "T16r1", "T16s2"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "T23r1", "T23s2"),
        (torch.empty(2, dtype=torch.float8_e8m0fnu), "T24r1", "T24s2"),
        (torch.empty(2, dtype=torch.int1), "T0r1", "T0s2"),
    ],
)
def test_tensors_and_arrays_show_the_code_of_onnx_and_their_rank_or_shape(obj, text, with_shape):
    assert (string_type(obj), string_type(obj, with_shape=True)) == (text, with_shape)


def test_the_codes_are_those_of_onnx():
    known = set(onnx.TensorProto.DataType.values())
    theirs = {
        code: onnx.helper.tensor_dtype_to_np_dtype(code).name
        for code in _ELEMENT_TYPES.values()
        if code and code in known
    }
    assert len(theirs) > 20
    assert {name: _ELEMENT_TYPES[name] for name in theirs.values()} == {v: k for k, v in theirs.items()}
    for name in ("float16", "float32", "float64", "bool", "int8", "uint64", "complex128"):
        assert _ELEMENT_TYPES[name] == onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name))


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_values_are_minimum_maximum_and_average(make):
    letter, floats = ("T", "T1") if make is torch.tensor else ("A", "A11")
    assert described(make([0.5, 6.0, 4.0])).endswith("s3[0.5,6.0:A3.5]")
    assert described(make([1, 2, 6])) == f"{letter}7s3[1,6:A3.0]"
    assert described(make([True, False])) == f"{letter}9s2[False,True:A0.5]"
    assert string_type(make([1, 2, 6]), with_min_max=True) == f"{letter}7r1[1,6:A3.0]"
    # NaNs are counted and left out
    assert described(make([NAN, 1.0, 3.0])) == f"{floats}s3[1.0,3.0:A2.0N1nans]"
    assert described(make([NAN, NAN])) == f"{floats}s2[N2nans]"
    assert described(make([[], [], []])) == f"{floats}s3x0[empty]"
    assert described(make(3)) == f"{letter}7s=3"
    assert string_type(make(NAN), with_min_max=True) == f"{floats}r0=nan"


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor([1, 3]).to(torch.uint16), "T4s2[1,3:A2.0]"),
        (torch.tensor([1, 3]).to(torch.uint64), "T13s2[1.0,3.0:A2.0]"),
        (torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn), "T17s2[1.0,3.0:A2.0]"),
        (torch.tensor([1.0, 3.0]).to(torch.bfloat16), "T16s2[1.0,3.0:A2.0]"),
        (torch.tensor([3 + 4j, 0j]), "T14s2[0.0,5.0:A2.5]"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), "T23s2"),
        (torch.zeros(2, device="meta"), "T1s2"),
        (torch.tensor(3.5, requires_grad=True), "T1s=3.5"),
        (torch.tensor([math.inf, -math.inf]), "T1s2[-inf,inf:Anan]"),  # and no warning
        (np.array([math.inf, -math.inf]), "A11s2[-inf,inf:Anan]"),
        (np.array([3 + 4j, 0]), "A15s2[0.0,5.0:A2.5]"),
        (np.array(["a", "b"]), "A8s2"),
    ],
)
def test_values_of_unusual_types_are_shown_where_they_can_be_read(tensor, text):
    assert described(tensor) == text


def test_the_device_comes_first():
    assert string_type(torch.zeros(2), with_device=True) == "CT1r1"
    assert described([torch.ones(2)], with_device=True) == "#1[CT1s2[1.0,1.0:A1.0]]"
    with FakeTensorMode():
        elsewhere = torch.empty(2, device="cuda")
    assert string_type(elsewhere, with_shape=True, with_device=True) == "GF1s2"


def test_fake_tensors_show_symbolic_dimensions_and_no_values():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.zeros(5, 3))
    assert described(fake) == f"F1s{fake.shape[0]}x{fake.shape[1]}"
    with mode:
        longer = torch.cat([fake, fake.new_zeros(1, fake.shape[1])])
    text = described([longer, longer.shape[0]])
    assert text == f"#2[F1s{fake.shape[0]}+1x{fake.shape[1]},SymInt]"


def test_describing_leaves_no_trace_in_an_exported_program():
    texts = []

    model = module_class("Model", lambda self, x: texts.append(described(x)) or x + 1)()
    program = torch.export.export(model, (torch.ones(2, 3),), strict=False)
    assert all(text.endswith("1s2x3") for text in texts)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.add.Tensor]
    assert string_type(list(program.graph.nodes)) == "#3[%x,%aten.add.Tensor,%output]"


Pair = collections.namedtuple("Pair", "a b")


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("obj", "kind", "value"),
    [
        (None, "None", "None"),
        (3, "int", "int=3"),
        (True, "bool", "bool=True"),
        (2.5, "float", "float=2.5"),
        (1j, "complex", "complex=1j"),
        (np.float64(2.5), "float64", "float64=2.5"),
        ("text", "str", "str"),
        (np.str_("text"), "str", "str"),
        (b"text", "bytes", "bytes"),
        (slice(1, 2), "slice", "slice"),
        (Color.RED, "Color.RED", "Color.RED"),
        (torch.float32, "dtype(torch.float32)", "dtype(torch.float32)"),
        (np.dtype("float32"), "dtype(float32)", "dtype(float32)"),
        (torch.device("cpu"), "device(cpu)", "device(cpu)"),
        (torch.nn.Linear(1, 2), "Linear(...)", "Linear(...)"),
        (dict, "type(dict)", "type(dict)"),
        (range(3), "range(...)", "range(...)"),
        (pytree.SequenceKey(1), "SequenceKey(idx=1)", "SequenceKey(idx=1)"),
    ],
)
def test_scalars_show_their_type_and_their_value_on_demand(obj, kind, value):
    assert string_type(obj) == kind
    assert string_type(obj, with_min_max=True) == value


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        (Dim("batch"), "Dim(batch)"),
        (2 * Dim("half"), "DerivedDim"),
        (Dim.AUTO, "AUTO"),
        (Dim.DYNAMIC, "DYNAMIC"),
        (Dim.STATIC, "DimHint(STATIC)"),
        (Dim.DYNAMIC(min=2, max=5), "DimHint(DYNAMIC, min=2, max=5)"),
        ({0: "batch", 1: Dim.AUTO, 2: Dim("x")}, "{0:DYN(batch),1:AUTO,2:Dim(x)}"),
        ({"a": {0: Dim.DYNAMIC}, "b": ({},)}, "dict(a:{0:DYNAMIC},b:({},))"),
        ({0: "batch", 1: None}, "{0:str,1:None}"),
        ((), "()"),
        ((1,), "(int,)"),
        ((1, 2.0), "(int,float)"),
        (Pair(1, "b"), "(int,str)"),
        ([], "#0[]"),
        ([1, ["r", 6.6]], "#2[int,#2[str,float]]"),
        (set(), "{}"),
        ({1, "a", None}, "{None,int,str}"),
        (frozenset([1]), "{int}"),
        ({}, "{}"),
        ({"a": 1, "b": None}, "dict(a:int,b:None)"),
        ({1: 1, 0: "a"}, "{1:int,0:str}"),
        ({1: 1, "b": 2}, "dict(1:int,b:int)"),
        ({"two\nlines": 1}, "dict(two lines:int)"),
        ({0: "two\nlines"}, "{0:DYN(two lines)}"),
        (collections.OrderedDict(a=1), "OrderedDict(a:int)"),
        (collections.defaultdict(list, {0: 1}), "defaultdict(0:int)"),
        (collections.UserDict(a=1), "UserDict(a:int)"),
        (collections.deque([1, 2.0]), "deque(int, float)"),
    ],
)
def test_dynamic_shapes_read_as_dynamic_shapes_and_containers_show_their_children(obj, text):
    assert string_type(obj) == text


@pytest.mark.parametrize(
    ("obj", "plain", "values"),
    [
        (list(range(25)), "#25[int,...]", "#25[int=0,...][0,24:12.0]"),
        (tuple(range(20)), "#20(int,...)", "#20(int=0,...)[0,19:A[9.5]]"),
        (["a"] * 20, "#20[str,...]", "#20[str,...]"),
        (set(range(12)), "{...}#12", "{...}#12[0,11:A5.5]"),
    ],
)
def test_long_containers_are_cut(obj, plain, values):
    assert string_type(obj, with_shape=True) == plain
    assert string_type(obj, with_min_max=True) == values


def test_the_limit_is_the_first_length_that_is_cut():
    assert string_type([1, 2], limit=3) == "#2[int,int]"
    assert string_type([1, 2, 3], limit=3) == "#3[int,...]"
    assert string_type([[], (), [1]], limit=0) == "#3[#0[],...]"
    assert string_type(((), []), limit=0) == "#2((),...)"


@dataclasses.dataclass
class Batch:
    ids: object
    mask: object = None


def test_dataclasses_show_the_fields_that_hold_something():
    assert string_type(Batch(torch.ones(2, 3)), with_shape=True) == "Batch(ids:T1s2x3)"
    assert string_type(Batch([1], {})) == "Batch(ids:#1[int],mask:{})"
    assert string_type(Batch(None)) == "Batch()"


class Opaque:
    def __init__(self, *children):
        self.children = children


@pytest.fixture
def node_class():

    class Node(Opaque):
        pass

    pytree.register_pytree_node(
        Node,
        lambda node: (list(node.children), None),
        lambda children, _: Node(*children),
        serialized_type_name="test_describe.Node",
    )
    yield Node
    forget(Node)


def test_a_registered_class_shows_its_children(node_class):
    node = node_class(torch.ones(2), [1, node_class()])
    assert string_type(node, with_shape=True) == "Node(T1s2, #2[int,Node()])"


def test_a_child_that_fails_hides_only_itself(node_class):

    class Broken(node_class):
        @property
        def __class__(self):
            raise ValueError("not today")

    bad = node_class()
    del bad.children
    assert string_type([1, bad, Broken(), 2.0]) == "#4[int,Node(...),Broken(...),float]"
    for ignore in (False, True):
        assert string_type([Opaque(1), 1], ignore=ignore) == "#2[Opaque(...),int]"


def test_cycles_end_and_deep_nesting_ends_in_dots():
    loop = [1]
    loop.append({"again": loop, "batch": Batch(loop)})
    assert string_type(loop) == "#2[int,dict(again:<cycle>,batch:Batch(ids:<cycle>))]"
    twice = [1]
    assert string_type((twice, twice)) == "(#1[int],#1[int])"
    deep = 1
    for _ in range(10_000):
        deep = [deep]
    assert string_type(deep) == "#1[" * 100 + "..." + "]" * 100


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.complex_numbers(),
    lambda children: (
        st.lists(children)
        | st.lists(children).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), children)
    ),
)


@given(TREES, st.booleans(), st.integers(0, 4))
def test_every_tree_gives_one_line(tree, flag, limit):
    text = string_type(tree, with_shape=flag, with_min_max=flag, limit=limit)
    assert text
    assert text.splitlines() == [text]


def pair(*shape):
    return torch.ones(*shape), torch.ones(*shape)


def test_a_cache_shows_the_class_of_every_layer():
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=3)]
    for index in range(2):
        cache.update(*pair(2, 4, 3, 7), index)
    cache.layers[1].keys = cache.layers[1].values = torch.ones(2, 4, 3, 7)
    assert string_type(cache, with_shape=True) == (
        "DynamicCache(DynamicLayer(T1s2x4x3x7, T1s2x4x3x7), DynamicSlidingWindowLayer(T1s2x4x3x7, T1s2x4x3x7))"
    )
    assert string_type(cache.layers[0]) == "DynamicLayer(keys=T1r4, values=T1r4)"


def test_layers_not_filled_yet_show_none():
    cache = DynamicCache()
    assert string_type(cache) == "DynamicCache()"
    cache.layers = [DynamicLayer()]
    assert string_type(cache) == "DynamicCache(DynamicLayer(None, None))"
    static = StaticCache.__new__(StaticCache)
    static.layers = [StaticLayer(max_cache_len=4)]
    static.layers[0].update(*pair(1, 2, 1, 3), cache_kwargs={"cache_position": torch.tensor([0])})
    assert string_type(static, with_shape=True) == "StaticCache(StaticLayer(T1s1x2x4x3, T1s1x2x4x3))"
    inner = DynamicCache()
    inner.update(*pair(1, 2, 3, 4), 0)
    assert string_type(EncoderDecoderCache(inner, DynamicCache())) == (
        "EncoderDecoderCache(self_attention_cache=DynamicCache(DynamicLayer(T1r4, T1r4)), "
        "cross_attention_cache=DynamicCache())"
    )


def test_a_cache_of_equal_layers_may_be_written_as_two_lists():
    pairs = [(torch.zeros(2, 4, 3, 7), torch.zeros(2, 4, 3, 7))]
    full, static = make_dynamic_cache(pairs), make_static_cache(pairs)
    lists = "(key_cache=#1[T1s2x4x3x7], value_cache=#1[T1s2x4x3x7])"
    assert string_type(full, with_shape=True, caches="lists") == f"DynamicCache{lists}"
    assert string_type([static], with_shape=True, caches="lists") == f"#1[StaticCache{lists}]"
    mixed = make_dynamic_cache(pairs * 2, ["DynamicLayer", "DynamicSlidingWindowLayer"])
    assert string_type(mixed, caches="lists") == string_type(mixed)


def test_a_value_of_onnxruntime_shows_type_and_shape():
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([[0.0, 2.0, 4.0]], dtype=np.float32))
    for one in (value, value._get_c_value()):
        assert string_type(one) == "OV1r2"
        assert string_type([one], with_shape=True) == "#1[OV1s1x3]"
        assert string_type(one, with_shape=True, with_device=True) == "COV1s1x3"
        assert string_type(one, with_shape=True, with_min_max=True) == "OV(A1s1x3[0.0,4.0:A2.0])"
    bfloat16 = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ones(2, np.uint16), 16)
    assert string_type(bfloat16, with_shape=True, with_min_max=True) == "OV16s2"


def test_layers_without_keys_show_their_states():

    class Cache:
        pass

    class HybridCache(Cache):
        pass

    class LinearLayer:
        def __init__(self):
            self.conv_states = {0: torch.ones(2, 3), 1: None}
            self.recurrent_states = {0: None}
            self.counter = torch.tensor([4])

    class IndexedLayer(LinearLayer):
        def __init__(self):
            self.keys = self.values = torch.ones(1, 2)
            self.index = torch.ones(3, 4)

    cache = HybridCache()
    cache.layers = [LinearLayer(), IndexedLayer(), Opaque()]
    assert string_type(cache, with_shape=True) == (
        "HybridCache(LinearLayer(conv_states={0:T1s2x3,1:None}), IndexedLayer(T1s1x2, T1s1x2, index=T1s3x4), Opaque())"
    )
    assert string_type(Cache()) == "Cache(...)"


def test_model_outputs_show_their_fields_and_batches_their_data():
    output = BaseModelOutput(last_hidden_state=torch.ones(2, 3), attentions=(torch.ones(1),))
    assert string_type(output, with_shape=True) == ("BaseModelOutput(last_hidden_state:T1s2x3,attentions:(T1s1,))")
    assert string_type(BatchEncoding({"ids": [1]})) == "BatchEncoding(data=dict(ids:#1[int]))"
    assert string_type(LlamaConfig()) == "LlamaConfig(...)"


def test_verbose_reaches_the_handlers_and_prints_nothing(caplog, capsys):
    logger = logging.getLogger("yobx_flatten")
    before = logger.level
    string_type([1])
    assert not caplog.records
    string_type([1], verbose=1)
    assert [record.getMessage() for record in caplog.records] == ["string_type: a list", "string_type: a int"]
    assert logger.level == before
    assert capsys.readouterr() == ("", "")


def test_optional_libraries_are_not_imported():
    code = (
        "import sys, torch, yobx_flatten.trees.describe as d\n"
        "d.string_type([torch.ones(2), 1, object()], with_min_max=True)\n"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'onnx', 'jax')))"
    )
    fresh_process.run("-c", code)
