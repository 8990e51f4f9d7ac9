"""The paths through the code that docs/dev/architecture.md lists are those that the code takes."""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import yobx_flatten
from roundpipe_runtime import RoundPipe

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")


def listed(heading):
    part = PAGE.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `([^`]+\.py)` \| `([^`]+)` \|", part, re.MULTILINE)


def called(function):
    seen = {}

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            seen.setdefault((frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname))

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function(seen.clear)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return list(seen)


def register_a_class(folder, begin_anew):
    class Pair:
        def __init__(self, left, right):
            self.left, self.right = left, right

    with yobx_flatten.register_flattening_functions():
        yobx_flatten.register(Pair, children=["left", "right"])
        try:
            torch.utils._pytree.tree_flatten(Pair(torch.ones(1), torch.ones(2)))
        finally:
            yobx_flatten.unregister_class_flattening(Pair)


def export_a_module(folder, begin_anew):
    yobx_flatten.export_onnx(nn.Linear(3, 2), (torch.randn(2, 3),), path=folder / "model.onnx")


def export_a_folder(folder, begin_anew):
    yobx_flatten.export_folder("mistral", folder / "mistral")


def train_one_step(folder, begin_anew):
    model = RoundPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), devices="virtual:2")
    for number in range(3):
        if number == 2:
            begin_anew()
        model.forward_backward((torch.randn(4, 3),), label=torch.randn(4, 2), loss_fn=nn.functional.mse_loss)
    model.close()


PATHS = {
    "Register a class": register_a_class,
    "Export a module": export_a_module,
    "Export a folder": export_a_folder,
    "One step of a training": train_one_step,
}


def test_all_paths_of_the_page_are_tested():
    assert re.findall("^### (.+)$", PAGE, re.MULTILINE) == list(PATHS)
    assert len(PAGE.splitlines()) <= 150


@pytest.mark.parametrize("heading", PATHS)
def test_functions_run_in_the_order_in_which_the_page_lists_them(heading, tmp_path):
    expected = listed(heading)
    assert len(expected) >= 8
    found = called(lambda begin_anew: PATHS[heading](tmp_path, begin_anew))
    assert [entry for entry in expected if entry not in found] == []
    assert sorted(expected, key=found.index) == expected
