"""Run a command in processes that torchrun started: one log, and one line about an error."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable

from ..fine_tune.job import Job

__all__ = ["run_in_job"]


def run_in_job(run: Callable[..., int]) -> int:
    """Run a command that all processes were started with, and return its exit status."""
    # run: function that runs it, whose argument `is_reporter` decides which process prints an error
    try:
        job = Job()
    except RuntimeError as error:  # of the network, in words of torch
        sys.stderr.write(f"roundpipe: the other processes are not reached: {str(error).splitlines()[0]}\n")
        return 2
    with contextlib.ExitStack() as stack:
        stack.callback(job.close)
        if not job.is_first:  # rank 0 prints
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        start = job.exchange(time.time_ns())[0]  # a job may run several commands
        return run(is_reporter=lambda: job.claim(f"error of {start}"))
