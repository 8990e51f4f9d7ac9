"""All tests of the runtime on the reference accelerator: what is run, and the table of it."""

from pathlib import Path

from tests.accelerator.parts import PARTS, table

_ROOT = Path(__file__).parents[2]


def test_every_test_of_the_runtime_is_in_one_part():
    found = []
    for names in PARTS.values():
        for path in (_ROOT / name for name in names):
            found += [path] if path.is_file() else list(path.rglob("test_*.py"))
    assert sorted(found) == sorted((_ROOT / "tests" / "runtime").rglob("test_*.py"))


def test_the_table_counts_what_passed_is_listed_and_failed():
    rows = table(
        {
            "engine late 1": {"passed": 5, "listed": 2, "skipped": 1, "failed": []},
            "optim late 1": {"passed": 3, "listed": 0, "skipped": 0, "failed": ["test_a"]},
        }
    ).splitlines()
    assert rows[0] == "| folder | late, 1 | late, 2 | late, 4 | random, 1 | random, 2 | random, 4 |"
    assert "| `engine` | 5 + 2 | not run | not run | not run | not run | not run |" in rows
    assert "| `optim` | 3 + 0, 1 failed | not run | not run | not run | not run | not run |" in rows
    assert rows[-1] == "| all | 8 + 2, 1 failed | 0 + 0 | 0 + 0 | 0 + 0 | 0 + 0 | 0 + 0 |"
