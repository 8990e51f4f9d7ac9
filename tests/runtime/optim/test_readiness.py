"""Versions of layers: no lost update, no torn read, no deadlock, in whatever order things happen."""

import contextlib
import random
import threading

import pytest

from roundpipe_runtime import StageError
from roundpipe_runtime.optim.readiness import LayerReadiness, ReadinessTable


class Walk:
    """Runs and optimizer steps over some layers, one event at a time, in the order that a random generator says.

    A run holds its version of all layers, reads each layer (twice, as forward and backward do) and lets go; it reads
    every layer in the version that it announced. A publisher writes one version after the other. What a layer holds is
    a number; a write takes two events, between which the number is nonsense.
    """

    def __init__(self, seed, layers=3, rounds=3):
        self.random = random.Random(seed)
        self.layers = [LayerReadiness() for _ in range(layers)]
        self.values = [0] * layers
        self.rounds = rounds
        self.next_version = 0
        self.published = 0

    def processes(self):
        return [self.runs(), self.publisher(), self.late_reader()]

    def runs(self):
        for number in range(self.rounds):
            version = number
            yield lambda: True
            for layer in self.layers:
                layer.hold(version)
            for index in [*range(len(self.layers)), *reversed(range(len(self.layers)))]:
                yield lambda i=index, v=version: self.layers[i].can_read(v)
                self.layers[index].start_read(version)
                assert self.values[index] == version
                yield lambda: True
                assert self.values[index] == version
                self.layers[index].end_read()
            for layer in self.layers:
                layer.let_go(version)
            self.next_version = number + 1

    def publisher(self):
        for version in range(1, self.rounds + 1):
            yield lambda v=version: self.next_version >= v  # the step of a run is published after it
            for index, layer in enumerate(self.layers):
                yield lambda la=layer, v=version: la.can_write(v)
                layer.start_write(version)
                self.values[index] = None
                yield lambda: True
                self.values[index] = version
                layer.end_write()
            self.published = version

    def late_reader(self):
        """Reads whatever version is there, as an evaluation would."""
        for _ in range(4):
            index = self.random.randrange(len(self.layers))
            layer = self.layers[index]
            yield lambda la=layer: la.can_read(la.version)
            layer.start_read(layer.version)
            assert self.values[index] == layer.version
            yield lambda: True
            layer.end_read()

    def go(self):
        waiting = [(process, next(process)) for process in self.processes()]
        while waiting:
            able = [number for number, (_, guard) in enumerate(waiting) if guard()]
            assert able, f"deadlock: {self.layers}"
            process, _ = waiting.pop(self.random.choice(able))
            with contextlib.suppress(StopIteration):
                waiting.append((process, next(process)))
        assert self.values == [self.rounds] * len(self.values)
        assert all(layer == LayerReadiness(version=self.rounds) for layer in self.layers)


def test_no_interleaving_deadlocks_or_loses_an_update():
    """10,000 orders of events, drawn from fixed seeds: every read sees its version, every version arrives."""
    for seed in range(10_000):
        Walk(seed, layers=1 + seed % 3, rounds=1 + seed % 4).go()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda layer: layer.start_read(1),
        lambda layer: layer.end_read(),
        lambda layer: layer.start_write(2),
        lambda layer: layer.end_write(),
        lambda layer: layer.let_go(0),
        lambda layer: (layer.start_read(0), layer.start_write(1)),
        lambda layer: (layer.hold(0), layer.start_write(1)),
        lambda layer: (layer.start_write(1), layer.start_read(0)),
        lambda layer: (layer.start_write(1), layer.end_write(), layer.hold(0)),
    ],
)
def test_what_the_rules_forbid_raises(wrong):
    with pytest.raises(StageError, match="readiness"):
        wrong(LayerReadiness())


def test_a_writer_waits_for_the_run_that_holds_the_version():
    table = ReadinessTable(1)
    order = []
    table.hold(0)
    writer = threading.Thread(target=table.write, args=(0, 1, lambda: order.append("written")))
    reader = threading.Thread(target=lambda: (table.start_read(0, 1), order.append("read"), table.end_read(0)))
    writer.start()
    reader.start()
    order.append("held")
    table.let_go(0)
    writer.join(5)
    reader.join(5)
    assert order == ["held", "written", "read"]
    assert table.version(0) == 1


def test_a_write_that_fails_leaves_the_version_before():
    table = ReadinessTable(1)
    with pytest.raises(ZeroDivisionError):
        table.write(0, 1, lambda: 1 // 0)
    table.start_read(0, 0)
    table.end_read(0)
    table.write(0, 1, lambda: None)
    assert table.version(0) == 1


def test_a_waiting_reader_can_give_up():
    def give_up():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        ReadinessTable(1).start_read(0, 3, check=give_up)


def test_a_waiting_reader_hears_why_its_version_does_not_come():
    table = ReadinessTable(1)
    heard = []

    def read():
        try:
            table.start_read(0, 1)
        except MemoryError as error:
            heard.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    failure = MemoryError()
    table.fail(failure)
    reader.join(5)
    assert heard == [failure]
    table.start_read(0, 0)
    table.end_read(0)
    table.fail(None)
    table.write(0, 1, lambda: None)
    table.start_read(0, 1)
