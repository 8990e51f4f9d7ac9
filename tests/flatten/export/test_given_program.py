"""A program that other code exported inside the block: replayed, written for runtimes, and handed to transformers."""

import copy
import importlib.util
import inspect

import pytest
import torch
from torch.export import Dim

from tests.cache_words import cache_of
from tests.models import WINDOW, make_model
from yobx_flatten import (
    Case,
    DecodeSizes,
    InvalidArgumentError,
    ReplayError,
    SpecMismatchError,
    decode_inputs,
    export_program,
    register_class_flattening,
    register_flattening_functions,
    unregister_class_flattening,
)
from yobx_flatten.export import prove_program

HAS_EXPORTERS = importlib.util.find_spec("transformers.exporters") is not None
needs_exporters = pytest.mark.skipif(not HAS_EXPORTERS, reason="transformers before 5.17 has no exporters")


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, factor=1.0):
        self.calls.add_(1)
        return {"scaled": x * self.weight * factor}


def export_scale():
    module = Scale().eval()
    shapes = {"x": {0: Dim.AUTO(max=8)}, "factor": None}
    program = torch.export.export(module, (), {"x": torch.ones(3, 2), "factor": 2.0}, dynamic_shapes=shapes)
    return module, program


def rows(count):
    return Case(f"{count} rows", (), {"x": torch.arange(count * 2.0).reshape(count, 2), "factor": 2.0})


def test_a_program_of_torch_export_is_replayed_and_called():
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


def test_a_program_of_another_module_is_refused():
    _, program = export_scale()
    other = Scale().eval()
    with torch.no_grad():
        other.weight += 1.0
    with pytest.raises(ReplayError, match=r"largest difference 2.0e\+00") as caught:
        prove_program(program, other)
    assert [case.case for case in caught.value.report.cases] == ["the example"]


def test_what_is_no_program_is_refused_with_the_line_to_type():
    with pytest.raises(InvalidArgumentError, match=r"prove_program\(exported\.program, model\)"):
        prove_program(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


def test_a_program_without_an_example_is_refused():
    module, program = export_scale()
    program._example_inputs = None
    with pytest.raises(InvalidArgumentError, match="has no example inputs"):
        prove_program(program, module)


class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b


class AddPair(torch.nn.Module):
    def forward(self, pair):
        return pair.a + pair.b


def _register_pair(static):
    register_class_flattening(Pair, lambda p: ([p.a, p.b], static), lambda children, _: Pair(*children), None)


def test_a_program_of_another_registration_is_refused():
    """Both sides are shown: its spec holds the static part of the registration of that moment."""
    _register_pair("theirs")
    try:
        program = torch.export.export(AddPair(), (), {"pair": Pair(torch.ones(2), torch.ones(2))})
    finally:
        unregister_class_flattening(Pair)
    _register_pair("ours")
    try:
        with pytest.raises(SpecMismatchError, match=r"(?s)registered differently.*theirs.*ours.*with register_flatt"):
            prove_program(program, AddPair())
    finally:
        unregister_class_flattening(Pair)


# -- transformers.exporters --------------------------------------------------------------------------------------------


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
    """Nothing is traced again: the counter of sliding layers stays an input."""
    report = mistral.to_onnx(tmp_path / "model.onnx")
    assert report.input_names[-1] == "past_key_values.length"
    assert [case.error for case in report.cases] == [None] * 6
    assert "trace" not in report.seconds


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
@pytest.mark.slow  # each exports a model
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_other_caches_are_proven_also(traced, name):
    model = copy.deepcopy(make_model(name))
    proven = prove_program(traced(model, decode_inputs(model, DecodeSizes())), model)
    assert [case.steps for case in proven.report.cases] == [3] * 4
    assert proven.report.max_difference < 2e-5


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
    assert cases["prefill"] == [
        "the example",
        "batch 3, past 0, new 7",
        "batch 1, past 0, new 12",
        "batch 2, past 0, new 19, 3 padded",
    ]


@needs_exporters
def test_positional_arguments_are_refused_for_transformers():
    with pytest.raises(InvalidArgumentError, match="positional"):
        export_program(torch.nn.Linear(2, 2), (torch.ones(2, 2),)).to_transformers()
