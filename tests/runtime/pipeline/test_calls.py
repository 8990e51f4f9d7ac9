"""What a call of RoundPipe returns: outputs and losses of the plain model."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, RoundPipeRunConfig, StageError
from tests.runtime.small import batch, gradients, near, small_model

F = nn.functional
MEAN = RoundPipeRunConfig(loss_reduction="mean", num_microbatch=3)
MEAN_SUM = RoundPipeRunConfig(num_microbatch=3)


def test_an_rnn_and_its_flat_weights(wrap):
    """nn.LSTM keeps a list of its weights beside the parameters: it follows the copies."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, batch_first=True)
    inputs = torch.randn(6, 3, 4)
    expected, _ = model(inputs)
    expected.sum().backward()
    exact = gradients(model)
    model.zero_grad()
    loss = wrap(model).forward_backward((inputs,), loss_fn=lambda outputs, _: outputs[0].sum(), run_config=MEAN_SUM)
    assert near(loss, expected.sum().detach())
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())


def test_no_grad_and_eval_give_plain_outputs(wrap):
    model = small_model(norm=True, dropout=0.5).eval()
    inputs, _ = batch(7)
    pipe = wrap(model)
    with torch.no_grad():
        found = pipe(inputs)
    assert not found.requires_grad
    assert torch.allclose(found, model(inputs), atol=1e-6)
    assert not pipe(inputs, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False)).requires_grad
    with torch.no_grad():
        assert pipe(inputs, roundpipe_run_config=RoundPipeRunConfig(requires_grad=True)).requires_grad


def test_forward_backward_without_gradients_is_refused(wrap):
    with pytest.raises(ConfigError, match="Use forward"), torch.no_grad():
        wrap(small_model()).forward_backward((batch(4)[0],))


def test_outputs_are_returned_in_order_and_detached(wrap):
    model = small_model()
    inputs, labels = batch(8)
    loss, outputs = wrap(model).forward_backward(
        (inputs,), label=labels, loss_fn=F.mse_loss, return_outputs=True, run_config=MEAN
    )
    expected = model(inputs)
    assert not outputs.requires_grad
    assert torch.allclose(outputs, expected, atol=1e-6)
    assert near(loss, F.mse_loss(expected, labels).detach())


def test_a_sequence_of_losses_is_a_list_of_totals(wrap):
    model, inputs, labels = small_model(), *batch(6)
    losses = wrap(model).forward_backward(
        (inputs,), label=labels, loss_fn=lambda o, t: [((o - t) ** 2).sum(), o.abs().sum()], run_config=MEAN_SUM
    )
    found = gradients(model)
    model.zero_grad()
    outputs = model(inputs)
    expected = [((outputs - labels) ** 2).sum(), outputs.abs().sum()]
    torch.autograd.backward(expected)
    assert [near(a, b.detach()) for a, b in zip(losses, expected, strict=True)] == [True, True]
    assert all(near(found[name], p.grad) for name, p in model.named_parameters())


def test_the_caller_s_autocast_holds_in_the_layers(wrap):
    """Under autocast the layers compute in bfloat16, as they do without the pipeline."""
    model, inputs, _labels = small_model(), *batch(6)
    dtypes = []
    model[0].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs)
        found = wrap(model)(inputs, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
    assert set(dtypes) == {torch.bfloat16}
    assert torch.equal(found, expected)


def test_weights_changed_between_forward_and_backward_are_refused(wrap):
    """The recomputation would be of another function."""
    model = small_model()
    loss = wrap(model)(batch(4)[0]).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(StageError, match=r"layer 0 \(Linear\) was changed between"):
        loss.backward()


def test_inputs_changed_after_forward_change_nothing(wrap):
    """Backward recomputes from what the inputs were."""
    model, (inputs, labels) = small_model(), batch(6)
    F.mse_loss(model(inputs), labels).backward()
    exact = gradients(model)
    model.zero_grad()
    loss = F.mse_loss(wrap(model)(inputs), labels)
    inputs.zero_()
    loss.backward()
    assert all(near(p.grad, exact[name]) for name, p in model.named_parameters())
