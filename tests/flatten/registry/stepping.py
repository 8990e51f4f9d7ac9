"""Threads that take one step when told to, so that a test decides the order in which things happen."""

import queue
import threading
from collections.abc import Callable
from typing import Any

_PATIENCE = 60  # seconds; a step that takes longer hangs


class SteppingThread:
    """A thread that runs one function at a time, and hands its result or its exception to the caller."""

    def __init__(self) -> None:
        self._steps: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.Queue()
        self._results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> "SteppingThread":
        return self

    def __exit__(self, *exc: object) -> None:
        self._steps.put(None)
        self._thread.join(_PATIENCE)

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._steps.put((function, args))

    def result(self) -> Any:
        result, error = self._results.get(timeout=_PATIENCE)
        if error is not None:
            raise error
        return result

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            function, args = step
            try:
                self._results.put((function(*args), None))
            except BaseException as error:  # handed to the caller, whatever it is
                self._results.put((None, error))
