"""Tests of huggingface.cutting.cut_state: what passes between the pieces of a cut model."""

import types

import torch
from torch.utils import _pytree as pytree

from roundpipe_runtime.device.transfer import flatten_value
from roundpipe_runtime.huggingface import SmoothedLoss, cut
from roundpipe_runtime.huggingface.cutting import cut_plan
from roundpipe_runtime.huggingface.cutting.call_log import CallLog
from roundpipe_runtime.huggingface.cutting.cut_plan import CutState, begin, device_of
from roundpipe_runtime.huggingface.cutting.stub import Key
from roundpipe_runtime.huggingface.loss.call_options import CALL_OPTIONS, CallOptions

from ..hf_small import Toy, hf_batch, hf_model, tokens


def test_a_state_is_flattened_into_its_tensors():
    """The engine finds arguments, labels, values and contents of boxes; all else is passed on as the same object."""
    tensors = [torch.full((1,), float(number)) for number in range(5)]
    options = CallOptions(smoothed_loss=SmoothedLoss(0.1), labels=tensors[2])
    call_log = CallLog()
    state = CutState(
        ((tensors[0],), {"x": tensors[1]}), options, {Key(0, 0): tensors[3]}, {4: [tensors[4]]}, call_log, seed=7
    )
    structure, found = flatten_value(state)
    assert [tensor.item() for tensor in found] == [0.0, 1.0, 2.0, 3.0, 4.0]
    rebuilt = structure.rebuild([tensor + 10 for tensor in found])
    assert type(rebuilt) is CutState
    assert rebuilt.call_log is call_log
    assert rebuilt.options.smoothed_loss is options.smoothed_loss
    assert rebuilt.seed == 7
    assert rebuilt.call[1]["x"].item() == 11.0
    assert rebuilt.values[Key(0, 0)].item() == 13.0


def test_a_state_begins_with_the_arguments_of_the_model():
    """Without options, which only the pipeline reads; with the seed of the moment, and outputs that are asked for."""
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
        state = begin((torch.ones(1),), {}, torch.nn.Identity())
        state.restart_noise()
        drawn = torch.rand(3)
    finally:
        torch.set_rng_state(outside)
    assert seeds == [7]
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
