"""The leaves as torch sees them and `dynamic_shapes` written from the inputs; what an export is given by mistake."""

import dataclasses
import operator
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch.export import Dim
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

from tests.cache_words import WORD, cache_of
from tests.flatten.nodes import Dense
from tests.models import make_model, start
from tests.modules import module_class, module_of
from yobx_flatten import Case, check_inputs, export_onnx, export_program, functions_from_fields, record_calls, register
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import DynamicShapesError, InvalidArgumentError, NotRegisteredError
from yobx_flatten.huggingface import DecodeSizes, decode_inputs, make_dynamic_cache, make_encoder_decoder_cache
from yobx_flatten.trees import check_dynamic_shapes, dynamic_shapes, leaves, make_dynamic_shapes_kv_cache
from yobx_flatten.trees.walk import leaf_names, leaves_of, match, output_names, plain_names

AUTO = Dim.AUTO
# before 5.10 or so transformers hands the positions to a static layer, which does not count itself
HAS_POSITION = hasattr(StaticLayer(4), "cumulative_length")


def test_plain_inputs_vary_along_every_axis_and_numbers_do_not():
    inputs = {"x": torch.zeros(2, 3), "many": [torch.zeros(4), (1, "a", None)], "flag": True, "scalar": torch.tensor(1)}
    assert dynamic_shapes(inputs) == {
        "x": {0: AUTO, 1: AUTO},
        "many": [{0: AUTO}, (None, None, None)],
        "flag": None,
        "scalar": {},
    }


def test_a_cache_varies_in_batch_and_length_only():
    """The length of a static cache is fixed by configuration; the tensor it counts with has no axis."""
    keys = {0: AUTO, 2: AUTO}
    assert dynamic_shapes({"c": start("gemma3").cache}) == {"c": [keys] * 6}
    assert dynamic_shapes({"c": start("mistral").cache}) == {"c": [*[keys] * 4, {}]}
    static = dynamic_shapes({"c": start("llama", static=True).cache})
    assert static == {"c": [{0: AUTO}, {0: AUTO}, *([{}] if HAS_POSITION else [])] * 2}
    assert dynamic_shapes((start("t5").cache,)) == ([[keys] * 4, [keys] * 4],)


@pytest.mark.parametrize("name", ["SummedLayer", "XLayer", "JointLayer", "LSTMLayer", "LXLayer", "S", "X16", "LS8"])
def test_a_layer_of_ones_own_grows_whatever_its_name_begins_with(name):
    cache = DynamicCache()
    cache.layers = [type(name, (DynamicLayer,), {})()]
    cache.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
    assert dynamic_shapes({"c": cache}) == {"c": [{0: AUTO, 2: AUTO}] * 2}


def test_the_block_is_not_needed_to_write_shapes():
    kwargs = decode_inputs(make_model("gemma2"), DecodeSizes())
    outside = dynamic_shapes(kwargs)
    with register_flattening_functions(patch_transformers=True):
        assert dynamic_shapes(kwargs) == outside


def test_overrides_replace_what_is_below_their_path():
    kwargs = {"x": torch.zeros(2, 3), "c": start("llama").cache}
    shapes = dynamic_shapes(kwargs, {"x": {0: Dim.DYNAMIC}, "c.value_0": None})
    assert shapes["x"] == {0: Dim.DYNAMIC}
    assert shapes["c"][:2] == [{0: AUTO, 2: AUTO}, None]
    assert dynamic_shapes(kwargs, {"c": None})["c"] is None
    with pytest.raises(DynamicShapesError, match=r"\['input_id'\] is not among the inputs(.|\n)*'input_ids'"):
        dynamic_shapes({"input_ids": torch.zeros(2, 3)}, {"input_id": None})


def test_one_shape_for_all_keys_and_values():
    one = {0: "batch", 2: "length"}
    assert make_dynamic_shapes_kv_cache(start("llama").cache, one) == [one] * 4
    assert make_dynamic_shapes_kv_cache(start("mistral").cache, one) == [*[one] * 4, None]
    static = make_dynamic_shapes_kv_cache(start("llama", static=True).cache, {0: "b"})
    assert static == [{0: "b"}, {0: "b"}, *([None] if HAS_POSITION else [])] * 2
    assert make_dynamic_shapes_kv_cache(start("bart").cache, one) == [[one] * 4, [one] * 4]
    with pytest.raises(DynamicShapesError, match=r"expected a KV cache, found builtins\.list"):
        make_dynamic_shapes_kv_cache([1], one)


def test_named_dims_of_the_helper_are_what_torch_takes():
    model, kwargs = make_model("llama"), decode_inputs(make_model("llama"), DecodeSizes(2, 5, 3))
    batch, past, new = Dim("batch"), Dim("past"), Dim.DYNAMIC
    shapes = {
        "input_ids": {0: batch, 1: new},
        "attention_mask": {0: batch, 1: Dim.DYNAMIC},
        WORD: make_dynamic_shapes_kv_cache(cache_of(kwargs), {0: batch, 2: past}),
    }
    check_dynamic_shapes(kwargs, shapes)
    other = decode_inputs(model, DecodeSizes(3, 9, 2))
    with register_flattening_functions(patch_transformers=True):
        program = torch.export.export(model, (), kwargs, dynamic_shapes=shapes)
        with torch.no_grad():
            found = program.module()(**other).logits
    with torch.no_grad():
        other = decode_inputs(model, DecodeSizes(3, 9, 2))
        torch.testing.assert_close(found, model(**other).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {5: AUTO}, "l": None, "n": None}, r"x: the specification names axis 5.*\(2, 3\)"),
        ({"x": [AUTO], "l": None, "n": None}, r"x: expected one entry for each of the 2 axes"),
        ({"x": AUTO, "l": None, "n": None}, r"x: expected a dict \{axis: Dim\}"),
        ({"x": {0: 3.5}, "l": None, "n": None}, r"x\.0: expected a Dim"),
        ({"x": None, "l": None}, r"the inputs: .*Missing: \['n'\]"),
        ({"x": None, "l": None, "n": None, "y": None}, r"the inputs: .*unknown: \['y'\]"),
        ([None], r"the inputs: expected a dict"),
        ({"x": None, "l": [None], "n": None}, r"l: list has 2 children .*'1'\], but .* has entries for 1"),
        ({"x": None, "l": {0: None}, "n": None}, r"l: expected a list with 2 entries"),
        ({"x": None, "l": None, "n": {0: AUTO}}, r"n: expected None for the bool True"),
        ({"x": None, "l": [{0: Dim.DYNAMIC}, None], "n": None}, r"l\.0: axis 0 should vary, but has size 1"),
    ],
)
def test_a_specification_that_does_not_fit_is_refused_with_its_key_path(shapes, message):
    inputs = {"x": torch.zeros(2, 3), "l": [torch.zeros(1), torch.zeros(2)], "n": True}
    with pytest.raises(DynamicShapesError, match=message):
        check_dynamic_shapes(inputs, shapes)
    cache = {"past": start("mistral").cache}
    with pytest.raises(DynamicShapesError, match=r"kwargs\.past: DynamicCache has 5 children .*'length'\].* for 4"):
        check_dynamic_shapes({"kwargs": cache}, {"kwargs": {"past": [None] * 4}})


def test_bounds_hold_for_all_leaves_of_one_meaning():
    inputs = decode_inputs(make_model("mistral"), DecodeSizes(2, 5, 3))
    shapes = dynamic_shapes(inputs, bounds={"batch": 4, "length": 32})
    assert [dim.max for dim in shapes["input_ids"].values()] == [4, 32]
    assert [[dim.max for dim in entry.values()] for entry in shapes[WORD]] == [[4, 32]] * 4 + [[]]


@pytest.mark.parametrize("most", [4, 2])  # torch would make a constant of a range from 2 to 2
def test_a_bound_is_part_of_the_program(most):
    shapes = dynamic_shapes((torch.ones(2, 3),), bounds={"batch": most})
    with register_flattening_functions():
        program = torch.export.export(torch.nn.ReLU(), (torch.ones(2, 3),), dynamic_shapes=shapes)
    assert max(most, 3) in [found.upper for found in program.range_constraints.values()]
    assert [len(program.module()(torch.ones(rows, 7))) for rows in (1, most)] == [1, most]
    with pytest.raises((AssertionError, RuntimeError), match=str(max(most, 3))):
        program.module()(torch.ones(5, 7))


@pytest.mark.parametrize("bounds", [{"rows": 4}, {"batch": 1}, {"length": 8.0}])
def test_what_is_no_bound_and_an_example_above_one_are_refused(bounds):
    with pytest.raises(InvalidArgumentError, match="expected largest sizes of 2 or more for 'batch' and 'length'"):
        dynamic_shapes({"x": torch.ones(5, 3)}, bounds=bounds)
    with pytest.raises(DynamicShapesError, match=r"x\.axis 0: size 5 of the example is above the bound 4 of 'batch'"):
        dynamic_shapes({"x": torch.ones(5, 3)}, bounds={"batch": 4})


def test_paths_are_python():
    tree = {"a": [1, (2,)], "p": namedtuple("Point", "x y")(3, 4), "d": Dense(5, 6)}
    assert [(leaf.path, leaf.value) for leaf in leaves(tree, name="batch")] == [
        ("batch['a'][0]", 1),
        ("batch['a'][1][0]", 2),
        ("batch['p'].x", 3),
        ("batch['p'].y", 4),
        ("batch['d'].weights", 5),
        ("batch['d'].bias", 6),
    ]
    tree = {"b": 1, "a": [None, {"x": 2}], "c": ()}
    assert [leaf.value for leaf in leaves(tree)] == pytree.tree_leaves(tree)
    assert [tuple(leaf) for leaf in leaves(3, name="label")] == [("label", 3, None)]


def test_a_cache_says_what_its_axes_mean():
    cache = make_dynamic_cache([(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))])
    with register_flattening_functions(patch_transformers=True):
        both = make_encoder_decoder_cache(
            cache, make_dynamic_cache([(torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4))])
        )
        found = {leaf.path: leaf.axes for leaf in leaves({"x": torch.zeros(2), "cache": both})}
    assert found.pop("tree['x']") is None
    assert list(found.values()) == [{0: "batch", 2: "length"}] * 4
    assert [leaf.value for leaf in leaves([cache])] == [cache]  # outside of the block: as torch does now


class TimeMajor:
    def __init__(self, steps, mask):
        self.steps, self.mask = steps, mask


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_registration_declares_axes(with_keys):
    functions = functions_from_fields(TimeMajor, ["steps", "mask"])
    key = "steps" if with_keys else "0"
    register_class_flattening(
        TimeMajor, functions[0], functions[2], functions[1] if with_keys else None, axes={key: {1: "batch"}}
    )
    try:
        found = [leaf.axes for leaf in leaves(TimeMajor(torch.zeros(7, 4), torch.zeros(4)))]
    finally:
        unregister_class_flattening(TimeMajor)
    assert found == [{1: "batch"}, None]


def test_what_holds_itself_is_refused_with_its_place():
    twice = [1]
    assert [leaf.path for leaf in leaves([twice, twice, [], []])] == ["tree[0][0]", "tree[1][0]"]
    tree = {"a": [1]}
    tree["a"].append(tree)
    with pytest.raises(InvalidArgumentError, match=r"^batch\['a'\]\[1\] is batch itself(.|\n)*\n    batch"):
        leaves(tree, name="batch")


@dataclasses.dataclass
class Linked:
    x: Any
    parent: Any = None


@pytest.fixture
def linked():
    register(Linked, backends="torch")
    yield
    unregister_class_flattening(Linked)


def _cyclic() -> Linked:
    node = Linked([torch.ones(2), Linked(torch.zeros(2))])
    node.x[1].parent = node
    return node


Adds = module_class("Adds", lambda self, node: node.x[0] + 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda node: dynamic_shapes({"node": node}),
        lambda node: check_dynamic_shapes({"node": node}, {"node": [[{0: "n"}, None], None]}),
        lambda node: export_program(Adds(), (node,)),
        lambda node: export_program(Adds(), kwargs={"node": node}, dynamic_shapes=None),
    ],
)
def test_an_object_that_holds_itself_is_refused_by_path(linked, call):
    with pytest.raises(InvalidArgumentError, match=r"(?s)node.*\.x\[1\]\.parent is .*node.* itself.*\.parent = None"):
        call(_cyclic())
    module = Adds()
    with pytest.raises(InvalidArgumentError, match=r"\.x\[1\]\.parent is .* itself"), record_calls(module):
        module(_cyclic())
    (finding,) = check_inputs(module, (_cyclic(),)).errors
    assert finding.path == "node.x[1].parent"
    assert "node.x[1].parent is node itself" in finding.message


def test_leaves_of_a_decoder_have_the_names_of_onnx_generation_tools():
    kwargs = decode_inputs(make_model("mistral"), DecodeSizes())
    assert leaf_names(kwargs) == [
        "input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value", "past_key_values.1.key",
        "past_key_values.1.value", "past_key_values.length",
    ]  # fmt: skip
    with torch.no_grad():
        outputs = make_model("llama")(input_ids=torch.ones(1, 3, dtype=torch.int64))
    names = output_names(outputs)
    assert names == ["logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"]
    names = leaf_names({WORD: start("t5").cache})
    assert names[:2] == ["past_key_values.0.decoder.key", "past_key_values.0.decoder.value"]
    assert names[-1] == "past_key_values.1.encoder.value"


def test_names_are_unique_and_as_many_as_leaves():
    trees = [
        {"a": [1, {"b": None}], "c": (2, 3)},
        {WORD: start("gemma3", static=True).cache},
        {WORD: start("bart").cache, "x": torch.zeros(1)},
    ]
    with register_flattening_functions(patch_transformers=True):
        for tree in trees:
            names = leaf_names(tree)
            assert len(names) == len(set(names)) == len(torch.utils._pytree.tree_leaves(tree))


@pytest.mark.parametrize(
    ("graph", "spellings", "expected"),
    [
        (["a", "b"], [["b"], ["a"]], {"a": 1, "b": 0}),
        (["past_key_w8_0"], [["past.0.key", "past.key_W8_0"]], {"past_key_w8_0": 0}),
        (["a"], [["b"], ["a"], ["c"]], {"a": 1}),
        (["linear", "cat"], [["logits"], ["present.0"]], {"linear": 0, "cat": 1}),
        (["logits", "cat"], [["logits"], ["present.0"]], {"logits": 0}),
        (["x", "y"], [["x"], ["1"]], {"x": 0, "y": 1}),
        (["cat", "logits"], [["logits"], ["present.0"]], {"logits": 0}),
        (["a", "z"], [["a"], ["b"], ["c"]], {"a": 0}),
        (["a.b", "a_b"], [["a_b"], ["a.b"]], {"a.b": 1, "a_b": 0}),
        ([], [["a"]], {}),
    ],
)  # fmt: skip
def test_names_come_first_then_the_order(graph, spellings, expected):
    assert match(graph, spellings) == expected


def test_leaves_are_named_by_their_paths():
    inputs = {"input_ids": 1, "extra": [2, {"a": 3}]}
    assert leaf_names(inputs) == plain_names(inputs) == ["input_ids", "extra.0", "extra.1.a"]
    cache = make_dynamic_cache([(torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1))])
    found = {"input_ids": torch.zeros(1), "past_key_values": cache}
    # keys alone are what `torch.export` uses: `past_key_values_key_0` once dots are underscores
    assert plain_names(found) == ["input_ids", "past_key_values.key_0", "past_key_values.value_0"]
    assert [leaf.sum().item() for leaf in leaves_of(found)] == [0, 0, 2]
    assert leaf_names({"cache": [{"key": 1, "value": 2}]}) == ["past_key_values.0.key", "past_key_values.0.value"]
    assert (output_names(3), output_names((1, 2))) == (["output"], ["output.0", "output.1"])
    outputs = {"logits": 1, "cache": [{"key": 2, "value": 3}]}
    assert output_names(outputs) == ["logits", "present.0.key", "present.0.value"]
    taken = ["input_ids", "attention_mask"]
    assert output_names({"logits": 1, "attention_mask": 2}, taken) == ["logits", "output.attention_mask"]


Scale = module_class("Scale", lambda self, x, by=None: x if by is None else x * by)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((len, (X,)), r"module: expected a torch\.nn\.Module, found the builtin_"),
        ((Scale(), X), r"args: expected a tuple .* found the Tensor .*\n    args=\(x,\)"),
        ((Scale(), (), [X]), r"kwargs: expected a dict .* found the list"),
        ((Scale(), (X,), {"to": X}), r"Scale\.forward .* 'to'\. Its parameters are x, by\."),
        ((Scale(),), r"Scale\.forward cannot be called .* missing .* 'x'"),
    ],
)
def test_what_is_no_module_or_does_not_fit_its_forward_is_refused(given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        export_program(*given)
    with pytest.raises(InvalidArgumentError, match=r"cases\[0\]: expected a Case, found the dict(.|\n)*cases=\[Case\("):
        export_program(Scale(), (X,), cases=[{"x": 1}])
    opaque = r"by\['deep'\]\[1\] is a .*Opaque, .*\n    register_class_flattening\(Opaque,"
    with pytest.raises(NotRegisteredError, match=opaque):
        export_program(Scale(), (X,), {"by": {"deep": [X, type("Opaque", (), {})()]}})


@pytest.mark.parametrize("place", ["x", "x[0]"])
def test_a_call_with_an_array_prints_the_line_that_converts_it(place):
    """torch states that an integer cannot be called."""

    takes = module_class("Takes", lambda self, x: (x[0] if place == "x[0]" else x) * 2)()
    array = torch.full((5, 3), 2.0).numpy()
    exported = export_program(takes, ([X] if place == "x[0]" else X,))
    given = [array] if place == "x[0]" else array
    with pytest.raises(NotRegisteredError, match=rf"{re.escape(place)} is a numpy\.ndarray.*Pass a tensor") as caught:
        exported(given)
    tensor = eval(str(caught.value).splitlines()[-1], {"torch": torch, "x": given})
    assert torch.equal(exported([tensor] if place == "x[0]" else tensor), torch.full((5, 3), 4.0))


def test_a_single_case_is_a_list_of_one():
    case = Case("five rows", (torch.ones(5, 3),))
    given, listed = (export_program(Scale(), (X,), cases=cases) for cases in (case, [case]))
    assert [found.case for found in given.report.cases] == ["the example", "five rows"]
    assert given.report.input_names == listed.report.input_names


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("all", r'dynamic_shapes: expected "auto", None, or a dict with the keys \[\'x\'\], found the str'),
        (({}, {}), r"dynamic_shapes: found 2 entries for 1 inputs, \['x'\]"),
        ({"y": None}, r"the keys of the inputs, \['x'\]\. Missing: \[\]; unknown: \['y'\]"),
    ],
)
def test_dynamic_shapes_that_name_other_inputs_are_refused(shapes, message):
    with pytest.raises(DynamicShapesError, match=message):
        export_program(Scale(), (X,), dynamic_shapes=shapes)


def test_another_error_of_the_trace_stays_as_it_is():
    """A `ValueError` of the model is not ours to explain."""

    class Refuses(torch.nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        export_program(Refuses(), (X,))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"past": -1}, {"new": 0}, {"padding": -1}, {"source": 2.0}])
def test_sizes_that_no_call_can_have_are_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=f"DecodeSizes: {next(iter(wrong))} must be an int of"):
        DecodeSizes(**wrong)
    with pytest.raises(InvalidArgumentError, match=r"an empty cache \(batch 2, past 0, new 3\)"):
        decode_inputs(make_model("llama"), DecodeSizes(past=0))
    with pytest.raises(InvalidArgumentError, match=r"Scale is not a Hugging Face model(.|\n)*cases=\[Case\("):
        decode_inputs(Scale(), DecodeSizes())


VARIES = {0: Dim.AUTO, 1: Dim.AUTO}


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Holder:
    pair: Any


def adds(find):
    return module_of(lambda self, given: operator.add(*find(given)))


def _pair(rows: int) -> Pair:
    return Pair(torch.ones(rows, 3), torch.full((rows, 3), float(rows)))


def _default(rows: int):
    found = defaultdict(list)
    found["x"], found["y"] = _pair(rows)
    return found


INPUTS = {
    "a named tuple": (lambda rows: _pair(rows), lambda given: (given.x, given.y)),
    "in a dataclass": (lambda rows: Holder(_pair(rows)), lambda given: (given.pair.x, given.pair.y)),
    "in a dict and a list": (lambda rows: {"a": [_pair(rows)]}, lambda given: (given["a"][0].x, given["a"][0].y)),
    "what torch returns": (lambda rows: torch.max(torch.rand(rows, 3, 4), dim=1), lambda given: (given[0], given[1])),
    "an ordered dict": (lambda rows: OrderedDict(_pair(rows)._asdict()), lambda given: (given["x"], given["y"])),
    "a default dict": (_default, lambda given: (given["x"], given["y"])),
    "a deque": (lambda rows: deque(_pair(rows), 2), lambda given: (given[0], given[1])),
}


@pytest.fixture(autouse=True)
def registered():
    register(Holder)
    yield
    unregister_class_flattening(Holder)


@pytest.mark.parametrize("kind", INPUTS)
def test_an_export_takes(kind):
    make, find = INPUTS[kind]
    given = make(2)
    check_dynamic_shapes((given,), dynamic_shapes((given,)))
    exported = export_program(adds(find), (given,), cases=[Case("five", (make(5),))])
    assert exported.report.ok
    other = make(7)
    assert torch.equal(exported(other), sum(find(other)))


@pytest.mark.parametrize("kind", ["a named tuple", "in a dataclass", "in a dict and a list"])
def test_so_do_an_onnx_file_and_recorded_calls(kind, tmp_path):
    make, find = INPUTS[kind]
    module = adds(find)
    cases = [Case("five", (make(5),))]
    assert export_onnx(module, (make(2),), path=tmp_path / "pair.onnx", cases=cases).report.ok
    with record_calls(module) as calls:
        module(make(2))
        module(make(4))
    shapes = calls.dynamic_shapes()
    exported = export_program(calls.module(), kwargs=calls.example(), dynamic_shapes=shapes, cases=[])
    assert calls.replay(exported)


def test_the_specification_has_the_type_that_torch_wants():
    """The tuple's own, also in a registered class, which itself stands as a list."""
    assert dynamic_shapes((_pair(2),)) == (Pair(VARIES, VARIES),)
    (written,) = dynamic_shapes((Holder(_pair(2)),))
    assert type(written) is list
    assert type(written[0]) is Pair
    assert dynamic_shapes(({"size": torch.Size([2, 3])},)) == ({"size": (None, None)},)
    expands = module_class("Expands", lambda self, x, size: x.expand(size))()
    exported = export_program(expands, (torch.ones(3), torch.Size([2, 3])), cases=[])
    assert exported(torch.ones(3), torch.Size([2, 3])).shape == (2, 3)


@pytest.mark.parametrize(
    ("given", "shapes", "message"),
    [
        (_pair(2), [VARIES, VARIES], r"given: expected a Pair with 2 entries for \['x', 'y'\], found \["),
        ((1, 2), [None, None], "given: expected a tuple with 2 entries"),
        ([1, 2], (None, None), "given: expected a list with 2 entries"),
    ],
)
def test_another_container_is_refused_by_path(given, shapes, message):
    with pytest.raises(DynamicShapesError, match=message):
        check_dynamic_shapes({"given": given}, {"given": shapes})
