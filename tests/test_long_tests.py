"""The list of long tests names tests that there are, and each test is in one part."""

import itertools
import re
from types import SimpleNamespace

from tests import conftest

ROOT = conftest.LONG_TESTS.parents[1]
LINES = conftest.LONG_TESTS.read_text(encoding="utf-8").splitlines()


def test_the_list_is_sorted_and_has_each_test_once():
    assert sorted(set(LINES)) == LINES


def test_each_line_names_a_test_that_there_is():
    """Its file and its function; the values of a parameter change more often, and then the case is no long test."""
    gone = []
    for line in LINES:
        path, *_, function = line.partition("[")[0].split("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if not re.search(rf"def {re.escape(function)}\(", text):
            gone.append(line)
    assert gone == [], "take these lines out of tests/long_tests.txt"


class _Item:
    def __init__(self, nodeid):
        self.nodeid = nodeid
        self.marks = []

    def add_marker(self, mark):
        self.marks.append(mark)


def test_each_test_is_in_one_of_several_parts():
    """Tests of one file are in the same part: what the file makes is made once."""
    names = [f"tests/test_{number}.py::test_{letter}" for number in range(20) for letter in "ab"]
    parts = []
    for part in range(3):
        items, left_out = [_Item(name) for name in names], []
        hook = SimpleNamespace(pytest_deselected=lambda items, left_out=left_out: left_out.extend(items))
        config = SimpleNamespace(option=SimpleNamespace(part=f"{part}/3"), hook=hook)
        conftest.pytest_collection_modifyitems(config, items)
        parts.append([item.nodeid for item in items])
        assert sorted(parts[-1] + [item.nodeid for item in left_out]) == sorted(names)
    assert all(parts)
    assert sorted(itertools.chain(*parts)) == sorted(names)
    files = [{name[:-1] for name in part} for part in parts]
    assert all(not (one & other) for one, other in itertools.combinations(files, 2))


def test_a_listed_test_is_an_extended_one(monkeypatch, tmp_path):
    listed = tmp_path / "long_tests.txt"
    listed.write_text("tests/test_a.py::test_long[1]\n", encoding="utf-8")
    monkeypatch.setattr(conftest, "LONG_TESTS", listed)
    items = [_Item("tests/test_a.py::test_long[1]"), _Item("tests/test_a.py::test_long[2]")]
    conftest.pytest_collection_modifyitems(SimpleNamespace(option=SimpleNamespace(part=None)), items)
    assert [item.marks for item in items] == [["extended"], []]
