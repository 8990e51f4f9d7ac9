"""The table of the guide beside onnx-diagnostic is the one that was measured."""

import json
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
FOUND = json.loads((DOCS / "data" / "store-peer.json").read_text(encoding="utf-8"))
GUIDE = (DOCS / "dev" / "store_format.md").read_text(encoding="utf-8")


def test_the_table_of_the_guide_is_the_measured_one():
    rows = GUIDE.partition("| value | onnx-diagnostic | yobx_flatten |\n|---|---|---|\n")[2].splitlines()
    expected = [
        f"| {name} | {row['onnx-diagnostic']} | {row['yobx_flatten']} |" for name, row in FOUND["values"].items()
    ]
    assert rows == expected


def test_the_guide_names_the_versions():
    for name in ("onnx-diagnostic", "torch", "transformers"):
        assert f"{name} {FOUND['versions'][name]}" in GUIDE


def test_ours_gives_all_of_them_back_and_the_other_fails_on_more_than_ten():
    assert {row["yobx_flatten"] for row in FOUND["values"].values()} == {"the same"}
    assert sum(row["onnx-diagnostic"].startswith("not ") for row in FOUND["values"].values()) > 10
