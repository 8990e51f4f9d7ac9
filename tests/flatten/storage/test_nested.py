"""Nested values to a file and back, and random nests bit by bit."""

import collections
import os
import sys

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fresh_process
from tests.cache_words import WORD
from tests.flatten.storage.storage_values import TORCH_TYPES, Access, Mode, Pair, State, random_tensor, same
from yobx_flatten import (
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    load_case,
    load_nested,
    make_dynamic_cache,
    register_class_flattening,
    register_flattening_functions,
    save_case,
    save_nested,
    unregister_class_flattening,
)
from yobx_flatten.errors import InvalidArgumentError, MissingDependencyError, NotRegisteredError


def stored(values, path, **options):
    save_nested(path, values, **options)
    return load_nested(path)


def test_structure_static_data_and_every_kind_of_leaf_come_back(tmp_path):
    values = {
        "state": State(
            torch.ones(2), [None, 1, -(2**63), 2**70, 1.5, True, 1j, "é", "", b"\0\xff", "\ud800"], Mode.EVAL
        ),
        ("a", 1): Pair(collections.OrderedDict(x=1), collections.defaultdict(list, y=torch.zeros(1))),
        None: collections.deque([1, (2,)], maxlen=3),
        3: [Mode.TRAIN, Access.READ | Access.WRITE, torch.float16, torch.Size([2]), slice(1, None), {1, 2}, range(3)],
        "best": torch.max(torch.arange(4.0).reshape(2, 2), dim=0),
        "empty": [{}, [], ()],
    }
    back = stored(values, tmp_path / "x.onnx")
    assert same(back, values)
    assert type(back[3][3]) is torch.Size


ARRAYS = [
    numpy.arange(6, dtype=">i4").reshape(2, 3),
    numpy.zeros((0, 2)),
    numpy.array(2.5),
    numpy.float32(0.1),
    numpy.int8(-1),
    numpy.bool_(True),
    numpy.complex64(1 - 2j),
    numpy.str_("née"),
    numpy.bytes_(b"ab"),
    numpy.array(["a", "née", ""]),
    numpy.array(["\ud800"]),
    numpy.array([b"a", b"bcd"]),
    numpy.array([["a"], ["b"]], dtype=object),
    numpy.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    numpy.timedelta64(3, "ms"),
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    numpy.arange(10)[::3],
]


def test_an_array_of_numpy_comes_back(tmp_path):
    back = stored(ARRAYS, tmp_path / "x.onnx")
    for found, array in zip(back, ARRAYS, strict=True):
        assert same(found, array), f"{type(array).__name__} {numpy.asarray(array).dtype}"


def test_an_array_of_ml_dtypes_comes_back(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    arrays = [numpy.arange(4).astype(getattr(ml_dtypes, name)) for name in names]
    assert same(stored(arrays, tmp_path / "x.onnx"), arrays)


def test_one_tensor_in_two_places_is_stored_once_and_a_view_and_a_conjugate_by_value(tmp_path):
    tensor = torch.arange(1000.0)
    size = save_nested(tmp_path / "x.onnx", [tensor, {"again": tensor}])
    back = load_nested(tmp_path / "x.onnx")
    assert back[0] is back[1]["again"]
    assert 4000 < size < 6000
    values = [torch.arange(6).reshape(2, 3).t(), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]
    back = stored(values, tmp_path / "x.onnx")
    assert back[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back[0].is_contiguous()
    assert back[1].tolist() == [1 - 2j]
    assert back[2].tolist() == [-2.0]


def test_a_cache_goes_on_in_the_block_and_outside_of_it(tmp_path):
    cache = make_dynamic_cache([(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)) for _ in range(2)])
    outside = stored({"past_key_values": cache}, tmp_path / "a.onnx")["past_key_values"]
    with register_flattening_functions(patch_transformers=True):
        inside = stored({"past_key_values": cache}, tmp_path / "b.onnx")["past_key_values"]
        assert same(inside, cache)
        assert same(outside, cache)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert type(outside.layers[0]) is type(cache.layers[0])


def test_a_fresh_process_reads_a_cache_and_a_model_output(tmp_path):
    from transformers.modeling_outputs import CausalLMOutputWithPast

    cache = make_dynamic_cache([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))])
    save_nested(tmp_path / "x.onnx", CausalLMOutputWithPast(logits=torch.zeros(2), **{WORD: cache}))
    program = (
        "import sys; from yobx_flatten import load_nested; x = load_nested(sys.argv[1]);"
        f"print(type(x).__name__, x['{WORD}'].get_seq_length(), 'onnxruntime' in sys.modules)"
    )
    done = fresh_process.run("-c", program, tmp_path / "x.onnx")
    assert done.stdout == "CausalLMOutputWithPast 3 False\n"


class Secret:
    def __init__(self, x):
        self.x = x


def test_an_unregistered_object_is_refused_with_its_place(tmp_path):
    with pytest.raises(NotRegisteredError, match=r"(?s)a\.0\.b is a .*Secret.*1 tensor.*register\(Secret, .*\['x'\]\)"):
        save_nested(tmp_path / "x.onnx", {"a": [{"b": Secret(torch.zeros(1))}]})
    assert os.listdir(tmp_path) == []


def test_a_class_of_a_function_is_found_and_one_that_is_not_registered_any_more_is_named(tmp_path):
    class Local(Secret):
        pass

    for cls in (Secret, Local):
        register_class_flattening(cls, lambda s: ([s.x], None), lambda children, _, cls=cls: cls(*children), None)
        try:
            assert type(stored(cls(3), tmp_path / "x.onnx")) is cls
        finally:
            unregister_class_flattening(cls)
        with pytest.raises(NotRegisteredError, match=rf"\n    register_class_flattening\(.*{cls.__name__}, \.\.\.\)"):
            load_nested(tmp_path / "x.onnx")


def test_nothing_is_imported_that_a_file_names(tmp_path):
    (tmp_path / "strange.py").write_text(
        "import torch\nfrom yobx_flatten import pytree_dataclass\nprint('imported')\n"
        "@pytree_dataclass(backends=('torch',))\nclass Box:\n    x: object\n"
    )
    write = "import strange, yobx_flatten; yobx_flatten.save_nested('x.onnx', strange.Box(1))"
    read = "import yobx_flatten; yobx_flatten.load_nested('x.onnx')"
    for program in (write, read):
        done = fresh_process.run("-c", program, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "imported" not in done.stdout
    assert "import strange" in done.stderr


def test_without_onnx_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    line = r"save_nested needs onnx, which is not installed:\n    pip install .*\[onnx\]'"
    with pytest.raises(MissingDependencyError, match=line):
        save_nested(tmp_path / "x.onnx", torch.zeros(1))
    with pytest.raises(MissingDependencyError, match="load_nested needs onnx"):
        load_nested(tmp_path / "x.onnx")


MEMORY = """
import pathlib, sys, torch
from yobx_flatten import load_nested, save_nested

def memory(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

torch.set_num_threads(1)
start = memory("VmRSS")
if sys.argv[1] == "save":
    save_nested(sys.argv[2], [torch.full((10_000_000,), float(i)) for i in range(8)] + [torch.ones(2000, 5000).t()])
else:
    values = load_nested(sys.argv[2])
print(memory("VmHWM") - start - 9 * 40_000_000 / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_storing_and_reading_take_one_tensor_above_the_inputs(tmp_path):
    for what in ("save", "load"):
        done = fresh_process.run("-c", MEMORY, what, tmp_path / "x.onnx")
        assert float(done.stdout) < 40 + 200, what


def test_a_value_of_the_expected_class_comes_back_and_another_is_refused_with_the_line_to_type(tmp_path):
    path, values = str(tmp_path / "x.onnx"), collections.OrderedDict(x=torch.ones(2))
    save_nested(path, values)
    for expected in (dict, dict[str, torch.Tensor], collections.OrderedDict, object):
        assert same(load_nested(path, expected=expected), values)
    save_nested(path, [torch.ones(2)])
    with pytest.raises(InvalidArgumentError) as raised:
        load_nested(path, expected=dict[str, torch.Tensor])
    assert str(raised.value) == (
        f"load_nested: {path} contains a builtins.list, not the class in expected=. Pass the class of the value:\n"
        f"    load_nested({path!r}, expected=list)"
    )


@pytest.mark.parametrize("external", [False, True])
def test_a_case_comes_back(external, tmp_path):
    inputs, outputs = {"x": torch.ones(2), "state": State(1, None)}, (torch.zeros(3), [None])
    save_case(tmp_path / "case.onnx", inputs, outputs, name="two rows", external_data=external)
    case = load_case(tmp_path / "case.onnx")
    assert case.name == "two rows"
    assert same(case.inputs, inputs)
    assert same(case.outputs, outputs)


def test_the_graph_returns_inputs_and_outputs_and_what_is_both_is_stored_once(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    mask = torch.ones(1000)
    inputs, outputs = {"x": torch.ones(2), "mask": mask}, {"y": torch.zeros(3), "mask": mask}
    assert save_case(tmp_path / "case.onnx", inputs, outputs, name="n") < 6000
    case = load_case(tmp_path / "case.onnx")
    assert case.inputs["mask"] is case.outputs["mask"]
    session = runtime.InferenceSession(tmp_path / "case.onnx")
    names = [output.name for output in session.get_outputs()]
    assert names == ["inputs.x", "inputs.mask", "outputs.y", "name", "outputs.mask"]


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.builds(random_tensor, st.sampled_from(TORCH_TYPES), SHAPES, st.integers(0, 2**32))
NUMPY_TYPES = ["<f4", ">f8", "<f2", "<i8", ">u2", "|b1", "<c8", "|i1", "<M8[ns]"]


def random_array(dtype, shape, seed):
    # the bits of a bool are 0 and 1
    generator = numpy.random.default_rng(seed)
    array = generator.integers(0, 2, shape) if dtype == "|b1" else generator.integers(-100, 100, shape)
    return array.astype(dtype)


RANDOM_ARRAYS = st.one_of(
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


NESTS = st.recursive(st.one_of(TENSORS, RANDOM_ARRAYS, PYTHON), containers, max_leaves=12)


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
