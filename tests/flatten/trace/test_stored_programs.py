"""A stored program that is loaded inside the block is the one that torch loads, in less time."""

import sys
import typing
from types import SimpleNamespace

import pytest
import torch
from torch.export import Dim

from yobx_flatten import register_flattening_functions
from yobx_flatten.trace.program import importing_classes, remembering_expressions, remembering_hints


class Joined(torch.nn.Module):
    def forward(self, x, y):
        joined = torch.cat([x, y, x])
        chosen = torch.cond(x.sum() > 0, lambda h: h * 2, lambda h: h.sin(), (joined,))
        return chosen, joined.reshape(-1, 6)[1:], torch.arange(x.shape[0] + y.shape[0])


@pytest.mark.slow  # exports a branch
def test_a_program_is_the_one_that_torch_loads(tmp_path):
    rows = {0: Dim("rows", min=2, max=64) * 2}
    example = (torch.ones(4, 3), torch.ones(6, 3))
    program = torch.export.export(Joined(), example, dynamic_shapes=(rows, {0: Dim("more", min=2) * 2}))
    torch.export.save(program, tmp_path / "joined.pt2")
    plain = torch.export.load(tmp_path / "joined.pt2")
    with register_flattening_functions():
        found = torch.export.load(tmp_path / "joined.pt2")
    assert str(found) == str(plain)
    for one, other in zip(found.graph.nodes, plain.graph.nodes, strict=True):
        assert str(one.meta.get("val")) == str(other.meta.get("val"))
    given = torch.randn(8, 3), torch.randn(12, 3)
    for one, other in zip(found.module()(*given), Joined()(*given), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(AssertionError, match="Guard failed"):
        found.module()(torch.ones(130, 3), torch.ones(6, 3))


def test_a_text_is_parsed_once_for_a_program_and_an_example_size():
    """Again for the next program, whose symbols are its own."""
    parsed = []

    class Deserializer:
        @remembering_expressions
        def parse(self, text, hint=None):
            parsed.append((text, hint))
            return object()

    loader = Deserializer()
    loader.symbol_name_to_symbol = {}
    first = loader.parse("s0 + 1", 5)
    assert loader.parse("s0 + 1", 5) is first
    loader.parse("s0 + 1")
    assert parsed == [("s0 + 1", 5), ("s0 + 1", None)]
    loader.symbol_name_to_symbol = {}
    assert loader.parse("s0 + 1", 5) is not first


def test_the_types_of_fields_are_read_once_for_a_class():
    asked = []

    def get_type_hints(obj, *given, **options):
        asked.append(obj)
        return typing.get_type_hints(obj, *given, **options)

    pair = type("Pair", (), {"__annotations__": {"left": "int", "right": "list[Left]"}})
    remembering = remembering_hints(SimpleNamespace(**{**vars(typing), "get_type_hints": get_type_hints}))
    names = {"Left": str}
    for _ in range(2):
        assert remembering.get_type_hints(pair, globalns=names) == {"left": int, "right": list[str]}
    assert asked == [pair]
    assert remembering.get_type_hints(pair, {"Left": bytes})["right"] == list[bytes]
    assert remembering.get_type_hints(get_type_hints) == {}
    assert remembering.get_origin is typing.get_origin


def test_the_modules_of_unknown_classes_are_imported_whatever_torch_says_of_them(tmp_path, monkeypatch):
    """Before torch reads the specification, and of no library but those that are served."""
    for name in ("served_library", "other_library"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    classes = ("served_library.Output", "other_library.Output", "builtins.dict")
    leaf = {"type": None, "context": None, "children_spec": []}
    below = [{"type": name, "context": "[]", "children_spec": [leaf]} for name in classes]
    read = importing_classes(
        lambda schema: sorted({"served_library", "other_library"} & set(sys.modules)), lambda: ["served_library"]
    )
    found = read({"type": "builtins.tuple", "context": "null", "children_spec": below})
    sys.modules.pop("served_library", None)
    assert found == ["served_library"]
