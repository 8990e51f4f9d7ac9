"""A training with torchao's moments in 8 bits, also resumed: python -m tests.runtime.optim.eight_bits FOLDER"""

import sys
import warnings

import torch
from torch import nn
from torchao.optim import AdamW8bit

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from roundpipe_runtime.checkpoint import load_checkpoint, save_checkpoint

WIDTH, LAYERS, STEPS = 64, 3, 4  # a matrix of 4096 numbers is the smallest whose moments have 8 bits


def start():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]).bfloat16()
    config = RoundPipeRunConfig(num_microbatch=2, loss_reduction="mean")
    options = {"optim_dtype": torch.float32, "gradient_dtype": torch.bfloat16}
    pipe = RoundPipe(model, devices="virtual:2", model_run_config=config, name="same", **options)
    return pipe, AdamW8bit(pipe.optim_parameters(), lr=1e-2)


def train(pipe, optimizer, steps, how):
    for number in steps:
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        pipe.forward_backward((inputs,), label=inputs, loss_fn=lambda a, b: (a.float() - b.float()).square().mean())
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=how)
    pipe.synchronize()


def assert_same_state(one, other):
    assert all(torch.equal(a, b) for a, b in zip(state(*one), state(*other), strict=True))


def state(pipe, optimizer):
    moments = [s["exp_avg"] for s in optimizer.state.values() if hasattr(s["exp_avg"], "codes")]
    assert len(moments) == LAYERS
    return [*pipe.optim_parameters(), *(m.codes for m in moments), *(m.scale for m in moments)]


def main(folder):
    torch.compiler.set_stance("force_eager")  # compiling takes a minute, and is torchao's
    warnings.simplefilter("error", UserWarning)  # such as that of a step that is not hidden
    together, stopped, resumed = start(), start(), start()
    train(*together, range(STEPS), False)
    train(*stopped, range(STEPS // 2), "exact")
    save_checkpoint(folder, stopped[0], optimizer=stopped[1])
    train(*stopped, range(STEPS // 2, STEPS), "exact")
    assert_same_state(stopped, together)
    load_checkpoint(folder, resumed[0], optimizer=resumed[1])
    train(*resumed, range(STEPS // 2, STEPS), "exact")
    assert_same_state(resumed, together)
    for pipe, _ in (together, stopped, resumed):
        pipe.close()


if __name__ == "__main__":
    main(sys.argv[1])
