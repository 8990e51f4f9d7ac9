"""The check behind `no_old_names`: it hears each line about a renamed argument or field, also one that is caught."""

import contextlib
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from tests import fresh_process

deprecation = pytest.importorskip("transformers.utils.deprecation")

LINE = "`old` is deprecated and will be removed in version 9999.0 for `function`. Use `cache` instead."

WITH_AN_OLD_NAME = f"""
import contextlib
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

@deprecate_kwarg("old", "9999.0", new_name="cache")
def function(cache=None): return cache

def test_swallows_the_error():
    with contextlib.suppress(FutureWarning):
        function(old=1)

def test_logs_a_line():
    logging.get_logger("transformers.any").warning_once("`old`/`older` are deprecated. Use `cache` instead.")

def test_logs_it_again():
    test_logs_a_line()

def test_means_it(old_names_said):
    test_swallows_the_error()
    assert old_names_said == ["{LINE}"]

def test_uses_the_new_name():
    assert function(cache=1) == 1
"""


@deprecation.deprecate_kwarg("old", "9999.0", new_name="cache")
def function(cache=None):
    return cache


def test_tests_with_an_old_name_fail_and_others_pass(tmp_path):
    path = tmp_path / "test_made.py"
    path.write_text(WITH_AN_OLD_NAME)
    options = ["-q", "-n", "0", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, cwd=fresh_process.ROOT, capture_output=True, text=True, check=False)
    failed = [line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert failed == ["test_swallows_the_error", "test_logs_a_line", "test_logs_it_again"], done.stdout
    assert "5 passed, 3 errors" in done.stdout
    with pytest.warns(FutureWarning, match="deprecated"):
        deprecation.deprecate_kwarg("a", "9999.0", new_name="b")(lambda b: b)(a=1)


def test_a_warning_is_heard_in_another_thread_and_in_a_program_and_names_the_line_that_calls(old_names_said):
    def run():
        with contextlib.suppress(FutureWarning):
            function(old=1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert old_names_said == [LINE]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(old=1)
    assert [Path(one.filename).name for one in found] == [Path(__file__).name]
    fresh_process.run("-c", f"import sys; print({LINE!r}, file=sys.stderr)")
    assert old_names_said == [LINE] * 3
