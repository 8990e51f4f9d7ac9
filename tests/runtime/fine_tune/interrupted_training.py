"""A process that trains while it gets Ctrl-C at any moment, and says what it found; run by `test_interrupted.py`."""

import faulthandler
import itertools
import signal
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

from roundpipe_runtime import RoundPipe, RoundPipeRunConfig
from tests.ctrl_c import interrupt_at_line
from tests.runtime.small import same_bits

torch.set_num_threads(1)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
INPUTS, LABELS = torch.randn(10, 8), torch.randn(10, 8)
PIPE = RoundPipe(MODEL, devices="virtual:2", model_run_config=RoundPipeRunConfig(loss_reduction="mean"))


# What is interrupted at its lines: the package, and what of Python's library it waits with.
CODE = ("roundpipe_runtime", "threading.py", "concurrent", "contextlib.py", "weakref.py")

# How many more times Ctrl-C is to interrupt what runs now; this program itself is not what is tested.
ARMED = [0]


def on_sigint(*_: object) -> None:
    if ARMED[0]:
        ARMED[0] -= 1
        raise KeyboardInterrupt


def call(kind: str) -> None:
    if kind == "async":
        PIPE.step(lambda: None, is_async=True)
    if kind == "classic":
        nn.functional.mse_loss(PIPE(INPUTS), LABELS).backward()
    else:
        PIPE.forward_backward((INPUTS,), label=LABELS, loss_fn=nn.functional.mse_loss)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def reset() -> None:
    MODEL.zero_grad()
    MODEL[1].reset_running_stats()


def state() -> list[torch.Tensor | None]:
    gradients = [None if p.grad is None else p.grad.clone() for p in MODEL.parameters()]
    return gradients + [b.clone() for b in MODEL.buffers()]


def main(kind: str, how: str, amount: str) -> None:
    """Call for seconds while others send signals ("moments"), or interrupted before every n-th line ("lines")."""
    reset()
    before = state()
    for _ in range(2):
        reset()
        call(kind)
    after = state()
    forward_only = [None] * len(list(MODEL.parameters())) + after[-3:]
    allowed = [before, after, forward_only] if kind == "classic" else [before, after]
    interrupted = wrong = 0
    reset()
    signal.signal(signal.SIGINT, on_sigint)
    say("ready")
    calls = at_moments(kind, float(amount)) if how == "moments" else at_lines(kind, int(amount))
    for outcome in calls:
        interrupted += outcome == "interrupted"
        found = state()
        wrong += not (same_bits(found, after) if outcome == "done" else any(same_bits(found, one) for one in allowed))
        reset()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.cancel_dump_traceback_later()
    reset()
    call(kind)
    PIPE.close()
    say(f"{interrupted} {wrong} {same_bits(state(), after)}")


def at_moments(kind: str, seconds: float) -> Iterator[str]:
    start, interrupted = time.monotonic(), 0
    # on a machine that has other work, go on until enough calls were interrupted
    while (passed := time.monotonic() - start) < seconds or (interrupted <= 20 and passed < 15 * seconds):
        faulthandler.dump_traceback_later(20, exit=True)  # a call that hangs ends the test
        outcome = "late"
        try:
            try:
                ARMED[0] = 2
                call(kind)
                outcome = "done"
                ARMED[0] = 0
            except KeyboardInterrupt:
                outcome = "interrupted"
                ARMED[0] = 0
        except KeyboardInterrupt:  # the second one, after the call
            pass
        interrupted += outcome == "interrupted"
        yield outcome


def at_lines(kind: str, stride: int) -> Iterator[str]:
    for number in itertools.count(0, stride):
        faulthandler.dump_traceback_later(20, exit=True)
        ARMED[0] = 1
        try:
            if not interrupt_at_line(number, lambda: call(kind), files=CODE):
                return
        except KeyboardInterrupt:
            yield "interrupted"
        else:
            yield "done"


if __name__ == "__main__":
    main(*sys.argv[1:])
