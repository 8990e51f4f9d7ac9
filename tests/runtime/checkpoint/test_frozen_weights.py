"""Checkpoints of adapters over frozen weights in few bits: those are not stored, and known again by a digest."""

from contextlib import closing

import pytest
import torch
from safetensors import safe_open

from roundpipe_runtime import RoundPipe, load_checkpoint, save_checkpoint
from roundpipe_runtime.checkpoint import CheckpointError
from tests.runtime.few_bits import CONFIG, KINDS, model_of, trained_in


def training(kind, seed=0):
    pipe = RoundPipe(model_of(kind, seed=seed), devices="virtual:2", model_run_config=CONFIG)
    return pipe, torch.optim.Adam([p for p in pipe.optim_parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_has_the_same_bits(tmp_path, kind, is_async):
    whole, optimizer = training(kind)
    first = trained_in(whole, 3, optimizer=optimizer)
    save_checkpoint(tmp_path, whole, optimizer=optimizer, is_async=is_async).wait()
    expected = trained_in(whole, 3, optimizer=optimizer)
    resumed, optimizer = training(kind)
    load_checkpoint(tmp_path, resumed, optimizer=optimizer)
    assert trained_in(resumed, 3, optimizer=optimizer) == expected != first
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs if one.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_are_not_stored(tmp_path, kind):
    with closing(training(kind)[0]) as pipe:
        trained_in(pipe, 1)
        path = save_checkpoint(tmp_path, pipe).path
        names = {name for name, p in pipe.named_parameters() if p.requires_grad}
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == names


@pytest.mark.parametrize("kind", KINDS)
def test_other_frozen_weights_are_refused(tmp_path, kind):
    with closing(training(kind)[0]) as pipe:
        save_checkpoint(tmp_path, pipe)
    other, _ = training(kind, seed=1)
    before = [p.detach().clone() for p in other.parameters() if p.requires_grad]
    with pytest.raises(
        CheckpointError, match=r"changed since it was saved: \S*base\.weight, .*weight, .*weight\. Quantize"
    ):
        load_checkpoint(tmp_path, other)
    after = [p for p in other.parameters() if p.requires_grad]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
