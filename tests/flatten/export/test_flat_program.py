"""Programs: what a file states of their inputs, programs of other code, and decompositions."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import re

import pytest
import torch
from torch.export import Dim

from tests.cache_words import cache_of
from tests.models import WINDOW, make_model
from tests.modules import module_class, module_of
from yobx_flatten import Case, DecodeSizes, decode_inputs, export_program, prove_program
from yobx_flatten.declare import register_class_flattening, register_flattening_functions, unregister_class_flattening
from yobx_flatten.errors import InvalidArgumentError, ReplayError, SpecMismatchError
from yobx_flatten.export.exported_model import source_of
from yobx_flatten.export.flat_program import decompose_untranslated, flat_program, signature_of
from yobx_flatten.runners.open import open_runner
from yobx_flatten.runners.signature import Signature


def _masked(self, x, mask):
    """A mask read at the numbers of the rows, as in transformers, also with entries for an image before it."""
    rows = torch.arange(x.shape[0])[:, None]
    if self.image:
        mask = torch.cat([mask.new_ones(mask.shape[0], self.image), mask], dim=-1)
    padded = torch.nn.functional.pad(mask.to(torch.bool), (0, x.shape[1]))
    return (x * padded[rows, torch.arange(x.shape[1])[None]])[x.sum(1).sort()[1]]


@pytest.mark.parametrize("image", [0, 5])
def test_a_mask_is_of_any_length_where_it_is_padded_and_of_the_same_number_of_rows(image):
    """torch raises `IndexError` for fewer rows, and OpenVINO would return numbers."""
    free = {0: Dim.AUTO, 1: Dim.AUTO}
    given = {"x": torch.ones(2, 3), "mask": torch.ones(2, 4, dtype=torch.int64)}
    exported = export_program(
        module_of(_masked, image=image), (), given, dynamic_shapes={"x": free, "mask": free}, cases=[]
    )
    signature = signature_of(source_of(exported).traced)
    x = torch.ones(3, 5)
    for rows in (2, 4):
        with pytest.raises(InvalidArgumentError, match=f"mask has size {rows} in axis 0, and the file takes 3 there"):
            signature.bind({"x": x, "mask": torch.ones(rows, 5).long()}, InvalidArgumentError, "the file")
    for columns in (1, 4, 9):
        bound = signature.bind({"x": x, "mask": torch.ones(3, columns).long()}, InvalidArgumentError, "the file")
        assert [tensor.shape for tensor in bound] == [(3, 5), (3, columns)]


@pytest.mark.parametrize(("columns", "held"), [(5, 2), (9, 6), (10, 7), (30, 7)])
def test_a_sliding_cache_holds_what_the_mask_states(columns, held):
    sizes = [({"a": 1}, {"b": 1}), ({"a": 1}, {"c": 1}), ({"a": 1}, 2, {"d": 1}, 4)]
    key = "past_key_values.0.key"
    types = zip(("input_ids", "attention_mask", key), (torch.int64, torch.int64, torch.float32), sizes, strict=True)
    signature = Signature.from_json(Signature([*types], ["logits"], kept={key: 7}).to_json(), "the file")

    def bind(tokens):
        ids, mask = torch.zeros(1, 3).long(), torch.ones(1, columns).long()
        given = {"input_ids": ids, "attention_mask": mask, key: torch.ones(1, 2, tokens, 4)}
        return signature.bind(given, InvalidArgumentError, "the file")

    assert [tensor.shape[-2] for tensor in bind(held)] == [1, 1, held]
    with pytest.raises(InvalidArgumentError, match=f"{key} holds {held + 1} tokens, but the file needs {held} tok"):
        bind(held + 1)


def _positions(self, input_ids, attention_mask, past_key_values):
    """Positions that a mask states, as those of OPT: whatever its length is, there is one for each token."""
    columns, new = attention_mask.shape[1], input_ids.shape[1]
    torch._check(columns == past_key_values.shape[1] + new)
    places = torch.arange(new) + (columns - new)
    return self.positions(attention_mask.cumsum(1).index_select(1, places)), past_key_values


def _call(rows, past, new, columns):
    return {
        "input_ids": torch.ones(rows, new, dtype=torch.int64),
        "attention_mask": torch.ones(rows, columns, dtype=torch.int64),
        "past_key_values": torch.zeros(rows, past, 4),
    }


@pytest.fixture(scope="module")
def positions():
    given = _call(2, 5, 3, 8)
    free = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in given}
    module, one = module_of(_positions, positions=torch.nn.Embedding(32, 4)), Case("one", (), _call(1, 4, 1, 5))
    return export_program(module, (), given, dynamic_shapes=free, cases=[one])


@pytest.mark.parametrize("columns", [7, 9])
def test_what_a_program_asserts_of_sizes_is_asked_of_a_file(positions, columns):
    """A mask that is one token short or long: torch raises, and a runtime without assertions would return numbers."""
    signature = signature_of(source_of(positions).traced)
    assert Signature.from_json(signature.to_json(), "the file") == signature
    assert signature.bind(_call(1, 7, 1, 8), InvalidArgumentError, "the file")
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        positions.program.module()(**_call(3, 5, 3, columns))
    with pytest.raises(InvalidArgumentError, match="do not fit each other") as caught:
        signature.bind(_call(3, 5, 3, columns), InvalidArgumentError, "the file")
    stated = {"attention_mask.shape[1]", "input_ids.shape[1]", "past_key_values.shape[1]", str(columns), "3", "5"}
    assert stated < set(re.split(r"[ .]*(?:needs| == | \+ |, but found |\.$) ?", str(caught.value)))


@pytest.mark.parametrize(("suffix", "runtime"), [(".xml", "openvino"), (".onnx", "openvino"), (".onnx", "onnxruntime")])
def test_a_runtime_refuses_sizes_that_the_program_refuses(positions, tmp_path, suffix, runtime):
    """Neither has assertions: both would take the positions of other tokens."""
    pytest.importorskip(runtime)
    path = tmp_path / f"positions{suffix}"
    (positions.to_onnx if suffix == ".onnx" else positions.to_openvino)(path)
    runner = open_runner(path, runtime=runtime)
    with torch.no_grad():
        expected, _ = source_of(positions).example.module(**_call(3, 5, 2, 7))
    torch.testing.assert_close(runner.run(_call(3, 5, 2, 7))[runner.outputs[0]], expected)
    with pytest.raises(ReplayError, match="do not fit each other"):
        runner.run(_call(3, 5, 2, 6))


def test_a_program_without_assertions_hands_its_guards_on():
    """torch.export makes guards unless it is asked to defer them: here the length is at most ten times the width."""
    narrow = module_class("Narrow", lambda self, x, y: x.sum() if x.shape[1] <= 10 * y.shape[0] else y.sum())()
    free = ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO})
    given = (torch.ones(2, 3), torch.ones(4))
    with register_flattening_functions():
        program = torch.export.export(narrow, given, dynamic_shapes=free)
    signature = signature_of(source_of(prove_program(program, narrow, cases=[])).traced)
    assert signature.bind({"x": torch.ones(2, 40), "y": torch.ones(4)}, InvalidArgumentError, "the file")
    with pytest.raises(InvalidArgumentError, match=r"x.shape\[1\] <= 10 \* y.shape\[0\], but found 41 <= 10 \* 4"):
        signature.bind({"x": torch.ones(2, 41), "y": torch.ones(4)}, InvalidArgumentError, "the file")


def test_a_program_of_a_file_does_not_write_to_its_inputs_which_may_have_the_names_of_functions_of_python():
    """Like those of torchvision's models."""

    def counts(self, x, state):
        state.transpose(0, 1).copy_(state.transpose(0, 1) + x.sum())
        return state * 2, state

    given = {"x": torch.ones(2, 3), "state": torch.zeros(4, 2)}
    flat = flat_program(torch.export.export(module_of(counts), (), given))
    module, state = flat.module(), torch.full((4, 2), 5.0)
    doubled, after = module(torch.ones(2, 3), state)
    assert torch.equal(state, torch.full((4, 2), 5.0))
    assert torch.equal(after, torch.full((4, 2), 11.0))
    assert torch.equal(doubled, torch.full((4, 2), 22.0))
    product = module_class("Product", lambda self, input, max: input * max)()
    given = {"input": torch.arange(6.0).reshape(2, 3), "max": torch.full((2, 3), 2.0)}
    program = flat_program(torch.export.export(product, (), given)).run_decompositions()
    (found,) = program.module()(*given.values())
    torch.testing.assert_close(found, given["input"] * 2)


needs_exporters = pytest.mark.skipif(
    importlib.util.find_spec("transformers.exporters") is None, reason="transformers before 5.17 has no exporters"
)


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, factor=1.0):
        self.calls.add_(1)
        return {"scaled": x * self.weight * factor}


def export_scale():
    module, example = Scale().eval(), {"x": torch.ones(3, 2), "factor": 2.0}
    shapes = {"x": {0: Dim.AUTO(max=8)}, "factor": None}
    return module, torch.export.export(module, (), example, dynamic_shapes=shapes)


def rows(count):
    return Case(f"{count} rows", (), {"x": torch.arange(count * 2.0).reshape(count, 2), "factor": 2.0})


def test_a_program_of_torch_export_is_replayed_and_called_and_refused_for_another_module_or_without_an_example():
    module, program = export_scale()
    proven = prove_program(program, module, cases=[rows(7)])
    assert [(c.case, c.runtime, c.differences["scaled"]) for c in proven.report.cases] == [
        ("the example", "torch.export", 0.0),
        ("7 rows", "torch.export", 0.0),
    ]
    assert proven.program is program
    assert (proven.report.input_names, proven.report.output_names) == (["x"], ["scaled"])
    assert torch.equal(proven(x=torch.ones(1, 2), factor=2.0)["scaled"], torch.tensor([[4.0, 6.0]]))
    assert module.calls == 0
    other = Scale().eval()
    with torch.no_grad():
        other.weight += 1.0
    with pytest.raises(ReplayError, match=r"largest difference 2.0e\+00") as caught:
        prove_program(program, other)
    assert [case.case for case in caught.value.report.cases] == ["the example"]
    with pytest.raises(InvalidArgumentError, match=r"prove_program\(exported\.program, model\)"):
        prove_program(module, module)
    program._example_inputs = None
    with pytest.raises(InvalidArgumentError, match="has no example inputs"):
        prove_program(program, module)


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


@contextlib.contextmanager
def _pair_registered(static):
    register_class_flattening(Pair, lambda p: ([p.a, p.b], static), lambda children, _: Pair(*children), None)
    yield
    unregister_class_flattening(Pair)


def test_a_program_of_another_registration_is_refused():
    add = module_class("AddPair", lambda self, pair: pair.a + pair.b)()
    with _pair_registered("theirs"):
        program = torch.export.export(add, (), {"pair": Pair(torch.ones(2), torch.ones(2))})
    message = r"(?s)flattened differently.*theirs.*ours.*with register_flatt"
    with _pair_registered("ours"), pytest.raises(SpecMismatchError, match=message):
        prove_program(program, add)


@pytest.fixture(scope="module")
def traced():
    """Makes a program with their exporter, which registers subclasses of caches for good, also those of other tests."""
    from transformers.exporters import DynamoConfig, DynamoExporter, exporter_dynamo

    found = exporter_dynamo._iter_subclasses

    def export(model, kwargs):
        with register_flattening_functions(patch_transformers=True):
            exported = DynamoExporter().export(model, copy.copy(kwargs), DynamoConfig(dynamic=True))
            return getattr(exported, "program", exported)  # by the version of transformers

    with pytest.MonkeyPatch.context() as patch:
        known = lambda cls: (c for c in found(cls) if c.__module__.startswith("transformers."))  # noqa: E731
        patch.setattr(exporter_dynamo, "_iter_subclasses", known)
        yield export


@pytest.fixture(scope="module")
def mistral(traced):
    model = copy.deepcopy(make_model("mistral"))  # its exporter leaves a forward of its own on the model
    return prove_program(traced(model, decode_inputs(model, DecodeSizes())), model)


@pytest.fixture
def past_the_window():
    kwargs = decode_inputs(make_model("mistral"), DecodeSizes(3, 2 * WINDOW + 1, 2))
    with torch.no_grad():
        return kwargs, make_model("mistral")(**copy.deepcopy(kwargs))


@needs_exporters
def test_a_program_of_transformers_exporter_goes_past_the_window(mistral, past_the_window):
    """Its versions of sliding layers would keep all tokens; the cases of other sizes are the default."""
    assert [case.steps for case in mistral.report.cases] == [3] * 6
    assert mistral.report.max_difference < 2e-5
    kwargs, expected = past_the_window
    torch.testing.assert_close(mistral(**kwargs).logits, expected.logits, atol=2e-5, rtol=0)


@needs_exporters
def test_a_file_is_made_of_the_given_program_as_it_is(mistral, tmp_path):
    report = mistral.to_onnx(tmp_path / "model.onnx")
    assert report.input_names[-1] == "past_key_values.length"
    assert [case.error for case in report.cases] == [None] * 6
    assert "trace" not in report.seconds


@needs_exporters
@pytest.mark.slow
def test_the_cache_of_an_encoder_is_proven_also(traced):
    model = copy.deepcopy(make_model("t5"))
    proven = prove_program(traced(model, decode_inputs(model, DecodeSizes())), model)
    assert [case.steps for case in proven.report.cases] == [3] * 4
    assert proven.report.max_difference < 2e-5


@needs_exporters
@pytest.mark.filterwarnings("ignore:.treespec.children_specs. is deprecated:FutureWarning")  # in their runner
def test_transformers_saves_loads_and_calls_a_proven_program(mistral, past_the_window, tmp_path):
    from transformers.exporters import ExportedModel

    kwargs, expected = past_the_window
    with register_flattening_functions(patch_transformers=True):
        theirs = mistral.to_transformers()
        theirs.save_pretrained(tmp_path)
        # since 5.24 it asks before it loads a program, whose example inputs are pickled
        asks = "trust_remote_code" in inspect.signature(ExportedModel.from_pretrained).parameters
        found = ExportedModel.from_pretrained(tmp_path, **({"trust_remote_code": True} if asks else {}))(**kwargs)
    assert type(theirs) is ExportedModel
    assert theirs.program is mistral.program
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=0)
    assert cache_of(found).get_seq_length() == 2 * WINDOW + 3


@needs_exporters
@pytest.mark.slow  # exports two programs
def test_parts_of_a_generation_are_proven_in_the_sizes_that_they_take(traced):
    from transformers.exporters.utils import decompose_for_generation

    model = copy.deepcopy(make_model("llama"))
    ids = torch.randint(3, 90, (2, 5), generator=torch.Generator().manual_seed(0))
    cases, notes = {}, {}
    for stage, (part, example) in decompose_for_generation(model, {"input_ids": ids}).items():
        proven = prove_program(traced(part, example), part)
        cases[stage] = [case.case for case in proven.report.cases]
        notes[stage] = proven.report.remarks
    assert cases["decode"] == ["the example", "batch 3, past 6, new 1"]
    assert notes["decode"] == [
        "batch 1, past 9, new 3: not replayed, since the program has fixed axis 1 of input_ids at 1.",
        "batch 2, past 17, new 2, 3 padded: not replayed, since the program has fixed axis 1 of input_ids at 1.",
    ]
    sizes = ["batch 3, past 0, new 7", "batch 1, past 0, new 12", "batch 2, past 0, new 19, 3 padded"]
    assert cases["prefill"] == ["the example", *sizes]


@needs_exporters
def test_positional_arguments_are_refused_for_transformers():
    with pytest.raises(InvalidArgumentError, match="positional"):
        export_program(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).to_transformers()


ATEN = torch.ops.aten


def _mixed(self, x):
    """An operator to decompose (``__and__``), casts with and without effect, views, a chunk, an operator to keep."""
    y = self.linear(x.to(torch.float32))
    first, second = y.chunk(2, dim=-1)
    mask = (first > 0) & (second > 0)
    return mask.to(torch.float32).reshape(x.shape[0] * 3), first.transpose(0, 1).contiguous(), x.to(torch.float64)


def table():
    found = dict(torch.export.default_decompositions())
    for kept in (ATEN.linear.default, ATEN.transpose.int, ATEN.contiguous.default):
        found.pop(kept, None)
    return found | {ATEN.__and__.Tensor: lambda a, b: ATEN.bitwise_and.Tensor(a, b)}


def test_the_decomposed_program_computes_the_same_and_is_a_copy():
    module = module_of(_mixed, linear=torch.nn.Linear(4, 6))
    program = torch.export.export(module, (torch.randn(3, 4),), dynamic_shapes=({0: Dim.AUTO},))
    before = str(program.graph), str(program.graph_signature)
    found = decompose_untranslated(program, table())
    assert (str(program.graph), str(program.graph_signature)) == before
    targets = {node.target for node in found.graph.nodes if node.op == "call_function"}
    assert targets >= {ATEN.linear.default, ATEN.bitwise_and.Tensor}
    assert not targets & {ATEN.__and__.Tensor, ATEN.to.dtype, ATEN.chunk.default, ATEN.reshape.default}
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        state = [found.state_dict[name] for name in found.graph_signature.parameters]
        values = torch.fx.Interpreter(found.graph_module).run(*state, x)
        for value, expected in zip(values, module(x), strict=True):
            assert torch.equal(value, expected)
            assert value.dtype == expected.dtype


class InPlace(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = x * 2
        y[:, 0].add_(1)
        return y


class Counter(InPlace):
    def forward(self, x):
        self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize("module", [Counter(), InPlace()], ids=lambda module: type(module).__name__)
def test_a_program_that_writes_is_left_to_torch(module):
    """A node of it does not stand for itself."""
    assert decompose_untranslated(torch.export.export(module, (torch.randn(3, 4),)), table()) is None
