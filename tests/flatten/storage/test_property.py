"""Random nests come back bit by bit, from memory and from files."""

import collections

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.flatten.storage.storage_values import TORCH_TYPES, Access, Mode, Pair, State, random_tensor, same
from yobx_flatten import (
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    load_nested,
    save_nested,
)

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.builds(random_tensor, st.sampled_from(TORCH_TYPES), SHAPES, st.integers(0, 2**32))
NUMPY_TYPES = ["<f4", ">f8", "<f2", "<i8", ">u2", "|b1", "<c8", "|i1", "<M8[ns]"]


def random_array(dtype, shape, seed):
    # the bits of a bool are 0 and 1
    generator = numpy.random.default_rng(seed)
    array = generator.integers(0, 2, shape) if dtype == "|b1" else generator.integers(-100, 100, shape)
    return array.astype(dtype)


ARRAYS = st.one_of(
    st.builds(random_array, st.sampled_from(NUMPY_TYPES), SHAPES, st.integers(0, 2**32)),
    st.lists(st.text(), max_size=3).map(lambda texts: numpy.array(texts, dtype="U")),
    st.floats(width=32).map(numpy.float32),
)
PYTHON = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(), st.binary(),
    st.sampled_from([*Mode, Access.READ | Access.WRITE, torch.bfloat16, torch.device("cpu"), slice(1, 2)]),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.none(), st.sampled_from(Mode), st.tuples(st.integers(), st.text()))


def containers(children):
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(KEYS, children, max_size=4),
        st.dictionaries(st.text(), children, max_size=3).map(collections.OrderedDict),
        st.lists(children, max_size=3).map(collections.deque),
        st.builds(Pair, children, children),
        st.builds(State, children, children, st.sampled_from(Mode)),
    )


NESTS = st.recursive(st.one_of(TENSORS, ARRAYS, PYTHON), containers, max_leaves=12)


@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(NESTS)
def test_a_random_nest_comes_back_from_a_model_in_memory(nest):
    model = create_onnx_model_from_input_tensors(nest)
    assert same(create_input_tensors_from_onnx_model(type(model).FromString(model.SerializeToString())), nest)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(NESTS, st.booleans())
def test_a_random_nest_comes_back_from_a_file(tmp_path, nest, external):
    save_nested(tmp_path / "x.onnx", nest, external_data=external)
    assert same(load_nested(tmp_path / "x.onnx"), nest)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(NESTS)
def test_a_random_nest_runs_in_onnxruntime(nest):
    runtime = pytest.importorskip("onnxruntime")
    model = create_onnx_model_from_input_tensors(nest)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert len(session.run(None, {})) == len(model.graph.output)
