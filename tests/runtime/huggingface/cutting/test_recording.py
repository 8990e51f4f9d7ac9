"""Record the calls of a model on an example, and stand-ins for layers and values."""

import contextlib
import dataclasses
import pickle
import threading
import types
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe_runtime.huggingface import CutError, CutReport, Equivalence
from roundpipe_runtime.huggingface.adapters import example_inputs
from roundpipe_runtime.huggingface.cutting import call_log, cut_plan
from roundpipe_runtime.huggingface.cutting.call_log import CallLog, CallSpec, Tree, candidates
from roundpipe_runtime.huggingface.cutting.cut_plan import CutPlan, begin, device_of
from roundpipe_runtime.huggingface.cutting.pieces import live
from roundpipe_runtime.huggingface.cutting.stub import Key, NeedsValue, Placeholder, copy_with_stubs, running
from tests.runtime.huggingface.hf_small import Block, Toy, hf_model, tokens

A, B, C = Key(-1, 0), Key(0, 0), Key(-1, 1)


def tree(*leaves):
    return Tree(pytree.tree_structure([0] * len(leaves)), leaves)


def test_values_live_until_their_last_use():
    log = CallLog().record({0: CallSpec(tree(A)), 2: CallSpec(tree(B, C))})
    values = {A: torch.ones(1), B: torch.ones(2), C: torch.ones(3), Key(2, 0): torch.ones(4)}
    assert set(live(values, log, 0, CutPlan([], []))) == {B, C}
    assert set(live(values, log, 2, CutPlan([], [], keep=frozenset({A})))) == {A}
    captured = dataclasses.replace(log, results={2: tree(None)}, captured={2: tree(Key(2, 0))})
    assert set(live(values, captured, 2, CutPlan([], []))) == {Key(2, 0)}


def test_boxes_are_what_layers_could_write():
    assert [call_log.is_box(one) for one in (UserDict(), [], (1,), torch.ones(1))] == [True, True, False, False]
    shared, held = UserDict({"a": 1}), [1]
    assert call_log.box_content(shared) == {"a": 1}
    call_log.fill_box(shared, {"b": 2})
    call_log.fill_box(held, [2, 3])
    assert (dict(shared), held) == ({"b": 2}, [2, 3])


def test_the_outermost_lists_are_found_the_largest_first():
    """A Sequential counts where its children are alike and made of parts."""

    class Layer(Block):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    model = nn.ModuleDict(
        {
            "small": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "layers": nn.ModuleList([Layer(), Layer()]),
            "single": nn.ModuleList([nn.Linear(99, 99)]),
            "acts": nn.ModuleList([nn.ReLU(), nn.ReLU()]),
            "stack": nn.Sequential(Block(), Block()),
            "mlp": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        }
    )
    assert [found.path for found in candidates(model)] == ["layers", "stack", "small"]
    assert list(candidates(model)[0].layers) == ["layers.0", "layers.1"]


def test_the_device_of_a_call_is_that_of_its_tensors():
    """The first tensor tells it, however deep; a call without one runs on the host."""
    assert device_of(((), {"x": [None, torch.ones(1, device="meta")]})) == torch.device("meta")
    assert device_of(((), {"n": 3})) == torch.device("cpu")


def test_later_phases_draw_the_same_numbers_on_the_device_and_on_the_host(monkeypatch):
    """transformers draws on the CPU which layers it drops, wherever the batch is."""
    seeds = []
    generator = types.SimpleNamespace(manual_seed=seeds.append, initial_seed=lambda: 7)
    monkeypatch.setattr(cut_plan, "_generator", lambda call: generator)
    outside = torch.get_rng_state()
    try:
        begin((torch.ones(1),), {}, torch.nn.Identity()).restart_noise()
        drawn = torch.rand(3)
    finally:
        torch.set_rng_state(outside)
    assert seeds == [7]
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_an_example_has_padding_in_one_of_two_rows_and_what_the_forward_takes():
    made = example_inputs(hf_model("llama"))
    assert made["input_ids"].shape == made["attention_mask"].shape == (2, 12)
    assert made["attention_mask"].sum(1).tolist() == [9, 12]
    assert set(example_inputs(Toy())) == {"input_ids"}
    assert set(example_inputs(hf_model("seq2seq:t5"))) == {"input_ids", "attention_mask", "decoder_input_ids"}


def test_a_report_in_words():
    report = CutReport(
        "Model", ("layers",), ("phase 0", "layers.0", "layers.1", "phase 1"),
        (1_000_000, 2_000_000, 2_000_000, 500_000), Equivalence(0.0, 1.5e-8, "head.weight", 12),
        (("structure", "no way"),),
    )  # fmt: skip
    assert (report.phases, report.is_whole) == (2, False)
    assert str(report).splitlines() == [
        "Model: 4 pieces, 2 calls of layers in layers, 2 phases",
        "largest piece: 2 MB of 5.5 MB",
        "on the example: outputs differ by 0.0e+00, the gradients of 12 parameters by 1.5e-08",
        "not split in another way, structure: no way",
    ]


def test_errors_survive_a_process():
    error = pickle.loads(pickle.dumps(CutError("copy", "cannot be copied")))
    assert (error.reason, str(error)) == ("copy", "cannot be copied")


KEY = Key(3, 0)


@pytest.mark.parametrize("operation", [
    lambda x: x + 1, lambda x: 1 + x, lambda x: torch.nn.functional.linear(torch.ones(1, 5), x),
    lambda x: torch.stack(tensors=[torch.ones(2, 5), x]), lambda x: x[0], lambda x: x.to(torch.float64),
    lambda x: bool(x.any()), lambda x: x.requires_grad, lambda x: x.__setitem__(0, 1.0),
    lambda x: torch.empty(2, 5).copy_(x),
])  # fmt: skip
def test_computing_with_a_placeholder_leaves_the_forward(operation):
    """Also out of code of the model that catches any Exception."""
    with pytest.raises(NeedsValue) as caught, contextlib.suppress(Exception):
        operation(Placeholder(KEY, torch.zeros(2, 5)))
    assert caught.value.key == KEY


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x: torch.ones_like(x), torch.ones(2, 5, dtype=torch.float16)),
        (lambda x: torch.full_like(x, 3, dtype=torch.int64), torch.full((2, 5), 3)),
        (lambda x: x.new_zeros(4), torch.zeros(4, dtype=torch.float16)),
        (lambda x: x.new_tensor([7]), torch.tensor([7], dtype=torch.float16)),
    ],
)
def test_what_needs_the_form_only_is_made(operation, expected):
    made = operation(Placeholder(KEY, torch.zeros(2, 5, dtype=torch.float16)))
    assert type(made) is torch.Tensor
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)
    with pytest.raises(NeedsValue):
        operation(Placeholder(KEY, None))


def test_stubs_answer_to_the_session_of_their_thread():
    model = Toy()
    copied = copy_with_stubs(model, {f"layers.{i}": layer for i, layer in enumerate(model.layers)})

    class Twice:
        def call(self, layer, args, kwargs):
            return args[0] * 2

    with running(Twice()):
        found = copied(tokens())
        errors = []

        def other():
            try:
                copied(tokens())
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert torch.equal(found, copied.head(copied.embed(tokens()) * 8))
    assert errors == ["The layer layers.0 can be called only in a forward or backward of the pipeline."]


def test_what_cannot_be_copied_is_refused():
    model = Toy()
    model.lock = threading.Lock()
    with pytest.raises(CutError, match=r"Toy cannot be copied: cannot pickle") as caught:
        copy_with_stubs(model, {})
    assert caught.value.reason == "copy"
