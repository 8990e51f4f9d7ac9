"""The progress of a pipeline: what training needs in addition to the state dict."""

import threading

import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.runtime.small import batch, same_bits, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)


def gradients_of(pipe):
    return [parameter.grad for parameter in pipe.optim_parameters()]


def test_training_goes_on_from_progress_and_state_dict():
    inputs, labels = batch(6)

    def made():
        model = small_model(dropout=0.5).to(torch.bfloat16)
        return RoundPipe(model, torch.float32, name="same", devices="virtual:2", model_run_config=MEAN)

    def run(pipe):
        pipe.forward_backward((inputs.bfloat16(),), label=labels.bfloat16(), loss_fn=F.mse_loss)

    first = made()
    optimizer = torch.optim.SGD(first.optim_parameters(), lr=0.1)
    run(first)
    first.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    run(first)
    progress = first.progress()
    assert progress.runs == 2
    other = made()
    other.load_state_dict(first.state_dict())
    other.load_progress(progress)
    run(first), run(other)
    assert same_bits(gradients_of(first), gradients_of(other))
    masters = [parameter.detach() for parameter in first.optim_parameters()]
    assert same_bits(masters, [parameter.detach() for parameter in other.optim_parameters()])
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)  # a state dict alone would have rounded them


def test_copies_of_the_optimizer_are_left_out_where_there_are_none():
    """A pipeline without `optim_dtype` loads the rest."""
    with_copies = RoundPipe(small_model(), torch.float64, devices="virtual:1", model_run_config=MEAN)
    without = RoundPipe(small_model(), devices="virtual:1", model_run_config=MEAN)
    inputs, labels = batch(6)
    with_copies.forward_backward((inputs,), label=labels, loss_fn=F.mse_loss)
    before = [parameter.detach().clone() for parameter in without.parameters()]
    without.load_progress(with_copies.progress())
    assert without.progress().runs == 1
    assert without.progress().masters == {}
    assert same_bits(before, [parameter.detach() for parameter in without.parameters()])
    expected = [gradient.float() for gradient in gradients_of(with_copies)]
    assert same_bits(gradients_of(without), expected)
    with_copies.close(), without.close()


def test_a_parent_module_loads_after_a_step_in_the_background():
    pipe = RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices="virtual:1")
    parent = nn.ModuleDict({"inside": pipe})
    go = threading.Event()

    def step():
        go.wait(10)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.fill_(2.0)

    loaded = {name: torch.full_like(value, 7.0) for name, value in parent.state_dict().items()}
    pipe.step(step, is_async=True)
    threading.Timer(0.2, go.set).start()
    parent.load_state_dict(loaded)
    assert all((parameter == 7.0).all() for parameter in pipe.parameters())
