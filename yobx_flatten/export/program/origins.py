"""Name lines of code in a program relative to their package: a file is published, and its author's folders are not.

torch notes for each node which lines of Python computed it, with the whole path of each file::

    /home/name/venv/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py, line 60
                                            ──>  transformers/models/llama/modeling_llama.py, line 60
    /home/name/project/model.py, line 12    ──>  model.py, line 12
"""

from __future__ import annotations

import functools
import pathlib
import re

import torch
from torch.export import ExportedProgram

_FILE = re.compile(r'(?<=File ")[^"]+(?=", line )')
_ORIGIN = "stack_trace"


def with_relative_origins(program: ExportedProgram) -> ExportedProgram:
    """Shorten the paths in what a program notes about its nodes; the program is changed in place."""
    for part in program.graph_module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if isinstance(node.meta.get(_ORIGIN), str):
                node.meta[_ORIGIN] = _FILE.sub(lambda found: _relative(found[0]), node.meta[_ORIGIN])
    return program


@functools.lru_cache(maxsize=4096)
def _relative(name: str) -> str:
    """The path of a file from the folder in which its package is."""
    path = pathlib.Path(name)
    root = path.parent
    while (root / "__init__.py").is_file() and root.parent != root:
        root = root.parent
    return path.relative_to(root).as_posix()
