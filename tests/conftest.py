"""What every test gets: checks of registries and of old names, and one set of Hypothesis settings."""

import gc
import importlib.util
import logging
import os
import pathlib
import signal
import zlib
from collections.abc import Iterator

# Each of several processes has its share of the cores, and what they start as well: with all cores each, the threads of
# torch wait for each other, and the suite takes half as long again. It is read when torch is imported.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# Inductor compiles here: its pool of processes would import torch twice more for a few small files.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Packages of AOTInductor are asked for numbers here, not for speed: what calls the kernels is not optimised, and has no
# tables of lines for a debugger. All have the same options, so the headers of torch are compiled once.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")

# Sizes in a trace are expressions of sympy, which keeps a thousand results by itself; an export asks for more of them,
# and takes a seventh longer.
os.environ.setdefault("SYMPY_CACHE_SIZE", "50000")

# What is imported from here to the end of the collection stays: to search it for cycles meanwhile finds none.
if "PYTEST_XDIST_WORKER" in os.environ:  # others collect nothing
    gc.disable()

import pytest
import torch.fx.config

from tests import deprecated_names, registry_snapshot

try:
    import hypothesis
except ImportError:  # a machine with a GPU, where tests for devices run
    hypothesis = None  # type: ignore[assignment]

# A first example pays for imports and compilation, so a deadline would measure those. The automatic run draws the same
# examples every time: what it reports can be repeated.
if hypothesis is not None:
    hypothesis.settings.register_profile("default", deadline=None)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


# No test asks from which line of a model a node of a program comes. Under pytest the stack is deep: to write it down
# for every node takes an eighth of an export.
torch.fx.config.do_not_emit_stack_traces = True


# Tests that take seconds, as measured: `make test` leaves them out, `make extended` runs them.
LONG_TESTS = pathlib.Path(__file__).with_name("long_tests.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for a part of the tests, and take settings of plugins that a machine with a GPU has not."""
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the test files, K from 0 to N - 1")
    # not asked of pytest, which loads them later where this file is a plugin itself (`-p tests.conftest`)
    are_off = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ
    if are_off or importlib.util.find_spec("xdist") is None:
        parser.addoption("--dist", help="of pytest-xdist, which is not installed")
    if are_off or importlib.util.find_spec("pytest_timeout") is None:
        parser.addini("timeout", "of pytest-timeout, which is not installed")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import the tests for devices only: others need libraries that such a machine has not."""
    root = config.rootpath / "tests"
    if config.option.markexpr != "gpu" or not collection_path.is_relative_to(root):
        return None
    return collection_path.relative_to(root).parts[:1] not in [(), ("__init__.py",), ("gpu",)] or None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the long tests as extended, and keep the part of the files that was asked for."""
    long = set(LONG_TESTS.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in long:
            item.add_marker("extended")
    if config.option.part:
        part, parts = map(int, config.option.part.split("/"))

        def is_mine(item: pytest.Item) -> bool:
            return zlib.crc32(item.nodeid.partition("::")[0].encode()) % parts == part

        config.hook.pytest_deselected(items=[item for item in items if not is_mine(item)])
        items[:] = filter(is_mine, items)


def pytest_collection_finish() -> None:
    """Leave what is imported by now as it is: a tenth of the time went by in searching it for cycles."""
    # pytest gives its handlers to loggers that do not propagate. Where there is a handler, torch writes down every
    # symbol and every guard of a trace, with the stack: a fifth of an export.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    deprecated_names.listen()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def folder_of_all_processes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Name the folder in which processes of one run find what another one made."""
    own = tmp_path_factory.getbasetemp()
    os.environ["TESTS_SHARED_FOLDER"] = str(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(autouse=True)
def registries_left_as_found() -> Iterator[None]:
    """Fail the test that leaves a pytree registry other than it found it."""
    before = registry_snapshot.take()
    yield
    changes = registry_snapshot.differences(before, registry_snapshot.take())
    if changes:
        pytest.fail("this test left registries changed:\n  " + "\n  ".join(changes), pytrace=False)


@pytest.fixture
def old_names_said() -> list[str]:
    """Let the test use names that transformers has renamed; the value lists what it has said of them, so far."""
    return deprecated_names.heard


@pytest.fixture(autouse=True)
def no_old_names(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test in which transformers says that a name of ours is an old one, also where the line is swallowed."""
    deprecated_names.listen()
    yield
    said = deprecated_names.said()
    if said and "old_names_said" not in request.fixturenames:
        lines = "\n  ".join(dict.fromkeys(said))
        pytest.fail(f"this test uses names that transformers has renamed:\n  {lines}", pytrace=False)


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """Python's handler of SIGINT, whatever runs the tests; the test fails if it leaves another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)
