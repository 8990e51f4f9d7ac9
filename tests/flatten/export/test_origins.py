"""Lines of code are named in files by their package: no folder of the author is in what is published."""

import importlib
import io
import pathlib
import sys
import sysconfig

import pytest
import torch

from yobx_flatten import export_onnx, export_program
from yobx_flatten.export.traced import _WithoutGraphs, with_relative_origins

CODE = """
import torch

class Scaled(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y + 1, (x,))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "private" / "pack").mkdir(parents=True)
    (tmp_path / "private" / "pack" / "__init__.py").write_text("")
    (tmp_path / "private" / "pack" / "model.py").write_text(CODE)
    monkeypatch.setattr(torch.fx.config, "do_not_emit_stack_traces", False)  # other tests have no use for them
    monkeypatch.syspath_prepend(str(tmp_path / "private"))
    yield importlib.import_module("pack.model").Scaled()
    for name in ("pack", "pack.model"):
        sys.modules.pop(name)


def test_files_name_no_folder_of_their_author(module, tmp_path):
    """Neither the virtual environment, nor the home, nor the project: torch notes whole paths for each node."""
    example = {"x": torch.ones(3, 4)}
    export_program(module, kwargs=example, cases=[]).save(tmp_path / "model.pt2")
    export_onnx(module, kwargs=example, cases=[], path=tmp_path / "model.onnx")
    for name in ("model.pt2", "model.onnx"):
        data = (tmp_path / name).read_bytes()
        private = [str(tmp_path), str(pathlib.Path.home()), sysconfig.get_paths()["purelib"]]
        assert [one for one in private if one.encode() in data] == [], name
        assert b"pack/model.py" in data


def test_a_line_keeps_its_number_and_its_text(module, tmp_path):
    program = torch.export.export(module, (torch.ones(3, 4),))
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes if node.meta.get("stack_trace")]
    before = [node.meta["stack_trace"] for node in nodes]
    assert len(parts) == 3
    assert any(str(tmp_path) in text for text in before)
    with_relative_origins(program)
    private = f"{tmp_path}/private/"
    assert [node.meta["stack_trace"] for node in nodes] == [text.replace(private, "") for text in before]


def test_what_hides_graphs_may_outlive_the_stream():
    """Python 3.13 closes a stream that is collected, which flushes it."""
    stream = io.StringIO()
    hides = _WithoutGraphs(stream)
    hides.write("def forward(self, x):\n")
    hides.write("a line\n")
    assert stream.getvalue() == "a line\n"
    stream.close()
    hides.close()
    assert hides.closed
