"""The commands of the program ``roundpipe``, and how the program prints errors."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from yobx_flatten import FlattenError
from yobx_flatten.core.terminal.output import say
from yobx_flatten.core.terminal.running import reflow_help, run_app

from ..distributed.ranks.torchrun import is_one_of_many
from ..errors import RoundPipeError
from ..fine_tune.job import Job
from .demo import demo
from .doctor import doctor
from .plan import plan
from .timeline import timeline
from .train import train

app = typer.Typer(name="roundpipe", no_args_is_help=True, pretty_exceptions_enable=False)
for _command in (demo, plan, train, timeline, doctor):  # in the order of --help
    app.command(_command.__name__)(_command)


def _version(asked: bool) -> None:
    if asked:
        say(f"roundpipe_runtime {importlib.metadata.version('yobx-flatten')}")
        raise typer.Exit


def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the stack trace of an error.")] = False,
) -> None:
    """Train models larger than the device. Results match training without a pipeline.

    Exit status: 0 success; 1 a check failed; 2 the request cannot be served; 130 interrupted.
    """


app.callback()(_all_commands)
reflow_help(app)


def run(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    run_once = functools.partial(run_app, app, given, program="roundpipe", expected=(FlattenError, RoundPipeError))
    if "train" not in given or not is_one_of_many():
        return run_once()
    try:
        job = Job()
    except RuntimeError as error:  # torch cannot connect to the other processes
        sys.stderr.write(f"roundpipe: the other processes cannot be reached: {str(error).splitlines()[0]}\n")
        return 2
    with contextlib.ExitStack() as stack:
        stack.callback(job.close)
        if not job.is_first:  # rank 0 prints
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        start = job.exchange(time.time_ns())[0]  # a job may run several commands
        return run_once(is_reporter=lambda: job.claim(f"error of {start}"))  # the first to claim prints its error
