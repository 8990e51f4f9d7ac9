"""Nested values to a file and back, and random nests bit by bit."""

import collections
import dataclasses
import os
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests import fresh_process
from tests.cache_words import WORD
from tests.flatten.storage.storage_values import TORCH_TYPES, Access, Mode, Pair, State, random_tensor, same
from yobx_flatten import (
    DamagedFileError,
    create_input_tensors_from_onnx_model,
    create_onnx_model_from_input_tensors,
    load_case,
    load_nested,
    make_dynamic_cache,
    save_case,
    save_nested,
)
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import InvalidArgumentError, MissingDependencyError, NotRegisteredError, StaticDataError
from yobx_flatten.storage.structure import flatten_tree, load_trusted, unflatten_tree


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
        assert same(stored({"past_key_values": cache}, tmp_path / "b.onnx")["past_key_values"], cache)
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
    assert fresh_process.run("-c", program, tmp_path / "x.onnx").stdout == "CausalLMOutputWithPast 3 False\n"


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
        assert float(fresh_process.run("-c", MEMORY, what, tmp_path / "x.onnx").stdout) < 40 + 200, what


def test_a_value_of_the_expected_class_comes_back_and_another_is_refused_with_the_line_to_type(tmp_path):
    path, values = str(tmp_path / "x.onnx"), collections.OrderedDict(x=torch.ones(2))
    save_nested(path, values)
    for expected in (dict, dict[str, torch.Tensor], collections.OrderedDict, object):
        assert same(load_nested(path, expected=expected), values)
    save_nested(path, [torch.ones(2)])
    with pytest.raises(InvalidArgumentError) as raised:
        load_nested(path, expected=dict[str, torch.Tensor])
    assert str(raised.value) == (
        f"load_nested: {path} contains a builtins.list, but expected= is another class. Pass the class of the value:\n"
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


@pytest.mark.parametrize(
    "data",
    [
        {"!flag": ["os:system", "touch broken"]},
        {"!flag": ["tests.flatten.storage.test_nested:trap", 1]},
        {"!enum": ["os:environ", "HOME"]},
        {"!namedtuple": ["subprocess:Popen", [["touch", "broken"]]]},
        {"!namedtuple": ["builtins:tuple", [1]]},
        {"!config": ["tests.flatten.storage.test_nested:Trap", "{}"]},
        {"!dataclass": ["subprocess:Popen", {}]},
        {"!class": "os:system"},
        {"!function": "os:system"},
        {"!function": "builtins:eval"},
        {"!function": "tests.flatten.storage.test_nested:sys.exit"},
        {"!function": "torch.serialization:os.system"},
        {"!constant": "os:environ"},
        {"!numpy": ["os:system", "00"]},
        {"!numpy_dtype": "os:system"},
        {"!dtype": "load"},
        {"!dtype": ["float32"]},
        {"!enum": []},
        {"!enum": 3},
        {"!tuple": 3},
        {"!device": "nowhere"},
        {"a": [{"b": {"!flag": ["os:system", "touch broken"]}}]},
        {"!tuple": [{"!flag": ["os:system", "touch broken"]}]},
        {"!no_such_kind": 1},
        {"!class": "logging:FileHandler"},
        {"!class": "tests.flatten.storage.test_nested:dataclasses.Field"},  # a name that the module imported
        {"!dataclass": ["tests.flatten.storage.test_nested:Ends", {}]},
        {"!config": ["transformers:LlamaConfig", '{"auto_map": {"AutoConfig": "a--b.C"}}']},
        {"!config": ["tests.flatten.storage.test_nested:Trap", "[]"]},
        {"!namedtuple": ["tests.flatten.storage.storage_values:Pair", [1]]},
    ],
    ids=repr,
)
def test_a_name_of_another_kind_and_what_could_act_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedFileError):
        load_trusted(data)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_not_imported_stays_so(tmp_path, monkeypatch):
    (tmp_path / "a_stranger.py").write_text("raise SystemExit('it was imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = r"d of the module a_stranger, which is not imported.*\n    import a_stranger"
    with pytest.raises(NotRegisteredError, match=wanted):
        load_trusted({"!enum": ["a_stranger:d", "a"]})
    name = "transformers.models.no_such_model.modeling_no_such_model"  # a known library without the module
    with pytest.raises(NotRegisteredError, match=rf"{name}.*\n    pip install transformers"):
        load_trusted({"!class": f"{name}:Thing"})
    assert "a_stranger" not in sys.modules


@pytest.mark.parametrize(
    "module",
    [
        "numpy.f2py.__main__", "numpy.no_such_part", "torch.utils.bottleneck.__main__", "transformers.commands.serving",
        "transformers.models.llama.convert_llama_weights_to_hf", "transformers.models.llama.modeling_mistral",
        "diffusers.commands.env", "diffusers.models.__main__", "antigravity",
    ],
)  # fmt: skip
def test_no_other_module_is_imported(module):
    """Not even one of a library that is installed: some act when they are imported."""
    with pytest.raises(NotRegisteredError, match="imports only modules of known libraries"):
        load_trusted({"!class": f"{module}:Thing"})
    assert module not in sys.modules


@dataclasses.dataclass
class Options:
    mode: str = "a"


class Ends:
    def __del__(self):
        TRACES.append(self)


TRACES = []


@pytest.mark.parametrize("field", ["__class__", "__dict__", "other", "_mode"])
def test_a_dataclass_takes_its_fields_only(field):
    """`__class__` among them would make it an object of any class."""
    name = "tests.flatten.storage.test_nested"
    assert load_trusted({"!dataclass": [f"{name}:Options", {"mode": "b"}]}) == Options("b")
    with pytest.raises(DamagedFileError, match=f"{field}.*which its class lacks"):
        load_trusted({"!dataclass": [f"{name}:Options", {field: {"!class": f"{name}:Ends"}}]})
    assert TRACES == []


def trap(value):
    raise AssertionError("called")


class Trap:
    """No class of configurations: it cannot be stored, only made."""

    @classmethod
    def from_dict(cls, values):
        raise AssertionError("called")


def fake():
    with FakeTensorMode():
        return torch.zeros(2)


class Tagged(torch.Tensor):
    pass


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: torch.eye(2).to_sparse(), "tensor.to_dense()"),
        (lambda: torch.eye(2).to_sparse_csr(), "tensor.to_dense()"),
        (lambda: torch.zeros(2, device="meta"), "torch.zeros_like(tensor, device='cpu')"),
        (fake, "torch.zeros(tensor.shape, dtype=tensor.dtype)  # outside its mode"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), "tensor.dequantize()"),
        (lambda: nested(torch.strided), "list(tensor.unbind())"),
        (lambda: nested(torch.jagged), "list(tensor.unbind())"),
        (lambda: torch.ones(2).as_subclass(Tagged), "tensor.as_subclass(torch.Tensor)"),
    ],
    ids=["sparse", "csr", "meta", "fake", "quantized", "strided", "jagged", "subclass"],
)
def test_the_line_makes_what_can_be_stored(make, line):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    with pytest.raises(InvalidArgumentError) as caught:
        flatten_tree({"a": [tensor]})
    kind = "Tagged, which would be loaded as a torch.Tensor" if "subclass" in line else "and cannot be stored directly"
    assert re.match(rf"a\.0, a tensor of type .*{kind}", str(caught.value))
    assert str(caught.value).endswith(f". Store instead:\n    {line}")
    flatten_tree({"a": eval(line, {"torch": torch, "tensor": tensor, "list": list})})


class Loud:
    def __repr__(self):
        raise RuntimeError("its own business")


def test_other_leaves_and_what_holds_itself_are_refused_with_their_place():
    """A `__repr__` that raises does not hide the message; a cycle would end in a RecursionError."""
    with pytest.raises(StaticDataError, match="a Loud, whose __repr__ raises RuntimeError at a,"):
        flatten_tree({"a": Loud()})
    with pytest.raises(StaticDataError, match=r"generator.* at a\.0"):
        flatten_tree({"a": [(x for x in [])]})
    values = {"x": [torch.ones(1)]}
    values["x"].append(values)
    with pytest.raises(InvalidArgumentError, match=r"^values\['x'\]\[1\] is values itself"):
        flatten_tree(values)


@pytest.mark.parametrize(
    "array",
    [
        numpy.array([object()], dtype=object),
        numpy.zeros(2, dtype=[("a", "i4")]),
        numpy.ma.masked_array([1, 2], [True, False]),
        numpy.ma.masked_array(["a", "b"], [True, False]),
        numpy.zeros(2, dtype=numpy.longdouble),
    ],
    ids=["objects", "structured", "masked", "masked text", "longdouble"],
)
def test_an_array_without_counterpart_is_refused(array):
    with pytest.raises(InvalidArgumentError, match=r"^a\.0 is a .*which ONNX does not have"):
        flatten_tree({"a": [array]})


def test_an_array_of_jax_is_refused_with_the_line_to_type():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with pytest.raises(InvalidArgumentError, match=r"^a is a JAX array.*\n    numpy\.asarray\(array\)"):
        flatten_tree({"a": jax.numpy.zeros(2)})


def test_a_contiguous_tensor_is_not_copied():
    flatten_tree([torch.nn.Parameter(torch.ones(2)), torch.nn.Buffer(torch.ones(2))])  # both are tensors
    tensor = torch.zeros(3)
    (payload,) = flatten_tree(tensor).payloads
    tensor += 1
    assert numpy.frombuffer(payload.data(), "float32").tolist() == [1, 1, 1]
    assert payload.nbytes == 12
    payload.data()[:4] = numpy.float32(2.0).tobytes()
    assert tensor.tolist() == [2, 1, 1]


def test_the_json_names_classes_and_leaves():
    found = flatten_tree({"x": torch.ones(2, 3), "state": State(1.5, None, Mode.EVAL)})
    assert found.json == {
        "node": "builtins:dict",
        "static": ["x", "state"],
        "children": [
            {"leaf": "torch", "name": "x", "dtype": "float32", "shape": [2, 3]},
            {
                "node": "tests.flatten.storage.storage_values:State",
                "static": {"!tuple": [{"!enum": ["tests.flatten.storage.storage_values:Mode", "EVAL"]}]},
                "children": [{"leaf": "float", "name": "state.hidden"}, {"leaf": "static", "value": None}],
            },
        ],
    }


@dataclass
class Strict:
    x: Any


def strict_unflatten(children, static):
    if static != "new":
        raise KeyError(static)
    return Strict(*children)


def test_a_registration_that_changed_is_named():
    register_class_flattening(Strict, lambda obj: ([obj.x], "old"), strict_unflatten, None)
    try:
        json_ = flatten_tree(Strict(None)).json
        with pytest.raises(DamagedFileError, match=r"Strict cannot be rebuilt.*KeyError: 'old'.*Register the class"):
            unflatten_tree(json_, None, "cpu")
    finally:
        unregister_class_flattening(Strict)
