"""The bytes that ranks send in a step, counted, next to those on paper."""

import pytest
import torch
from torch import nn

from tests.runtime.distributed.processes import run_ranks

pytestmark = pytest.mark.slow


def sent_in_a_step():
    """Bytes of gradients and of weights that a rank sends in its second step, and the numbers that are trained."""
    import torch.distributed as dist

    from roundpipe_runtime import OptimizerCtx, RoundPipe, RoundPipeRunConfig

    torch.manual_seed(0)
    model = RoundPipe(
        nn.Sequential(nn.Linear(192, 384), nn.ReLU(), nn.Linear(384, 192)).to(torch.bfloat16),
        optim_dtype=torch.float32,
        devices="virtual:1",
        name="counted",
        mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)),
        model_run_config=RoundPipeRunConfig(num_microbatch=3),
    )
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(6, 192, dtype=torch.bfloat16)
    for _ in range(2):
        before = dict(model.ranks.sent)
        model.forward_backward((x,), label=x, loss_fn=lambda out, label: ((out - label) ** 2).sum())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        model.synchronize()
    found = {channel: model.ranks.sent[channel] - before.get(channel, 0) for channel in ("data", "weights")}
    model.close()
    return {**found, "numbers": sum(p.numel() for p in model.parameters())}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_send_shards_once_per_step(size):
    """The shards of the others: gradients in float32, weights in bfloat16, once in three microbatches, within 2 %."""
    found = run_ranks("tests.runtime.distributed.test_sent_bytes:sent_in_a_step", size)
    count = found[0]["numbers"]
    of_others = (size - 1) / size * count
    for rank in found:
        assert rank["data"] == pytest.approx(4 * of_others, rel=0.02)
        assert rank["weights"] == pytest.approx(2 * of_others, rel=0.02)
