"""Record the calls of a model on an example, and stand-ins for layers and values."""

import pickle
import threading
import types
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe_runtime.huggingface import CutError, CutReport, Equivalence, cut
from roundpipe_runtime.huggingface.adapters import example_inputs, text_config, without_cache
from roundpipe_runtime.huggingface.cutting import cut_plan
from roundpipe_runtime.huggingface.cutting.call_log import (
    CallLog,
    CallSpec,
    Tree,
    box_content,
    candidates,
    fill_box,
    is_box,
    live,
    observe,
)
from roundpipe_runtime.huggingface.cutting.cut_plan import begin, device_of
from roundpipe_runtime.huggingface.cutting.stub import (
    Key,
    NeedsValue,
    Placeholder,
    copy_with_stubs,
    first_placeholder,
    running,
    sync,
)
from roundpipe_runtime.huggingface.loss.call_options import CALL_OPTIONS, CallOptions
from tests.runtime.huggingface.hf_small import Block, Toy, hf_model, tokens

from ..hf_small import hf_batch

A, B, C = Key(-1, 0), Key(0, 0), Key(-1, 1)


def tree(*leaves):
    return Tree(pytree.tree_structure([0] * len(leaves)), leaves)


def test_values_live_until_their_last_use():
    call_log = CallLog().record({0: CallSpec(tree(A)), 2: CallSpec(tree(B, C))})
    values = {A: torch.ones(1), B: torch.ones(2), C: torch.ones(3), Key(2, 0): torch.ones(4)}
    assert set(live(values, call_log, 0, frozenset())) == {B, C}
    assert set(live(values, call_log, 2, frozenset({A}))) == {A}
    assert set(live(values, call_log.made(2, tree(None), tree(Key(2, 0))), 2, frozenset())) == {Key(2, 0)}


def test_boxes_are_what_layers_could_write():
    shared = UserDict({"a": 1})
    assert is_box(shared)
    assert is_box([])
    assert not is_box((1,))
    assert not is_box(torch.ones(1))
    assert box_content(shared) == {"a": 1}
    fill_box(shared, {"b": 2})
    assert dict(shared) == {"b": 2}
    held = [1]
    fill_box(held, [2, 3])
    assert held == [2, 3]


def test_the_outermost_lists_are_found_the_largest_first():
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
        }
    )
    assert [found.path for found in candidates(model)] == ["layers", "small"]
    assert list(candidates(model)[0].layers) == ["layers.0", "layers.1"]


def test_calls_are_observed_in_order():
    class Backward(Toy):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for number in (2, 0, 0):
                x = self.layers[number](x)
            return x

    model = Backward()
    layers = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    calls, result = observe(layers, lambda: model(tokens()))
    assert [call.layer for call in calls] == ["layers.2", "layers.0", "layers.0"]
    assert result.shape == (5, 6, 8)
    assert not any(layer._forward_hooks for layer in model.layers)


def test_a_form_says_which_outputs_are_like_an_input():
    """A tensor of the shape of an argument can be told before the layer runs; others, and `None`, are noted as such."""

    class Layer(Block):
        def forward(self, x):
            return x + 1, x.sum(), None

    model = Toy(nn.ModuleList([Layer(), Layer()]))
    model.between = lambda number, layer, x: layer(x)[0]
    calls, _ = observe({"0": model.layers[0]}, lambda: model(tokens()))
    assert calls[0].leaves == (0, -1, (None,))


def test_sequential_counts_when_its_children_are_alike_and_made_of_parts():
    model = nn.ModuleDict({"stack": nn.Sequential(Block(), Block()), "mlp": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    assert [found.path for found in candidates(model)] == ["stack"]


def test_a_state_begins_with_the_arguments_of_the_model():
    model, options = hf_model("llama").eval(), CallOptions(loss_only=True)
    torch.manual_seed(11)
    state = begin((), {"input_ids": tokens(), "output_attentions": True, CALL_OPTIONS: options}, model)
    assert state.call[1].keys() == {"input_ids", "output_attentions"}
    assert (state.options, state.seed, state.call_log.keep) == (options, 11, "extras")


def test_noise_starts_again():
    """Code that runs again in a later phase draws the numbers of the first phase."""
    model = Toy()
    torch.manual_seed(3)
    state = begin((tokens(),), {}, model)
    first = torch.rand(4)
    state.restart_noise()
    assert torch.equal(torch.rand(4), first)


def test_a_piece_leaves_its_state_alone():
    """The engine calls a piece with the same state again to recompute it, and gets the same result."""
    made = cut(hf_model("llama"))
    batch = hf_batch()
    with torch.no_grad():
        state = made.pieces[0](**batch, use_cache=False)
        before = pytree.tree_flatten(state)
        calls = dict(state.call_log.results)
        results = [made.pieces[1](state) for _ in range(2)]
    after = pytree.tree_flatten(state)
    assert (after[1], state.call_log.results) == (before[1], calls)
    assert all(one is other for one, other in zip(after[0], before[0], strict=True))
    one, other = (result.values[Key(0, 0)] for result in results)
    assert one is not other
    assert torch.equal(one, other)


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


def test_an_example_has_padding_and_two_rows():
    """One row is padded, so that the mask is one; the other is not."""
    made = example_inputs(hf_model("llama"))
    assert made["input_ids"].shape == made["attention_mask"].shape == (2, 12)
    assert made["attention_mask"].sum(1).tolist() == [9, 12]


def test_an_example_has_what_the_forward_takes():
    assert set(example_inputs(Toy())) == {"input_ids"}
    assert set(example_inputs(hf_model("seq2seq:t5"))) == {"input_ids", "attention_mask", "decoder_input_ids"}


def test_models_are_asked_for_no_cache():
    model = hf_model("llama")
    assert without_cache(model, {"a": 1}) == {"a": 1, "use_cache": False}
    assert without_cache(model, {"use_cache": True}) == {"use_cache": True}
    assert without_cache(Toy(), {}) == {}


def test_the_configuration_of_text():
    model = hf_model("image:llava")
    assert text_config(model) is model.config.text_config
    assert text_config(nn.Linear(1, 1)) is None


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


def test_a_placeholder_is_a_tensor_that_can_be_handed_on():
    made = Placeholder(KEY, torch.zeros(2, 5, dtype=torch.float16))
    assert isinstance(made, torch.Tensor)
    assert (made,)[0] is made
    assert (made.shape, made.dtype, made.device.type) == ((2, 5), torch.float16, "cpu")
    assert (made.size(1), made.dim(), len(made)) == (5, 2, 2)


@pytest.mark.parametrize("operation", [
    lambda x: x + 1, lambda x: 1 + x, lambda x: torch.nn.functional.linear(torch.ones(1, 5), x),
    lambda x: torch.cat([torch.ones(2, 5), x]), lambda x: torch.stack(tensors=[x]), lambda x: x[0],
    lambda x: x.to(torch.float64), lambda x: bool(x.any()), lambda x: x.requires_grad,
    lambda x: x.__setitem__(0, 1.0), lambda x: torch.empty(2, 5).copy_(x),
])  # fmt: skip
def test_computing_with_a_placeholder_leaves_the_forward(operation):
    with pytest.raises(NeedsValue) as caught:
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


def test_models_do_not_catch_it():
    def careless():
        try:
            return Placeholder(KEY, torch.zeros(1)) * 2
        except Exception:
            return "caught"

    with pytest.raises(NeedsValue):
        careless()


def test_a_placeholder_is_found_among_leaves():
    made = Placeholder(KEY, None)
    assert first_placeholder([1, (torch.ones(1), [made])]) is made
    assert first_placeholder([1, torch.ones(1)]) is None


def made():
    model = Toy()
    return model, copy_with_stubs(model, {f"layers.{i}": layer for i, layer in enumerate(model.layers)})


def test_a_copy_shares_parameters_and_has_no_layers():
    model, copied = made()
    assert copied is not model
    assert copied.embed is not model.embed
    assert copied.embed.weight is model.embed.weight
    assert {name for name, _ in copied.named_parameters()} == {"embed.weight", "head.weight", "head.bias"}


def test_a_stub_passes_for_its_layer():
    model, copied = made()
    model.layers[1].kind = "sliding"
    assert isinstance(copied.layers[1], Block)
    assert copied.layers[1].kind == "sliding"
    assert copied.layers[1].linear is model.layers[1].linear


def test_stubs_answer_to_the_session_of_their_thread():
    _, copied = made()

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


def test_sync_follows_the_model():
    model, copied = made()
    model.eval()
    model.embed.weight = nn.Parameter(torch.zeros(20, 8))
    model.note = 7
    sync(copied, model, {"embed.weight"})
    assert not copied.embed.training
    assert copied.note == 7
    assert copied.embed.weight is model.embed.weight
    assert [name for name, _ in copied.named_parameters()] == ["embed.weight"]
    with pytest.raises(AttributeError, match="weight"):
        copied.head(torch.zeros(1, 8))


def test_what_cannot_be_copied_is_refused():
    model = Toy()
    model.lock = threading.Lock()
    with pytest.raises(CutError, match=r"Toy cannot be copied: cannot pickle") as caught:
        copy_with_stubs(model, {})
    assert caught.value.reason == "copy"


def test_plain_data_that_changed_is_brought_up_to_date():
    model, copied = made()
    model.active, model.scales = ["two"], {"two": 0.5}
    sync(copied, model, None)
    copied.scales["two"] = 1.0
    assert copied.active == ["two"]
    assert model.scales == {"two": 0.5}
