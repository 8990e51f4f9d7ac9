"""How much memory a step takes: of the device two stages at most, pinned on the host that of the tensors."""

import pytest
import torch
from torch import nn

from roundpipe_runtime import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.accelerator import late
from tests.accelerator.training import late_devices

WIDTH, LAYERS, ROWS, MICROBATCHES = 256, 10, 4, 3
WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH


class Layer(nn.Module):
    """A weight, and a number of the device that the host waits for."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.asks = asks

    def forward(self, x):
        x = self.linear(x)
        return x * float(x.detach().sum().item() < 1e9) if self.asks else x


def pipeline(*, asks, layers_per_stage=2):
    model = nn.Sequential(*[Layer(asks=asks) for _ in range(LAYERS)])
    stages = [range(first, first + layers_per_stage) for first in range(0, LAYERS, layers_per_stage)]
    config = RoundPipeRunConfig(
        loss_reduction="mean",
        num_microbatch=MICROBATCHES,
        execute_plan=ModelExecutePlan(stages[:-1], stages[::-1]),
    )
    return RoundPipe(model, devices=late_devices(1), model_run_config=config)


def step(pipe):
    loss = pipe.forward_backward(
        (torch.ones(MICROBATCHES * ROWS, WIDTH),), loss_fn=lambda outputs, _: outputs.square().mean()
    )
    pipe.zero_grad()
    return loss


@pytest.mark.parametrize("order", [("late", 0), ("random", 1), ("random", 2)], ids=str)
@pytest.mark.parametrize("asks", [False, True])
def test_the_device_holds_two_stages_and_their_activations(asks, order):
    pipe = pipeline(asks=asks)
    late.set_order(*order)
    right = step(pipe)
    stages = 2 * 2 * 2 * WEIGHT
    activations = 2 * MICROBATCHES * (2 + 2 * 2) * ACTIVATION
    bound = 1.05 * stages + WEIGHT + activations
    limit = torch.accelerator.get_memory_info(0)[1]
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    late.set_memory(0, int(before + bound))
    try:
        assert step(pipe).equal(right)
    finally:
        late.set_memory(0, limit)
    assert torch.accelerator.max_memory_allocated(0) - before <= bound
    pipe.close()


def test_pinned_memory_is_that_of_the_tensors():
    late.set_order("late")
    late.counts()
    pipe = pipeline(asks=False)
    size = LAYERS * WEIGHT
    assert size <= late.counts()["pinned bytes"] <= 1.02 * size
    activations = MICROBATCHES * (2 * LAYERS + 4) * ACTIVATION
    step(pipe)
    found = late.counts()["pinned bytes"]
    assert size <= found <= 1.02 * size + activations
    step(pipe)
    assert late.counts()["pinned bytes"] <= activations
    pipe.close()


def test_a_stage_is_uploaded_while_the_one_before_makes_the_host_wait():
    late.set_order("eager")
    pipe, sent = pipeline(asks=True), [0]
    for _ in range(2):  # the first two runs upload parameters once more, to look whether a layer wrote them
        step(pipe)

    def note(module, arguments):
        sent.append(sent[-1] + late.counts().get("bytes up, pinned", 0))

    for layer in pipe:
        layer.register_forward_pre_hook(note)
    late.counts()
    step(pipe)
    calls = MICROBATCHES * 2
    assert [sent[calls * stage] // WEIGHT for stage in range(1, 5)] == [4, 6, 8, 10]
    pipe.close()
