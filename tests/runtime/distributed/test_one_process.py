"""What one process shows of several: groups of a batch, options, the warning of a pipeline without a mesh."""

import math

import pytest
import torch
from torch import nn

from roundpipe_runtime import ConfigError, OptimizerCtx, RoundPipeRunConfig, StageError, wrap_model_to_roundpipe
from roundpipe_runtime.errors import RoundPipeWarning
from roundpipe_runtime.pipeline import roundpipe
from tests.runtime.small import batch, near, near_gradients, small_model

MEAN = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")


@pytest.mark.parametrize("replicas", [1, 2, 3, 9])
def test_groups_have_the_outputs_and_the_gradient_of_the_whole_batch(wrap, replicas):
    inputs, labels = batch(7)
    model, plain = small_model(), small_model()
    expected = plain(inputs)
    loss = nn.functional.mse_loss(expected, labels)
    loss.backward()
    pipeline = wrap(model, replicas=replicas)
    found, outputs = pipeline.forward_backward(
        (inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=MEAN, return_outputs=True
    )
    assert near(found, loss.detach())
    assert near(outputs, expected.detach())
    assert near_gradients(model, plain)
    assert (pipeline.replicas, pipeline.mesh) == (replicas, None)


def test_sums_of_several_batches_may_wait(wrap):
    """`no_sync` and the call after it have the gradient of both batches."""
    model, plain = small_model(), small_model()
    pipeline = wrap(model, replicas=2)
    for seed in (1, 2):
        inputs, labels = batch(7, seed)
        nn.functional.mse_loss(plain(inputs), labels).backward()
        with pipeline.no_sync() if seed == 1 else torch.enable_grad():
            pipeline.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=MEAN)
        if seed == 1:
            assert all(parameter.grad is None for parameter in model.parameters())
    assert near_gradients(model, plain)


@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_gradients_are_clipped_as_torch_does(wrap, norm_type, replicas):
    model, plain = small_model(), small_model()
    inputs, labels = batch(6)
    nn.functional.mse_loss(plain(inputs), labels).backward()
    pipeline = wrap(model, replicas=replicas)
    pipeline.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=MEAN)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    assert near(pipeline.clip_grad_norm_(0.01, norm_type), expected)
    assert near_gradients(model, plain)


def test_a_norm_that_cannot_be_is_refused(wrap):
    model = small_model()
    pipeline = wrap(model, replicas=2)
    inputs, labels = batch(6)
    with pytest.raises(ConfigError, match=r"norm_type must be positive, like 2\.0, found 0"):
        pipeline.clip_grad_norm_(1.0, 0)
    inputs[2] = math.nan
    pipeline.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=MEAN)
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan, which cannot be clipped"):
        pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert math.isnan(pipeline.clip_grad_norm_(1.0))


def test_a_call_that_groups_cannot_make_is_refused(wrap):
    model, plain = small_model(), small_model()
    pipeline = wrap(model, replicas=2)
    inputs, labels = batch(6)
    call = {"label": labels, "loss_fn": nn.functional.mse_loss, "run_config": MEAN}
    with pytest.raises(ConfigError, match="computes gradients, but gradients are switched off here"), torch.no_grad():
        pipeline.forward_backward((inputs,), **call)
    nn.functional.mse_loss(plain(inputs), labels).backward()
    pipeline.forward_backward((inputs,), **call)
    assert near_gradients(model, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be a number of at least 1, found 0"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype must be a floating dtype"),
        ({"mesh": "cpu"}, r'init_device_mesh\("cpu", \(torch.distributed.get_world_size\(\),\)\)'),
    ],
)
def test_an_option_that_cannot_be_is_refused(wrap, options, message):
    with pytest.raises(ConfigError, match=message):
        wrap(small_model(), **options)


def test_a_pipeline_without_a_mesh_warns_in_a_group(wrap, monkeypatch):
    """Once: each process would train a model of its own."""
    monkeypatch.setattr(roundpipe, "_world_size", lambda: 2)
    pipeline = wrap(small_model())
    inputs, labels = batch(6)

    def call():
        pipeline.forward_backward((inputs,), label=labels, loss_fn=nn.functional.mse_loss, run_config=MEAN)

    with pytest.warns(RoundPipeWarning, match=r'mesh=init_device_mesh\("cpu"'):
        call()
    call()
    with OptimizerCtx():
        assert len(list(pipeline.parameters())) == len(list(pipeline.model.parameters()))


def test_backward_of_groups_has_the_gradient_of_the_whole_batch(wrap):
    inputs, labels = batch(7)
    ours, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    model, plain = small_model(), small_model()
    nn.functional.mse_loss(plain(theirs), labels).backward()
    pipeline = wrap(model, replicas=3)
    loss = nn.functional.mse_loss(pipeline(ours, roundpipe_run_config=MEAN), labels)
    loss.backward(retain_graph=True)
    assert near(ours.grad, theirs.grad)
    assert near_gradients(model, plain)
    with pytest.raises(StageError, match="one backward"):
        loss.backward()


def test_the_auxiliary_loss_of_groups_is_that_of_the_whole_batch():
    pytest.importorskip("transformers")
    from tests.runtime.distributed.trainings import model

    plain, ours = model("mixtral")(), model("mixtral")()
    tokens = torch.randint(3, 96, (7, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    rows = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
    expected = plain.train()(**rows)
    expected.loss.backward()
    pipeline = wrap_model_to_roundpipe(ours, lower_threshold=0, devices="virtual:2", replicas=3, check=False).train()
    loss, output = pipeline.forward_backward(input_kwargs=rows, return_outputs=True)
    assert near(loss, expected.loss.detach())
    assert near(output.aux_loss, expected.aux_loss.detach())
    assert near_gradients(ours, plain)
